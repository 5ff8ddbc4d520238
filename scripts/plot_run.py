"""Picture of a run: loss and router load by step, from its metrics.jsonl.

python scripts/plot_run.py RUN_FOLDER PICTURE.png      (needs matplotlib: the extra `dev`)
"""

import argparse
import json
import re
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("picture", type=Path, help="PNG to write")
    args = parser.parse_args()
    import matplotlib.pyplot as plt

    records = [json.loads(line) for line in (args.run / "metrics.jsonl").read_text().splitlines()]
    said = (args.run / "log.txt").read_text()
    counted = re.findall(r"baselines.*unigram ([\d.]+), bigram ([\d.]+)", said)
    steps = [r["step"] for r in records]

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), dpi=110)
    left.plot(steps, [r["loss"] for r in records], label="training")
    held_out = [(r["step"], r["eval/loss"]) for r in records if r.get("eval/loss") is not None]
    left.plot(*zip(*held_out, strict=True), "o", label="held out")
    if counted:
        for name, value in zip(("unigram", "bigram"), counted[-1], strict=True):
            left.axhline(float(value), color="grey", lw=0.8, ls="--")
            left.text(steps[-1], float(value), name, ha="right", va="bottom", fontsize=8, color="grey")
    left.set(xlabel="step", ylabel="loss, nats per byte", title="loss")
    left.legend(frameon=False)
    right.plot(steps, [r["router/max_over_mean_load"] for r in records])
    right.axhline(1.0, color="grey", lw=0.8, ls="--")
    right.set(xlabel="step", ylabel="busiest expert / mean, worst layer", title="router load", ylim=(0.9, None))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    args.picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.picture)


if __name__ == "__main__":
    main()
