"""The small model with one part of the recipe exchanged at a time: the numbers of docs/experiments/optimizers.md.

    python scripts/compare_optimizers.py [--steps N] [--seeds N] [--folder DIR] [--page FILE]

Every variant trains configs/tiny.py on one device, on the same tokens for the same steps, once a seed (initialisation
and data order). A run that `--folder` holds already is not repeated, so the script can be stopped and started again.
The numbers go between the two marker lines of the page, the picture beside it (needs matplotlib: the extra `dev`).
"""

import argparse
import json
import logging
import shutil
import time
from pathlib import Path
from statistics import mean, stdev

from page import write_numbers

from k3train.config.load import load
from k3train.parallel.devices import keep_compiled_programs, prepare_devices
from k3train.train.loop import train

#: Low enough for a small model in a short run: K2's 100 would never be reached.
THRESHOLD = 6.0
CLIP = f"qk_clip_threshold={THRESHOLD}"
FULL = "Per-Head Muon + clip"
OPTIMIZERS = {
    "AdamW": ("matrices=adamw", "qk_clip_threshold=0"),
    "Muon, whole matrices": ("muon_heads=whole", "muon_kv_b=joint", "qk_clip_threshold=0"),
    "Per-Head Muon": ("qk_clip_threshold=0",),
    FULL: (CLIP,),
}
BALANCING = {
    "none": (CLIP, "balance=none"),
    "sign rule": (CLIP, "balance=sign"),
    "quantile": (CLIP,),  # the same runs as FULL
}
ROWS = 8  # of 256 tokens, a step

Records = list[dict[str, float]]


def run(variant: tuple[str, ...], seed: int, steps: int, folder: Path) -> Records:
    """The logged steps of one run, trained unless it is there."""
    workdir = folder / "_".join((*variant, f"seed={seed}", f"steps={steps}"))
    log_file = workdir / "metrics.jsonl"
    records = _read(log_file)
    if not records or records[-1]["step"] < steps:
        every = max(1, steps // 6)
        values = [f"optim.{value}" for value in variant] + [
            f"seed={seed}", f"num_steps={steps}", f"eval.every={every}", f"checkpoint.every={steps}", "log.every=1",
            "log.tensorboard=False", "log.sample=", "mesh.data=1", "mesh.expert=1", f"data.batch_size={ROWS}",
        ]  # fmt: skip
        config, _ = load("tiny", [f"--config.{value}" for value in values])
        began = time.perf_counter()
        code = train(config, workdir)
        if code:
            raise SystemExit(f"{workdir} ended with exit code {code}")
        records = _read(log_file)
        shutil.rmtree(workdir / "checkpoints")
        took = time.perf_counter() - began
        print(f"{workdir.name}: held-out loss {records[-1]['eval/loss']:.4f}, {took:.0f} s", flush=True)
    return records


def _read(file: Path) -> Records:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def spread(values: list[float], digits: int) -> str:
    """Mean and standard deviation over the seeds."""
    around = f" ± {stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{mean(values):.{digits}f}{around}"


def row(runs: list[Records]) -> list[str]:
    """The numbers of one variant."""
    late = [[r for r in records if r["step"] > records[-1]["step"] // 2] for records in runs]
    return [
        spread([records[-1]["eval/loss"] for records in runs], 3),
        spread([max(r["mla/max_logit"] for r in records) for records in runs], 1),
        spread([sum(r["qk_clip/num_clipped"] for r in records) for records in runs], 0),
        spread([mean(r["router/max_over_mean_load"] for r in part) for part in late], 2),
        spread([mean(r["router/min_over_mean_load"] for r in part) for part in late], 2),
    ]


HEAD = [
    "held-out loss, nats per byte", "largest logit", "heads clipped, all steps", "busiest expert / mean",
    "idlest expert / mean",
]  # fmt: skip


def table(title: str, results: dict[str, list[Records]]) -> str:
    lines = [f"| {title} | {' | '.join(HEAD)} |", "|---" * (1 + len(HEAD)) + "|"]
    lines += [f"| {name} | {' | '.join(row(runs))} |" for name, runs in results.items()]
    return "\n".join(lines)


def draw(results: dict[str, dict[str, list[Records]]], picture: Path) -> None:
    """Mean of the seeds by step, and from the lowest to the highest of them."""
    import matplotlib.pyplot as plt

    panels = [
        ("eval/loss", "held-out loss, nats per byte"),
        ("mla/max_logit", "largest attention logit"),
        ("router/max_over_mean_load", "busiest expert / mean, worst layer"),
    ]
    figure, grid = plt.subplots(len(results), len(panels), figsize=(13, 3.7 * len(results)), dpi=100, squeeze=False)
    for line, (title, variants) in zip(grid, results.items(), strict=True):
        for axes, (metric, label) in zip(line, panels, strict=True):
            for name, runs in variants.items():
                steps = [r["step"] for r in runs[0] if metric in r]
                values = list(zip(*([r[metric] for r in records if metric in r] for records in runs), strict=True))
                (curve,) = axes.plot(steps, [mean(seeds) for seeds in values], label=name, lw=1.3)
                low, high = [min(seeds) for seeds in values], [max(seeds) for seeds in values]
                axes.fill_between(steps, low, high, color=curve.get_color(), alpha=0.15, lw=0)
            axes.set(xlabel="step", ylabel=label)
            axes.spines[["top", "right"]].set_visible(False)
        line[1].axhline(THRESHOLD, color="grey", lw=0.8, ls="--")
        line[2].axhline(1.0, color="grey", lw=0.8, ls="--")
        line[0].set_title(title, loc="left")
        line[0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("runs/compare_optimizers"), help="where the runs lie")
    parser.add_argument("--page", type=Path, default=Path("docs/experiments/optimizers.md"))
    args = parser.parse_args()
    logging.getLogger("k3train").propagate = False  # each run says everything in its log.txt
    keep_compiled_programs()
    prepare_devices(1)

    results: dict[str, dict[str, list[Records]]] = {"optimizer": {}, "balancing": {}}
    for title, variants in (("optimizer", OPTIMIZERS), ("balancing", BALANCING)):
        for name, variant in variants.items():
            results[title][name] = [run(variant, seed, args.steps, args.folder) for seed in range(args.seeds)]
    numbers = "\n\n".join(table(title, variants) for title, variants in results.items())
    print(numbers)
    write_numbers(args.page, __file__, numbers)
    draw(results, args.page.with_suffix(".png"))


if __name__ == "__main__":
    main()
