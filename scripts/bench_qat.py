"""The training step of configs/tiny_sft.py with routed experts quantised in the loop, against the same step without.

    python scripts/bench_qat.py [--rounds N] [--config FILE]

Random rows, simulated devices as the mesh of the configuration needs. Ratio quantised / not quantised within a
round of turns in one process, in another order each round: the median, and where the middle half of the ratios lies.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict
from statistics import median, quantiles

from peer import milliseconds


def stepper(config) -> Callable[[], float]:
    """One optimizer step as a function."""
    import numpy as np

    from k3train.parallel.mesh import make_mesh
    from k3train.train.step import Program

    program = Program(config, make_mesh(asdict(config.mesh)))
    shape = (config.data.batch_size, config.data.seq_len)
    ids = np.random.default_rng(0).integers(0, 256, shape, dtype=np.int32)
    rows = {"tokens": ids, "segment_ids": np.ones_like(ids), "targets": np.roll(ids, -1, axis=1)}
    held = [program.init()]
    batch = program.put_batch(rows | {"loss_mask": np.ones(shape, np.float32)})

    def run() -> float:
        held[0], metrics = program.train_step(held[0], batch)
        return float(metrics["loss"])

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="at least 2")
    parser.add_argument("--config", default="tiny_sft")
    args = parser.parse_args()

    import jax

    from k3train.config.check import mesh_size, mesh_text
    from k3train.config.load import load
    from k3train.parallel.devices import keep_compiled_programs, prepare_devices

    kinds = ("none", "mxfp4", "mxfp4_mxfp8")
    configs = {kind: load(args.config, [f"--config.quant.experts={kind}"])[0] for kind in kinds}
    plain = configs["none"]
    keep_compiled_programs()
    prepare_devices(mesh_size(plain.mesh))
    print(
        f"jax {jax.__version__} on {jax.default_backend()}, {plain.data.batch_size} x {plain.data.seq_len} tokens, "
        f"{plain.model.compute_dtype}, mesh {mesh_text(plain.mesh)}"
    )
    runs = {kind: stepper(config) for kind, config in configs.items()}
    for run in runs.values():
        run()
        run()
    orders = [kinds[n % 3 :] + kinds[: n % 3] for n in range(args.rounds)]
    turns = [{kind: milliseconds(runs[kind]) for kind in order} for order in orders]
    for kind in kinds:
        low, ratio, high = quantiles([turn[kind] / turn["none"] for turn in turns], n=4)
        step = median(turn[kind] for turn in turns)
        print(f"{kind:12} step {step:7.0f} ms  ratio {ratio:.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
