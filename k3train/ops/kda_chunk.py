"""Kimi Delta Attention in chunks: matrix products inside a chunk, one small recurrence over chunks.

Same result as `kda_reference.recurrent_kda` (docs/k3.md section 2.2, "Chunk form"). With the notation of `kda_tiles`,
S the state before a chunk, and q~, k~, k^ decayed from the start or to the end of the chunk:

    U = (I + L)^-1 (beta v - beta k~ S)        out = q~ S + A U        S' = exp(G_end) S + k^^T U

The backward pass is written out. With D the gradient of S' it takes  dU = (I + L)^-T (A^T d_out + k^ D),
Z = [d_out; -dU] and products of Z, U, S and D. Saved per chunk are S, A and (I + L)^-1; all else is computed again.

Axes as in `kda_tiles`; N chunks are handled at once, and Z and the rows of `Factors` are interleaved tile by tile.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from k3train.ops import kda_tiles
from k3train.ops.kda_reference import check_shapes, recurrent_kda
from k3train.ops.kda_tiles import TILE, Factors
from k3train.ops.segments import segment_runs

# Chunks whose inside is computed at once. A CPU wants them one by one, in its cache; other devices want large products.
CPU_CHUNKS_AT_ONCE = 1
DEVICE_CHUNKS_AT_ONCE = 16
# Up to this many state entries per head, one token at a time is the faster forward pass on a CPU.
CPU_RECURRENCE_STATE = 64 * 64
# Strongest decay for which the middle of a tile serves as anchor: docs/k3.md section 2.2, "16-token tiles".
TILE_ANCHOR_LOG_DECAY = -5.0


def chunk_kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    *,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    chunk_size: int = 64,
    min_log_decay: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`recurrent_kda`, fast for long rows: same arguments, same result, any length, any decay.

    Not differentiated on a CPU and with small heads it is the recurrence, which is faster there.

    Args:
        chunk_size: tokens per chunk, a power of two from 16 on.
        min_log_decay: a promise of the caller that no log decay lies below it (the lower bound of a bounded gate). From
            -5 on it makes the products inside a tile cheaper; a broken promise shows as NaN. None: no promise.

    Raises:
        ValueError: shapes that do not fit together, or another chunk size.
    """
    check_shapes(q, k, v, log_decay, beta, initial_state, segment_ids)
    if chunk_size < TILE or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size must be a power of two from {TILE} on, got {chunk_size}")
    B, S, H, K = q.shape
    V = v.shape[-1]
    while chunk_size > TILE and chunk_size // 2 >= S:
        chunk_size //= 2
    on_cpu = jax.default_backend() == "cpu"
    num_chunks = -(-S // chunk_size)
    steps = -(-num_chunks // (CPU_CHUNKS_AT_ONCE if on_cpu else DEVICE_CHUNKS_AT_ONCE))
    options = Options(
        scale=K**-0.5 if scale is None else scale,
        chunk=chunk_size,
        at_once=-(-num_chunks // steps),
        bounded=min_log_decay is not None and min_log_decay >= TILE_ANCHOR_LOG_DECAY,
        recurrent_forward=on_cpu and K * V <= CPU_RECURRENCE_STATE,
    )
    state = jnp.zeros((B, H, K, V), jnp.float32) if initial_state is None else initial_state.astype(jnp.float32)
    padding = -S % (chunk_size * options.at_once)  # with zeros: they neither decay nor write
    q, k, v, log_decay, beta = (
        jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2)) for x in (q, k, v, log_decay, beta)
    )
    if segment_ids is not None:
        segment_ids = jnp.pad(segment_ids, ((0, 0), (0, padding)))
    result: tuple[jax.Array, jax.Array] = _chunked(options, q, k, v, log_decay, beta, state, segment_ids)
    return result[0][:, :S], result[1]


class Options(NamedTuple):
    """Static choices of `_chunked`."""

    scale: float
    chunk: int
    at_once: int
    bounded: bool
    recurrent_forward: bool


class Masks(NamedTuple):
    """Which tokens of a chunk belong together, 1 or 0; broadcast over heads."""

    entering: jax.Array  # [N, B, 1, M, 16, 1] in the document that the chunk starts in
    leaving: jax.Array  # [N, B, 1, M, 16, 1] in the document that the chunk ends in
    through: jax.Array  # [N, B, 1, 1]: one document enters and leaves
    same: jax.Array  # bool [N, B, 1, M, 1, 16, C] row and column in one document


class Chunk(NamedTuple):
    """Inputs of N chunks, float32, silent at padding."""

    q: jax.Array  # [N, B, H, M, 16, K], scaled
    k: jax.Array  # [N, B, H, M, 16, K]
    v: jax.Array  # [N, B, H, C, V]
    beta: jax.Array  # [N, B, H, C, 1]
    g_NBCHK: jax.Array
    real_NBC: jax.Array | None  # bool: not padding
    masks: Masks | None


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _chunked(options, q, k, v, log_decay, beta, state, segment_ids):
    if options.recurrent_forward:
        return recurrent_kda(
            q, k, v, log_decay, beta, scale=options.scale, initial_state=state, segment_ids=segment_ids
        )
    return _forward(options, q, k, v, log_decay, beta, state, segment_ids, save=False)[0]


def _forward(options, q, k, v, log_decay, beta, state, segment_ids, save: bool = True):
    tokens = options.chunk * options.at_once
    runs = None if segment_ids is None else segment_runs(segment_ids)

    def step(carry, index):
        state_BHKV, out_BSHV = carry
        chunk = _read_chunk(options, index, q, k, v, log_decay, beta, runs)
        f = _factors(options, chunk)
        A, L = _products(options, chunk, f)
        inverse = kda_tiles.unit_lower_inverse(L)
        entering, leaving, kept = _decays(f, chunk.masks)
        rows = _flat(f.rows * _both(entering))
        cols = _flat(f.cols * leaving)

        def over_chunk(state_BHKV, xs):
            rows, cols, kept, inverse, A, beta_v = xs
            read, recalled = _apart(rows @ state_BHKV)
            U = inverse @ (beta_v - recalled)
            new = kept[..., None] * state_BHKV + jnp.swapaxes(cols, -1, -2) @ U
            return new, (state_BHKV, read + A @ U)

        xs = (rows, cols, kept, inverse, A, chunk.beta * chunk.v)
        state_BHKV, (before, out) = jax.lax.scan(over_chunk, state_BHKV, xs, unroll=options.at_once == 1)
        out_BSHV = _write(out_BSHV, out, index, tokens)
        return (state_BHKV, out_BSHV), ((before, A, inverse) if save else None)

    steps = jnp.arange(q.shape[1] // tokens)
    (state, out), saved = jax.lax.scan(step, (state, jnp.zeros_like(v)), steps)
    return (out, state), (q, k, v, log_decay, beta, segment_ids, saved)


def _backward(options, residuals, cotangents):
    q, k, v, log_decay, beta, segment_ids, saved = residuals
    d_out, d_state = cotangents
    tokens = options.chunk * options.at_once
    runs = None if segment_ids is None else segment_runs(segment_ids)

    def step(carry, xs):
        D_BHKV, *written = carry
        index, (before, A, inverse) = xs
        chunk = _read_chunk(options, index, q, k, v, log_decay, beta, runs)
        do = _read(d_out, index, tokens, options.chunk, chunk.real_NBC)
        f = _factors(options, chunk)
        entering, leaving, kept = _decays(f, chunk.masks)
        rows, cols = _flat(f.rows * _both(entering)), _flat(f.cols * leaving)
        _, recalled = _apart(rows @ before)
        U = inverse @ (chunk.beta * chunk.v - recalled)
        dU_here = jnp.swapaxes(A, -1, -2) @ do

        def over_chunk(D_BHKV, xs):
            rows, cols, kept, inverse, do, dU_here = xs
            dU = jnp.swapaxes(inverse, -1, -2) @ (dU_here + cols @ D_BHKV)
            Z = _interleave(do, -dU)
            return kept[..., None] * D_BHKV + jnp.swapaxes(rows, -1, -2) @ Z, (D_BHKV, dU, Z)

        xs = (rows, cols, kept, inverse, do, dU_here)
        D_BHKV, (D, dU, Z) = jax.lax.scan(over_chunk, D_BHKV, xs, reverse=True, unroll=options.at_once == 1)
        grads = _input_gradients(options, chunk, f, Grads(before, D, U, dU, Z, do))
        written = [_write(buffer, grad, index, tokens) for buffer, grad in zip(written, grads, strict=True)]
        return (D_BHKV, *written), None

    steps = jnp.arange(q.shape[1] // tokens)
    buffers = [jnp.zeros_like(x) for x in (q, k, v, log_decay, beta[..., None])]
    (d_state, *grads), _ = jax.lax.scan(step, (d_state, *buffers), (steps, saved), reverse=True)
    return *grads[:-1], grads[-1][..., 0], d_state, None


_chunked.defvjp(_forward, _backward)


class Grads(NamedTuple):
    """What the recurrence over chunks leaves for the gradients of its inputs."""

    before: jax.Array  # [N, B, H, K, V] state before each chunk
    D: jax.Array  # gradient of the state after it
    U: jax.Array  # [N, B, H, C, V]
    dU: jax.Array  # gradient of beta v - beta k~ S
    Z: jax.Array  # [N, B, H, 2C, V]
    do: jax.Array


def _input_gradients(options: Options, chunk: Chunk, f: Factors, s: Grads) -> tuple[jax.Array, ...]:
    """Gradients of q, k, v, log_decay, beta of the chunks, [N, B, H, C, .]."""
    *batch, M, _, K = chunk.q.shape
    C = M * TILE
    entering, leaving, kept = _decays(f, chunk.masks)
    d_products = (s.Z @ jnp.swapaxes(s.U, -1, -2)).reshape(*batch, M, 2, TILE, C)
    if chunk.masks is not None:
        d_products = jnp.where(chunk.masks.same, d_products, 0.0)
    d_rows, d_cols, d_in_tile = kda_tiles.pair_products_vjp(f, d_products)
    d_rows += (s.Z @ jnp.swapaxes(s.before, -1, -2)).reshape(f.rows.shape) * _both(entering)
    d_leaving = (s.U @ jnp.swapaxes(s.D, -1, -2)).reshape(f.cols.shape) * leaving * f.from_col
    beta = chunk.beta.reshape(*batch, M, TILE, 1)
    beta_k = beta * chunk.k
    if options.bounded:
        d_tile_rows, d_tile_cols = kda_tiles.tile_products_bounded_vjp(f, d_in_tile)
        d_rows, d_cols = d_rows + d_tile_rows, d_cols + d_tile_cols
        d_itself = jnp.sum(s.do * s.U, axis=-1).reshape(*batch, M, TILE, 1)
        direct = (d_itself * chunk.k, 0.0, d_itself * chunk.q, 0.0)
    else:
        g = jnp.moveaxis(chunk.g_NBCHK.reshape(*batch[:2], M, TILE, -1, K), 4, 2)
        _, pull = jax.vjp(kda_tiles.tile_products_halving, chunk.q, beta_k, chunk.k, g)
        direct = pull(d_in_tile)
    # Through the decayed rows and columns: a log decay counts in the rows at or after it and the columns before it.
    dq, d_beta_k = d_rows[..., :TILE, :] * f.to_row, d_rows[..., TILE:, :] * f.to_row
    dk = d_cols * f.from_col
    d_later = chunk.q * dq + beta_k * d_beta_k - chunk.k * dk
    dg = _sum_over(np.tri(C).T, d_later) + _sum_over(np.tri(C, k=-1), chunk.k * d_leaving)
    dg += (jnp.sum(s.before * s.D, axis=-1) * kept)[..., None, :]
    dq, d_beta_k, dk, dg = dq + direct[0], d_beta_k + direct[1], dk + direct[2], dg.reshape(dq.shape) + direct[3]
    d_beta = jnp.sum(chunk.k * d_beta_k, axis=-1).reshape(*batch, C, 1)
    d_beta += jnp.sum(s.dU * chunk.v, axis=-1, keepdims=True)
    if chunk.real_NBC is not None:
        dg = jnp.where(chunk.real_NBC.reshape(*batch[:2], 1, M, TILE, 1), dg, 0.0)
    dk += beta * d_beta_k + d_leaving
    return _flat(dq * options.scale), _flat(dk), chunk.beta * s.dU, _flat(dg), d_beta


def _factors(options: Options, chunk: Chunk) -> Factors:
    beta = chunk.beta.reshape(*chunk.k.shape[:-1], 1)
    return kda_tiles.factors(chunk.q, chunk.k, beta, chunk.g_NBCHK, bounded=options.bounded)


def _products(options: Options, chunk: Chunk, f: Factors) -> tuple[jax.Array, jax.Array]:
    """A and L, [N, B, H, C, C]."""
    *batch, M, _, K = chunk.k.shape
    if options.bounded:
        in_tile = kda_tiles.tile_products_bounded(f)
    else:
        beta_k = chunk.beta.reshape(*batch, M, TILE, 1) * chunk.k
        g = jnp.moveaxis(chunk.g_NBCHK.reshape(*batch[:2], M, TILE, -1, K), 4, 2)
        in_tile = kda_tiles.tile_products_halving(chunk.q, beta_k, chunk.k, g)
    products = kda_tiles.pair_products(f, in_tile)
    if chunk.masks is not None:
        products = jnp.where(chunk.masks.same, products, 0.0)
    C = M * TILE
    return products[..., 0, :, :].reshape(*batch, C, C), products[..., 1, :, :].reshape(*batch, C, C)


def _decays(f: Factors, masks: Masks | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Factors from the start of a chunk to its rows, from its columns to its end, and through it."""
    if masks is None:
        return f.start, f.end, f.whole
    return f.start * masks.entering, f.end * masks.leaving, f.whole * masks.through


def _read_chunk(options: Options, index, q, k, v, log_decay, beta, runs) -> Chunk:
    """Chunks of step `index`; `runs` from `segment_runs`, or None."""
    C, tokens = options.chunk, options.chunk * options.at_once
    real, masks = None, None
    if runs is not None:
        run_BS, real_BS = runs
        real, masks = _slice(real_BS, index, tokens, C), _masks(run_BS, index, tokens, C)
    q, k, v, beta = (_read(x, index, tokens, C, real) for x in (q, k, v, beta[..., None]))
    g = _slice(log_decay, index, tokens, C).astype(jnp.float32)
    if real is not None:
        g = jnp.where(real[..., None, None], g, 0.0)
    tiled = (*q.shape[:3], C // TILE, TILE, q.shape[-1])
    return Chunk(options.scale * q.reshape(tiled), k.reshape(tiled), v, beta, g, real, masks)


def _masks(run_BS: jax.Array, index, tokens: int, C: int) -> Masks:
    run_NBC = _slice(run_BS, index, tokens, C)
    previous = jax.lax.dynamic_slice_in_dim(run_BS, jnp.maximum(index * tokens - 1, 0), 1, axis=1)[:, 0]
    previous = jnp.where(index == 0, 0, previous)  # the first document of a row continues the initial state
    start_NB = jnp.concatenate([previous[None], run_NBC[:-1, :, -1]])
    end_NB = run_NBC[:, :, -1]
    N, B, _ = run_NBC.shape

    def tiled(mask_NBC):
        return mask_NBC.astype(jnp.float32).reshape(N, B, 1, C // TILE, TILE, 1)

    return Masks(
        entering=tiled(run_NBC == start_NB[..., None]),
        leaving=tiled(run_NBC == end_NB[..., None]),
        through=(start_NB == end_NB).astype(jnp.float32)[..., None, None],
        same=(run_NBC[..., :, None] == run_NBC[..., None, :]).reshape(N, B, 1, C // TILE, 1, TILE, C),
    )


def _slice(x: jax.Array, index, tokens: int, C: int) -> jax.Array:
    """[B, S, ...] -> [N, B, C, ...] of one step."""
    x = jax.lax.dynamic_slice_in_dim(x, index * tokens, tokens, axis=1)
    return jnp.swapaxes(x.reshape(x.shape[0], tokens // C, C, *x.shape[2:]), 0, 1)


def _read(x: jax.Array, index, tokens: int, C: int, real_NBC: jax.Array | None) -> jax.Array:
    """[B, S, H, K] -> float32 [N, B, H, C, K] of one step, 0 at padding."""
    x = _slice(x, index, tokens, C).astype(jnp.float32)
    if real_NBC is not None:
        x = jnp.where(real_NBC[..., None, None], x, 0.0)
    return jnp.swapaxes(x, 2, 3)


def _write(buffer: jax.Array, x: jax.Array, index, tokens: int) -> jax.Array:
    """Puts [N, B, H, C, K] of one step into [B, S, H, K]."""
    x = jnp.moveaxis(x, 0, 1).swapaxes(2, 3)
    x = x.reshape(x.shape[0], tokens, *x.shape[3:]).astype(buffer.dtype)
    return jax.lax.dynamic_update_slice_in_dim(buffer, x, index * tokens, axis=1)


def _flat(x: jax.Array) -> jax.Array:
    """Tiles joined: [..., M, R, K] -> [..., M R, K]."""
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])


def _both(factor: jax.Array) -> jax.Array:
    """A factor of the 16 rows of a tile for its 16 query and its 16 key rows."""
    return factor if factor.shape[-2] == 1 else jnp.concatenate([factor, factor], axis=-2)


def _interleave(a: jax.Array, b: jax.Array) -> jax.Array:
    """Two [..., C, V] -> [..., 2C, V], 16 rows of each in turn."""
    *batch, C, V = a.shape
    a, b = (x.reshape(*batch, C // TILE, TILE, V) for x in (a, b))
    return _flat(jnp.concatenate([a, b], axis=-2))


def _apart(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Undoes `_interleave`."""
    *batch, rows, V = x.shape
    x = x.reshape(*batch, rows // (2 * TILE), 2, TILE, V)
    return x[..., 0, :, :].reshape(*batch, rows // 2, V), x[..., 1, :, :].reshape(*batch, rows // 2, V)


def _sum_over(matrix: np.ndarray, x: jax.Array) -> jax.Array:
    """0/1 sums over the positions of a chunk, [..., M, 16, K] -> [..., C, K]."""
    x = _flat(x)
    return kda_tiles.exact_matmul(jnp.broadcast_to(matrix.astype(np.float32), (*x.shape[:-2], *matrix.shape)), x)
