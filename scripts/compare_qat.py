"""Quantised while fine-tuning or afterwards: the numbers of docs/experiments/qat.md.

    python scripts/compare_qat.py [--start RUN] [--steps N] [--seeds N] [--folder DIR] [--page FILE]

From one pretraining run, once a seed (order of the data): configs/tiny_sft.py without quantisation, and with routed
experts in MXFP4 and their inputs in MXFP8. The first is evaluated as it is and rounded afterwards, the second as it was
trained. Held-out conversations, trained tokens only: loss, and how often the likeliest token is that of the model in
full precision of the same seed. A run that `--folder` holds already is not repeated. The numbers go between the two
marker lines of the page, the picture beside it (needs matplotlib: the extra `dev`).
"""

import argparse
import logging
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import numpy as np
from page import write_numbers

from k3train.config.load import load as load_config
from k3train.config.schema import QuantConfig
from k3train.data.loader import make_eval_loader
from k3train.inference.run import Run, load
from k3train.parallel.devices import keep_compiled_programs, prepare_devices
from k3train.train.loop import train

FULL, AFTER, IN_LOOP, OTHER = (
    "full precision",
    "rounded afterwards",
    "quantised in the loop",
    "full precision, next seed",
)


class Seen(NamedTuple):
    """A model on all held-out trained tokens."""

    loss: float  # nats per token
    likeliest: np.ndarray


def fine_tuned(kind: str, seed: int, args: argparse.Namespace) -> Run:
    """A fine-tuned run, trained unless it is there."""
    workdir = args.folder / f"{kind}_seed{seed}_steps{args.steps}"
    values = [
        f"quant.experts={kind}", f"seed={seed}", f"init_from={args.start}", f"num_steps={args.steps}",
        f"eval.every={args.steps}", f"checkpoint.every={args.steps}", "log.tensorboard=False", "mesh.data=1",
        "mesh.expert=1", f"data.batch_size={args.rows}",
    ]  # fmt: skip
    config, _ = load_config("tiny_sft", [f"--config.{value}" for value in values])
    if code := train(config, workdir):
        raise SystemExit(f"{workdir} ended with exit code {code}")
    return load(workdir)


def seen(run: Run) -> Seen:
    """One forward pass over the held-out rows."""
    total, likeliest, count = 0.0, [], 0
    for batch in make_eval_loader(replace(run.config.data, eval_batches=0)):
        logits_BSX = run.logits(batch["tokens"], batch["segment_ids"])
        trained_BS = batch["loss_mask"] > 0
        logits_PX, target_P = logits_BSX[trained_BS].astype(np.float64), batch["targets"][trained_BS]
        largest_P1 = logits_PX.max(axis=1, keepdims=True)
        norm_P = np.log(np.exp(logits_PX - largest_P1).sum(axis=1)) + largest_P1[:, 0]
        total += float((norm_P - logits_PX[np.arange(len(target_P)), target_P]).sum())
        likeliest.append(logits_PX.argmax(axis=1))
        count += len(target_P)
    return Seen(total / count, np.concatenate(likeliest))


def one_seed(seed: int, args: argparse.Namespace) -> dict[str, Seen]:
    """The three models of a seed."""
    full, in_loop = fine_tuned("none", seed, args), fine_tuned("mxfp4_mxfp8", seed, args)
    assert in_loop.config.quant.experts == "mxfp4_mxfp8"
    rounded = replace(full.config, quant=QuantConfig(experts="mxfp4_mxfp8"))
    after = Run(rounded, full.weights.params, full.weights.bias, step=full.step)
    results = {FULL: seen(full), AFTER: seen(after), IN_LOOP: seen(in_loop)}
    said = ", ".join(f"{name} {result.loss:.4f}" for name, result in results.items())
    print(f"seed {seed}: held-out loss {said}", flush=True)
    return results


def spread(values: list[float], digits: int) -> str:
    """Mean and standard deviation over the seeds."""
    around = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{around}"


def numbers(results: list[dict[str, Seen]]) -> dict[str, tuple[list[float], list[float]]]:
    """By model: held-out losses, and per cent of tokens on which it agrees with full precision."""
    shifted = [*results[1:], results[0]]
    rows = [one | {OTHER: other[FULL]} for one, other in zip(results, shifted, strict=True)]
    return {
        name: (
            [row[name].loss for row in rows],
            [100 * float((row[name].likeliest == row[FULL].likeliest).mean()) for row in rows],
        )
        for name in (FULL, AFTER, IN_LOOP, OTHER)
        if name != OTHER or len(results) > 1
    }


def table(found: dict[str, tuple[list[float], list[float]]]) -> str:
    lines = [
        f"| model | held-out loss, nats per token | minus {FULL} | minus {AFTER} | same likeliest token |",
        "|---|---|---|---|---|",
    ]
    for name, (losses, agreement) in found.items():
        paired = [[a - b for a, b in zip(losses, found[other][0], strict=True)] for other in (FULL, AFTER)]
        differences = " | ".join("" if not any(apart) else spread(apart, 4) for apart in paired)
        lines.append(f"| {name} | {spread(losses, 4)} | {differences} | {spread(agreement, 2)} % |")
    return "\n".join(lines)


def draw(found: dict[str, tuple[list[float], list[float]]], picture: Path) -> None:
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(11, 3.4), dpi=100, sharey=True)
    for axes, index, label in zip(
        panels, (0, 1), ("held-out loss, nats per token", "same likeliest token, %"), strict=True
    ):
        for place, (name, values) in enumerate(found.items()):
            for seed, value in enumerate(values[index]):  # a mark of its own, so that pairs are seen
                if name != (OTHER, FULL)[index]:
                    axes.plot(value, place, "os^Dv"[seed % 5], color=f"C{place}", alpha=0.8)
        axes.set(xlabel=label, yticks=range(len(found)), yticklabels=list(found))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--start", type=Path, default=Path("runs/tiny"), help="pretraining run")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rows", type=int, default=8, help="of a step")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("runs/compare_qat"), help="where the runs lie")
    parser.add_argument("--page", type=Path, default=Path("docs/experiments/qat.md"))
    args = parser.parse_args()
    logging.getLogger("k3train").propagate = False  # each run says everything in its log.txt
    keep_compiled_programs()
    prepare_devices(1)

    found = numbers([one_seed(seed, args) for seed in range(args.seeds)])
    text = table(found)
    print(text)
    write_numbers(args.page, __file__, text)
    draw(found, args.page.with_suffix(".png"))


if __name__ == "__main__":
    main()
