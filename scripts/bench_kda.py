"""Time, accuracy and memory of KDA's forward and backward pass against its peers, interleaved in one process.

    python scripts/bench_kda.py --sizes 1x2048x4x64 1x4096x8x128

`chunk` is `ops/kda_chunk.py` as the model calls it, with the promise of the bounded gate; `any decay` is the same
without that promise. Peers: the token-by-token `lax.scan` of `ops/kda_reference.py` and, where installed, tokamax's
`xla_chunked`. Everybody computes the bounded gate from raw logits, forward and backward, and gets the layout it likes
best. Ratios are `chunk / row`: below 1, `chunk` is faster. Errors are relative to the largest entry of a float64
recurrence, the worst over all gradients, on a shorter row. Memory is what the compiler reserves for temporaries.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3train.ops.kda_chunk import chunk_kda
from k3train.ops.kda_gate import bounded_log_decay, dt_bias_init
from k3train.ops.kda_reference import recurrent_kda

LOWER_BOUND = -5.0
Inputs = dict[str, jax.Array]
Forward = Callable[[Inputs], jax.Array]
Layout = Callable[[jax.Array], jax.Array]


def make_inputs(B: int, S: int, H: int, D: int, seed: int = 0) -> tuple[Inputs, jax.Array]:
    """Inputs after normalisation, raw gate logits as at initialisation, and a cotangent."""
    rng = np.random.default_rng(seed)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (normal(B, S, H, D), normal(B, S, H, D)))
    inputs = {
        "q": q,
        "k": k,
        "v": normal(B, S, H, D),
        "gate": normal(B, S, H, D),
        "beta": 1 / (1 + np.exp(-normal(B, S, H))),
        "a_log": np.zeros(H, np.float32),
        "dt_bias": np.asarray(dt_bias_init(jax.random.key(seed), (H, D))),
    }
    return {name: jnp.asarray(x) for name, x in inputs.items()}, jnp.asarray(normal(B, S, H, D))


def ours(kda: Callable[..., Any], inputs: Inputs) -> jax.Array:
    log_decay = bounded_log_decay(inputs["gate"] + inputs["dt_bias"], inputs["a_log"], LOWER_BOUND)
    return kda(inputs["q"], inputs["k"], inputs["v"], log_decay, inputs["beta"])[0]


def exact(inputs: Inputs) -> jax.Array:
    """The recurrence in the dtype of the inputs, for float64."""
    z = jnp.exp(inputs["a_log"])[:, None] * (inputs["gate"] + inputs["dt_bias"])
    decay = jnp.exp(LOWER_BOUND * jax.nn.sigmoid(z))

    def token(state, xs):
        q, k, v, decay, beta = xs
        state = state * decay[..., None]
        write = beta[..., None] * (v - jnp.einsum("BHKV,BHK->BHV", state, k))
        state = state + k[..., None] * write[..., None, :]
        return state, jnp.einsum("BHKV,BHK->BHV", state, q) * q.shape[-1] ** -0.5

    rows = [jnp.swapaxes(x, 0, 1) for x in (inputs["q"], inputs["k"], inputs["v"], decay, inputs["beta"])]
    B, S, H, D = inputs["q"].shape
    return jnp.swapaxes(jax.lax.scan(token, jnp.zeros((B, H, D, D), decay.dtype), rows)[1], 0, 1)


def as_is(x: jax.Array) -> jax.Array:
    """[B, S, H, ...]."""
    return x


def tokamax_peer() -> Forward | None:
    """tokamax's chunked KDA on head-first arrays, or None where it is not installed."""
    try:
        from tokamax.ops import kimi_delta_attention
    except ImportError:
        return None

    def peer(inputs: Inputs) -> jax.Array:
        bias, a_log = inputs["dt_bias"].reshape(-1), inputs["a_log"]
        arrays = [inputs[name] for name in ("q", "k", "v", "gate", "beta")]
        return kimi_delta_attention(
            *arrays, a_log=a_log, delta_time_bias=bias, use_gate_in_kernel=True, lower_bound=LOWER_BOUND,
            implementation="xla_chunked",
        )[0]  # fmt: skip

    return peer


def head_first(x: jax.Array) -> jax.Array:
    """[B, S, H, ...] to [H, B, S, ...]; parameters stay as they are."""
    return jnp.moveaxis(x, 2, 0) if x.ndim > 2 else x


def gradient(forward: Forward) -> Callable[[Inputs, jax.Array], Any]:
    return lambda inputs, d_out: jax.grad(lambda x: jnp.sum(forward(x) * d_out))(inputs)


def accuracy(rows: dict[str, tuple[Forward, Layout]], S: int, H: int, D: int) -> dict[str, float]:
    """Worst gradient error of each row."""
    inputs, d_out = make_inputs(1, S, H, D, seed=1)
    with jax.enable_x64(True):
        doubles = jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), (inputs, d_out))
        wanted = jax.tree.map(np.asarray, jax.jit(gradient(exact))(*doubles))
    errors = {}
    for name, (forward, layout) in rows.items():
        got = jax.jit(gradient(forward))(*jax.tree.map(layout, (inputs, d_out)))
        if layout is head_first:
            got = {n: jnp.moveaxis(x, 0, 2) if x.ndim > 2 else x for n, x in got.items()}
        errors[name] = max(float(np.abs(np.asarray(got[n]) - x).max() / np.abs(x).max()) for n, x in wanted.items())
    return errors


def interleaved(calls: dict[str, Callable[[], Any]], runs: int) -> dict[str, float]:
    """Median milliseconds of each, run in turn."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for run in range(-1, runs):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            if run >= 0:  # the first round warms up
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(t) for name, t in times.items()}


def rows_of_table() -> dict[str, tuple[Forward, Layout]]:
    """Name -> (forward, how it likes its arrays)."""
    rows: dict[str, tuple[Forward, Layout]] = {
        "chunk": (partial(ours, partial(chunk_kda, min_log_decay=LOWER_BOUND)), as_is),
        "any decay": (partial(ours, chunk_kda), as_is),
        "recurrence": (partial(ours, recurrent_kda), as_is),
    }
    peer = tokamax_peer()
    return rows if peer is None else rows | {"tokamax": (peer, head_first)}


def bench(size: str, runs: int, error_length: int, backward_of_recurrence: bool) -> None:
    """Prints the table of one size."""
    B, S, H, D = map(int, size.split("x"))
    rows = rows_of_table()
    inputs, d_out = make_inputs(B, S, H, D)
    forward, backward, memory, seconds = {}, {}, {}, {}
    for name, (function, layout) in rows.items():
        arguments = jax.block_until_ready(jax.tree.map(layout, (inputs, d_out)))
        forward[name] = partial(jax.jit(function).lower(arguments[0]).compile(), arguments[0])
        if name == "recurrence" and not backward_of_recurrence:
            continue
        start = time.perf_counter()
        compiled = jax.jit(gradient(function)).lower(*arguments).compile()
        seconds[name] = time.perf_counter() - start
        memory[name] = compiled.memory_analysis().temp_size_in_bytes / 2**20
        backward[name] = partial(compiled, *arguments)
    forward_ms, backward_ms = interleaved(forward, runs), interleaved(backward, runs)
    errors = accuracy(rows, error_length, H, D)
    print(f"\nB{B} S{S} H{H} D{D}, float32, medians of {runs} interleaved runs, errors at S{error_length}")
    titles = ("forward ms", "ratio", "fwd+bwd ms", "ratio", "temp MiB", "compile s", "error")
    print(f"{'':12}" + "".join(f"{title:>12}" for title in titles))
    for name in rows:
        cells = [f"{forward_ms[name]:.1f}", f"{forward_ms['chunk'] / forward_ms[name]:.2f}"]
        if name in backward:
            cells += [f"{backward_ms[name]:.1f}", f"{backward_ms['chunk'] / backward_ms[name]:.2f}"]
            cells += [f"{memory[name]:.0f}", f"{seconds[name]:.1f}"]
        else:
            cells += ["-"] * 4
        print(f"{name:12}" + "".join(f"{cell:>12}" for cell in (*cells, f"{errors[name]:.1e}")), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", default=["1x2048x4x64", "1x4096x8x128"], help="BxSxHxD")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--error-length", type=int, default=512, help="row length of the accuracy check")
    parser.add_argument(
        "--recurrence-backward", action="store_true", help="time the backward pass of the scan too (slow)"
    )
    options = parser.parse_args()
    print(f"jax {jax.__version__}, {jax.devices()[0].device_kind}, {jax.local_device_count()} device(s)")
    if tokamax_peer() is None:
        print("tokamax is not installed (it needs Python 3.12): its rows are left out")
    for size in options.sizes:
        bench(size, options.runs, options.error_length, options.recurrence_backward)


if __name__ == "__main__":
    main()
