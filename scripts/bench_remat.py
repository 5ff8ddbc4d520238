"""What the remat policies cost and save: bytes of the compiled gradient, bytes kept, operations.

    python scripts/bench_remat.py [--tokens 2048] [--layers 12]

Loss and gradients of a K3 of middle size (width 512, blocks of four layers, three KDA and one MLA in turn, 32 experts
of which 4 are chosen) on one row, in the compute dtype of the CPU, float32; one device, no optimizer. Temporaries are
the compiler's; kept bytes are what `jax.vjp` keeps; operations are the matrix products of the compiled program with its
loops multiplied out, and those of the routed experts, whose loop follows the loads, by formula.
"""

import argparse
import time
from dataclasses import replace
from typing import Any


def config_of(num_layers: int, tokens: int):
    from k3train.config.schema import Config, DataConfig, ModelConfig

    layers = range(num_layers)
    mla = tuple(i for i in layers if i % 4 == 3)
    model = ModelConfig(
        vocab_size=1024, hidden_size=512, num_layers=num_layers, mla_layers=mla,
        kda_layers=tuple(i for i in layers if i not in mla), dense_layers=(0,), moe_layers=tuple(layers[1:]),
        intermediate_size=2048, kda_num_heads=8, kda_head_dim=64, kda_gate_rank=64, mla_num_heads=8,
        mla_q_lora_rank=128, mla_kv_lora_rank=128, mla_qk_nope_head_dim=64, mla_qk_rope_head_dim=32, mla_v_head_dim=64,
        num_experts=32, num_experts_per_token=4, moe_latent_size=256, moe_intermediate_size=256, attn_res_block_size=4,
    )  # fmt: skip
    return Config(model=model, data=DataConfig(seq_len=tokens, batch_size=1))


def measure(config) -> tuple[int, float, float]:
    """(temporaries in bytes, operations, seconds to compile) of the gradient under the config's policy."""
    import jax
    import jax.numpy as jnp

    from k3train.audit.hlo import computations, product_flops
    from k3train.audit.roofline import routed_flops
    from k3train.model.k3 import blueprint
    from k3train.train.loss import token_loss

    plan = blueprint(config.model)
    row = jax.ShapeDtypeStruct((1, config.data.seq_len), jnp.int32)
    weights = jax.ShapeDtypeStruct(row.shape, jnp.float32)
    batch = {"tokens": row, "segment_ids": row, "targets": row, "loss_mask": weights}

    def loss(params, bias, batch):
        return token_loss(plan, params, bias, batch, collect=True)[0].loss

    start = time.process_time()
    lowered = jax.jit(jax.grad(loss)).lower(plan.abstract_params, plan.abstract_bias, batch)
    compiled: Any = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})
    memory = compiled.memory_analysis()
    products, _ = product_flops(computations(compiled.as_text()))
    return memory.temp_size_in_bytes, products + routed_flops(config), time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=12)
    args = parser.parse_args()
    import jax

    from k3train.audit.budget import POLICIES, kept_bytes

    print(f"jax {jax.__version__} on {jax.default_backend()}, {args.layers} layers, {args.tokens} tokens")
    print(f"{'policy':<20}{'temporaries MiB':>17}{'kept MiB':>11}{'GFLOP':>10}{'again':>9}{'compile s':>11}")
    config, first = config_of(args.layers, args.tokens), 0.0
    for policy in POLICIES:
        each = replace(config, model=replace(config.model, remat=policy))
        temporaries, operations, seconds = measure(each)
        first = first or operations
        print(
            f"{policy:<20}{temporaries / 2**20:>17,.0f}{kept_bytes(each, policy) / 2**20:>11,.0f}"
            f"{operations / 1e9:>10,.0f}{operations / first - 1:>9.1%}{seconds:>11.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
