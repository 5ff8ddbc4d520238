"""What the backward pass computes again changes memory, never a gradient."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.config.schema import ModelConfig
from k3train.model.k3 import blueprint
from tests.tolerances import assert_close

#: A layer a block: the first, then two equal blocks (scanned).
BLOCKS = ModelConfig(
    vocab_size=32,
    hidden_size=16,
    num_layers=3,
    kda_layers=(),
    mla_layers=(0, 1, 2),
    dense_layers=(0, 1, 2),
    moe_layers=(),
    intermediate_size=16,
    mla_num_heads=1,
    mla_q_lora_rank=0,
    mla_kv_lora_rank=8,
    mla_qk_nope_head_dim=8,
    mla_qk_rope_head_dim=0,
    mla_v_head_dim=8,
    attn_res_block_size=1,
    init_fan_in=True,
)
PLAIN = replace(BLOCKS, attn_res="none", attn_res_block_size=ModelConfig.attn_res_block_size)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 40)), jnp.int32)


def loss(config):
    def of(params):
        out = blueprint(config).module(params, {}).hidden(TOKENS, jnp.ones_like(TOKENS))
        return jnp.sum(jnp.sin(out.hidden))

    return of


@cache
def parameters(config):
    """Drawn; the queries too, which start at zero."""
    draw = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: jnp.asarray(draw.normal(0, 0.3, x.shape), jnp.float32), blueprint(config).abstract_params
    )


@cache
def gradients(config, remat):
    params = parameters(config)
    return jax.jit(jax.grad(loss(replace(config, remat=remat))))(params)


def kept(config, remat):
    """Numbers that the forward pass keeps for the backward pass, parameters not counted."""
    params = blueprint(config).abstract_params
    saved = jax.eval_shape(lambda p: jax.vjp(loss(replace(config, remat=remat)), p)[1], params)
    return sum(x.size for x in jax.tree.leaves(saved)) - sum(x.size for x in jax.tree.leaves(params))


@pytest.mark.parametrize("remat", ["attention_residuals", "sublayer", "block"])
def test_gradients_are_those_of_none(remat):
    jax.tree.map(lambda a, b: assert_close(a, b, "same model"), gradients(BLOCKS, remat), gradients(BLOCKS, "none"))


def test_every_policy_keeps_less_than_the_one_before():
    for config in (BLOCKS, PLAIN):
        amounts = [kept(config, remat) for remat in ("none", "attention_residuals", "sublayer", "block")]
        assert amounts == sorted(amounts, reverse=True), (config.attn_res, amounts)


def deep(config, num_layers):
    """One block of so many layers, all but the first scanned."""
    layers = tuple(range(num_layers))
    return replace(config, num_layers=num_layers, mla_layers=layers, dense_layers=layers)


def test_a_layer_keeps_what_a_layer_of_a_plain_residual_network_keeps():
    """Report section 5.2.2: with its reads over depth computed again."""

    def a_layer(config, remat):
        return kept(deep(config, 4), remat) - kept(deep(config, 3), remat)

    blocks = replace(BLOCKS, attn_res_block_size=16)
    assert a_layer(blocks, "attention_residuals") <= a_layer(PLAIN, "none") < a_layer(blocks, "none")
