"""The histogram update of the router bias against `jnp.quantile` and the exact estimator on the same margins.

    python scripts/bench_quantile.py [--tokens N] [--experts N] [--rounds N]

One layer: from [tokens, experts] float32 margins to the next bias, compiled, one device. Times are medians in
milliseconds over interleaved rounds; ratio: the histogram's time over the other's, per round.
"""

import argparse
import time
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np

from k3train.ops import quantile
from k3train.ops.routing import route

SELECTED, BINS = 16, 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=896)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()

    rng = np.random.default_rng(0)
    logits = rng.normal(size=(args.tokens, args.experts)) + rng.normal(size=args.experts)
    bias = jnp.asarray(0.05 * rng.normal(size=args.experts), jnp.float32)
    routes = route(jnp.asarray(logits, jnp.float32), bias, num_selected=SELECTED)
    margins = quantile.margins(routes.scores_PE, routes.cutoff_P, jnp.ones(args.tokens, bool))
    share = SELECTED / args.experts

    def histogram(margins, bias):
        return quantile.quantile_bias(quantile.histogram(margins, bias, num_bins=BINS), bias, num_selected=SELECTED)

    def exact(margins, bias):
        return quantile.exact_bias(margins, bias, num_selected=SELECTED)

    def by_jax(margins, bias):
        found = jnp.quantile(margins, share, axis=0)
        return found - jnp.mean(found)

    runs = {"histogram": jax.jit(histogram), "exact": jax.jit(exact), "jnp.quantile": jax.jit(by_jax)}
    results = {name: np.asarray(run(margins, bias)) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run(margins, bias))
            times[name].append(1e3 * (time.perf_counter() - start))

    print(f"jax {jax.__version__} on {jax.default_backend()}: [{args.tokens}, {args.experts}] margins, {BINS} bins")
    for name in runs:
        ratio = median(a / b for a, b in zip(times["histogram"], times[name], strict=True))
        far = np.abs(results["histogram"] - results[name]).max()
        print(f"{name:13} {median(times[name]):8.2f} ms  histogram / this {ratio:.3f}  bias differs by up to {far:.1e}")


if __name__ == "__main__":
    main()
