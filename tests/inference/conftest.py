"""A small model with every mechanism: KDA and MLA layers, equal blocks that are scanned, a latent MoE."""

from typing import NamedTuple

import jax
import numpy as np
import pytest

from k3train.config.schema import ModelConfig
from k3train.inference.engine import Engine, Weights
from k3train.parallel.mesh import make_mesh


class Micro(NamedTuple):
    config: ModelConfig
    weights: Weights
    engine: Engine  # on one device, pieces of at most 16 tokens

    def on(self, engine: Engine) -> Weights:
        """The weights where another engine wants them."""
        return jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), self.weights, engine.abstract_weights())


def random_weights(engine: Engine) -> Weights:
    """By numpy: the model's own initialisers would be compiled one by one."""
    rng = np.random.default_rng(7)
    centres = {"gain": 1.0, "o_norm": 1.0, "dt_bias": -4.0}  # norms near 1; slow decay, so that states last

    def random(path, x):
        name = path[-1].key
        spread = 0.1 if name in ("gain", "query") else 0.2
        value = centres.get(name, 0.0) + spread * rng.normal(size=x.shape)
        return jax.device_put(value.astype(x.dtype), x.sharding)

    return jax.tree_util.tree_map_with_path(random, engine.abstract_weights())


@pytest.fixture(scope="session")
def micro() -> Micro:
    config = ModelConfig(
        vocab_size=264, hidden_size=32, num_layers=6, kda_layers=(2, 4), mla_layers=(0, 1, 3, 5), dense_layers=(0,),
        moe_layers=(1, 2, 3, 4, 5), intermediate_size=48, kda_num_heads=2, kda_head_dim=16, kda_gate_rank=8,
        kda_chunk_size=16, mla_num_heads=2, mla_q_lora_rank=16, mla_kv_lora_rank=16, mla_qk_nope_head_dim=16,
        mla_qk_rope_head_dim=8, mla_v_head_dim=16, attn_res_block_size=2, num_experts=8, num_experts_per_token=2,
        moe_intermediate_size=16, moe_latent_size=16, init_fan_in=True,
    )  # fmt: skip
    engine = Engine(config, make_mesh({}, jax.devices()[:1]), chunk=32)
    return Micro(config, random_weights(engine), engine)
