"""What depth costs before the first step: tracing, lowering and compiling the training step of K3 at small widths.

    python scripts/bench_depth.py [--layers 13 93]

K3's own layer lists (three KDA layers and one MLA layer in turn, MLA last, attention-residual blocks of 12 layers), cut
to so many layers, on one device. Seconds of processor time, and the size of the lowered program; ratios to the first.
"""

import argparse
import time


def step_of(num_layers: int):
    """The jitted training step and its abstract arguments."""
    import jax
    import jax.numpy as jnp

    from k3train.config.schema import Config, DataConfig, ModelConfig
    from k3train.parallel.mesh import make_mesh
    from k3train.train.step import Program

    layers = range(num_layers)
    mla = tuple(i for i in layers if i % 4 == 3 or i == num_layers - 1)
    model = ModelConfig(
        vocab_size=256, hidden_size=64, num_layers=num_layers, mla_layers=mla,
        kda_layers=tuple(i for i in layers if i not in mla), dense_layers=(0,), moe_layers=tuple(layers[1:]),
        intermediate_size=64, kda_num_heads=2, kda_head_dim=16, kda_gate_rank=16, mla_num_heads=2, mla_q_lora_rank=16,
        mla_kv_lora_rank=16, mla_qk_nope_head_dim=16, mla_qk_rope_head_dim=8, mla_v_head_dim=16, num_experts=16,
        num_experts_per_token=4, moe_latent_size=32, moe_intermediate_size=32, attn_res_block_size=12, remat="sublayer",
    )  # fmt: skip
    config = Config(model=model, data=DataConfig(seq_len=128, batch_size=2))
    program = Program(config, make_mesh({}, jax.devices()[:1]))
    row = jax.ShapeDtypeStruct((2, 128), jnp.int32)
    weights = jax.ShapeDtypeStruct((2, 128), jnp.float32)
    return program, {"tokens": row, "segment_ids": row, "targets": row, "loss_mask": weights}


def measure(num_layers: int) -> tuple[float, float, int]:
    """(processor seconds of tracing and lowering, of compiling, characters of the lowered program)."""
    start = time.process_time()
    program, batch = step_of(num_layers)
    lowered = program.lower(batch)
    traced = time.process_time()
    lowered.compile()
    return traced - start, time.process_time() - traced, len(lowered.as_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[13, 93])
    args = parser.parse_args()
    import jax

    print(f"jax {jax.__version__} on {jax.default_backend()}")
    measure(2)  # what only the first program of a process pays
    first = None
    for num_layers in args.layers:
        traced, compiled, size = measure(num_layers)
        first = first or (traced + compiled, size)
        print(
            f"{num_layers:3} layers  trace and lower {traced:6.1f} s  compile {compiled:6.1f} s  "
            f"time {(traced + compiled) / first[0]:.2f}  program {size / 1e6:.1f} MB  size {size / first[1]:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
