"""What the chunked form of KDA computes inside one chunk, without the state (docs/k3.md section 2.2, "Chunk form").

With G the running sum of the log decays, the products of a chunk are

    A[r, i] = sum_c q_rc k_ic exp(G_rc - G_ic)  for i <= r
    L[r, i] = beta_r sum_c k_rc k_ic exp(G_rc - G_ic)  for i < r

Each factorises through an anchor between i and r: exp(G_r - anchor) exp(anchor - G_i). Every exponent is summed
directly from the log decays, never taken as the difference of long sums. Between two blocks of tiles the anchor is
their border, and no exponent is positive. Inside a 16-token tile it is either the middle of the tile (no factor above
e^40 when no log decay lies below -5), or the tile is halved until single tokens remain and every anchor is a border
(any decay).

Axes: ... are batch axes, M tiles of a chunk, R the 32 rows of a tile (16 of the query, then 16 of beta * key),
C positions of a chunk, K channels.
"""

from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

TILE = 16
HALVES = (8, 4, 2, 1)

# Sums of exponents and the triangular solve need all of float32 where the default product is coarser.
exact_matmul = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)


class Factors(NamedTuple):
    """One chunk after `factors`; the names say from where to where a factor decays."""

    rows: jax.Array  # [..., M, R, K] query and beta * key rows, from their tile's anchor to themselves
    cols: jax.Array  # [..., M, 16, K] key columns, from themselves to their tile's anchor
    to_row: jax.Array  # [..., M, 16, K] factor in `rows`
    from_col: jax.Array  # [..., M, 16, K] factor in `cols`
    border: dict[int, jax.Array]  # tiles per block -> [..., M, 1, K]: border to row anchor, or column anchor to border
    start: jax.Array  # [..., M, 1, K] start of the chunk to row anchor
    end: jax.Array  # [..., M, 1, K] column anchor to end of the chunk
    whole: jax.Array  # [..., K] start to end


@cache
def _tile_sums(bounded: bool) -> np.ndarray:
    """[.., 16] 0/+-1: exponents to the rows, (from the columns,) then the tile before and after its anchor."""
    prefix = np.tri(TILE)
    total = prefix[-1:]
    if bounded:
        before = prefix[TILE // 2 - 1 : TILE // 2]
        return np.concatenate([prefix - before, before, total - before]).astype(np.float32)
    return np.concatenate([prefix, total - prefix, 0 * total, total]).astype(np.float32)


@cache
def _piece_sums(num_tiles: int, bounded: bool) -> tuple[np.ndarray, dict[int | str, slice]]:
    """0/1 over the two pieces (before, after the anchor) of every tile: exponents of the factors per tile."""
    pieces = 2 * num_tiles
    # Where the tile is halved, rows decay from its start and columns to its end.
    column_anchor = 1 if bounded else 2

    def span(start: int, stop: int) -> np.ndarray:
        return ((np.arange(pieces) >= start) & (np.arange(pieces) < stop)).astype(np.float32)

    table: dict[int | str, list[np.ndarray]] = {}
    block = 1
    while block < num_tiles:
        width, rows = 2 * block, []
        for t in range(num_tiles):
            first = t // block * width
            later = (t // block) % 2 == 1
            rows.append(span(first, 2 * t + 1) if later else span(2 * t + column_anchor, first + width))
        table[block] = rows
        block *= 2
    table["start"] = [span(0, 2 * t + 1) for t in range(num_tiles)]
    table["end"] = [span(2 * t + column_anchor, pieces) for t in range(num_tiles)]
    table["whole"] = [span(0, pieces)]
    slices, offset = {}, 0
    for name, rows in table.items():
        slices[name] = slice(offset, offset + len(rows))
        offset += len(rows)
    return np.concatenate([np.stack(rows) for rows in table.values()]), slices


def factors(q: jax.Array, k: jax.Array, beta: jax.Array, g_NBCHK: jax.Array, *, bounded: bool) -> Factors:
    """Rows, columns and decay factors of chunks.

    Args:
        q, k: [N, B, H, M, 16, K] float32.
        beta: [N, B, H, M, 16, 1].
        g_NBCHK: log decays, heads inside: the sums run over positions before the heads are moved out.
    """
    N, B, C, H, K = g_NBCHK.shape
    M = C // TILE
    sums = _tile_sums(bounded)
    sums = jnp.broadcast_to(sums, (N, B, M, *sums.shape))
    g_tile = exact_matmul(sums, g_NBCHK.reshape(N, B, M, TILE, H * K))
    table, where = _piece_sums(M, bounded)
    pieces = g_tile[..., -2:, :].reshape(N, B, 2 * M, H * K)
    per_tile = exact_matmul(jnp.broadcast_to(table, (N, B, *table.shape)), pieces)
    per_tile = jnp.exp(jnp.swapaxes(per_tile.reshape(N, B, -1, H, K), 2, 3))
    factor = {name: per_tile[:, :, :, rows, None] for name, rows in where.items()}

    def heads_out(x):
        return jnp.exp(jnp.moveaxis(x.reshape(N, B, M, TILE, H, K), 4, 2))

    to_row = heads_out(g_tile[..., :TILE, :])
    from_col = 1.0 / to_row if bounded else heads_out(g_tile[..., TILE : 2 * TILE, :])
    return Factors(
        rows=jnp.concatenate([q * to_row, beta * k * to_row], axis=-2),
        cols=k * from_col,
        to_row=to_row,
        from_col=from_col,
        border={name: x for name, x in factor.items() if isinstance(name, int)},
        start=factor["start"],
        end=factor["end"],
        whole=factor["whole"][..., 0, 0, :],
    )


def _across(f: Factors, block: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Rows of the later and columns of the earlier block of each pair, decayed from and to their border.

    Returns:
        rows [..., P, 32 block, K], columns [..., P, 16 block, K] for P pairs, and the two border factors.
    """
    *batch, M, R, K = f.rows.shape
    pairs = M // (2 * block)
    border = f.border[block].reshape(*batch, pairs, 2, block, 1, K)
    later, earlier = border[..., 1, :, :, :], border[..., 0, :, :, :]
    rows = f.rows.reshape(*batch, pairs, 2, block, R, K)[..., 1, :, :, :] * later
    cols = f.cols.reshape(*batch, pairs, 2, block, TILE, K)[..., 0, :, :, :] * earlier
    return rows.reshape(*batch, pairs, R * block, K), cols.reshape(*batch, pairs, TILE * block, K), later, earlier


def pair_products(f: Factors, in_tile: jax.Array) -> jax.Array:
    """Products of the whole chunk from those inside its tiles.

    Args:
        in_tile: [..., M, 2, 16, 16], from `tile_products`.

    Returns:
        [..., M, 2, 16, C]: rows of A and of L, tile by tile; 0 where i > r.
    """
    *batch, M, R, _ = f.rows.shape
    products = in_tile.reshape(*batch, M, R, TILE)
    block = 1
    while block < M:
        rows, cols, _, _ = _across(f, block)
        below = jnp.einsum("...rk,...ck->...rc", rows, cols)
        diagonal = products.reshape(*batch, M // (2 * block), 2, R * block, TILE * block)
        upper = jnp.pad(diagonal[..., 0, :, :], [(0, 0)] * (below.ndim - 1) + [(0, TILE * block)])
        products = jnp.concatenate([upper, jnp.concatenate([below, diagonal[..., 1, :, :]], axis=-1)], axis=-2)
        block *= 2
    return products.reshape(*batch, M, 2, TILE, M * TILE)


def pair_products_vjp(f: Factors, d_products: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients with respect to `f.rows`, `f.cols` (as products across tiles use them) and `in_tile`."""
    *batch, M, _, _, C = d_products.shape
    K = f.rows.shape[-1]
    flat = d_products.reshape(*batch, M, 2 * TILE, C)
    d_rows, d_cols = jnp.zeros_like(f.rows), jnp.zeros_like(f.cols)
    block = 1
    while block < M:
        rows, cols, later, earlier = _across(f, block)
        pairs, width = M // (2 * block), TILE * block
        later_rows = flat.reshape(*batch, pairs, 2, 2 * width, C)[..., 1, :, :]
        below = jnp.stack([later_rows[..., p, :, 2 * p * width : (2 * p + 1) * width] for p in range(pairs)], axis=-3)
        d_later = jnp.einsum("...rc,...ck->...rk", below, cols).reshape(*batch, pairs, block, 2 * TILE, K) * later
        d_earlier = jnp.einsum("...rc,...rk->...ck", below, rows).reshape(*batch, pairs, block, TILE, K) * earlier
        d_rows += jnp.stack([jnp.zeros_like(d_later), d_later], axis=-4).reshape(d_rows.shape)
        d_cols += jnp.stack([d_earlier, jnp.zeros_like(d_earlier)], axis=-4).reshape(d_cols.shape)
        block *= 2
    d_in_tile = jnp.stack([d_products[..., m, :, :, TILE * m : TILE * (m + 1)] for m in range(M)], axis=-4)
    return d_rows, d_cols, d_in_tile


def tile_products_bounded(f: Factors) -> jax.Array:
    """Products inside the tiles, [..., M, 2, 16, 16], through the middle of each: log decays of at least -5 a token."""
    products = jnp.einsum("...rk,...ck->...rc", f.rows, f.cols).reshape(*f.rows.shape[:-2], 2, TILE, TILE)
    kept = np.stack([np.tri(TILE, dtype=bool), np.tri(TILE, k=-1, dtype=bool)])
    return jnp.where(kept, products, 0.0)


def tile_products_bounded_vjp(f: Factors, d_in_tile: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Gradients of the products with i < r with respect to `f.rows` and `f.cols`.

    The products of a token with itself carry no decay. They are left to the caller, or their rounding error would
    drown the gradient of strong decays.
    """
    strict = np.tri(TILE, k=-1, dtype=bool)
    d_products = jnp.where(strict, d_in_tile, 0.0).reshape(*f.rows.shape[:-1], TILE)
    d_rows = jnp.einsum("...rc,...ck->...rk", d_products, f.cols)
    return d_rows, jnp.einsum("...rc,...rk->...ck", d_products, f.rows)


@cache
def _halving_sums() -> np.ndarray:
    """[4 * 16, 16] 0/1, for each halving: border to row in the later half, column to border in the earlier one."""
    r, i = np.arange(TILE)[:, None], np.arange(TILE)[None, :]
    return np.concatenate([
        (r // h == i // h) & np.where(r // h % 2 == 1, i <= r, i > r) for h in HALVES
    ]).astype(np.float32)  # fmt: skip


def tile_products_halving(q: jax.Array, beta_k: jax.Array, k: jax.Array, g: jax.Array) -> jax.Array:
    """Products inside the tiles, [..., M, 2, 16, 16], for any decay: halves, quarters, eighths, single tokens.

    Args:
        q, beta_k, k, g: [..., M, 16, K].
    """
    *batch, _, K = q.shape
    sums = _halving_sums()
    decay = jnp.exp(exact_matmul(jnp.broadcast_to(sums, (*batch, *sums.shape)), g))
    decay = decay.reshape(*batch, len(HALVES), TILE, K)

    def half(x, h, which):
        return x.reshape(*batch, TILE // (2 * h), 2, h, K)[..., which, :, :].reshape(*batch, TILE // 2, K)

    rows, cols = [], []
    for j, h in enumerate(HALVES):
        later, earlier = half(decay[..., j, :, :], h, 1), half(decay[..., j, :, :], h, 0)
        rows.append(jnp.concatenate([half(q, h, 1) * later, half(beta_k, h, 1) * later], axis=-2))
        cols.append(half(k, h, 0) * earlier)
    products = jnp.einsum("...rk,...ck->...rc", jnp.stack(rows, axis=-3), jnp.stack(cols, axis=-3))
    itself = jnp.einsum("...k,...k->...", q, k)[..., None, :, None] * np.eye(TILE, dtype=np.float32)
    total = jnp.concatenate([itself, jnp.zeros_like(itself)], axis=-3)
    for j, h in enumerate(HALVES):
        total += _spread(products[..., j, :, :].reshape(*batch, 2, TILE // 2, TILE // 2), h)
    return total


def _spread(products: jax.Array, h: int) -> jax.Array:
    """[..., 8, 8] products of later with earlier blocks of h -> [..., 16, 16], without those of unrelated blocks."""
    *batch, _, _ = products.shape
    blocks = TILE // (2 * h)
    related = np.eye(blocks, dtype=np.float32)[:, None, None, :, None, None]
    products = products.reshape(*batch, blocks, 1, h, blocks, 1, h) * related
    padding = [(0, 0, 0)] * len(batch) + [(0, 0, 0), (1, 0, 0), (0, 0, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0)]
    return jax.lax.pad(products, jnp.zeros((), products.dtype), padding).reshape(*batch, TILE, TILE)


def unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """(I + lower)^-1 of strictly lower [..., C, C]: forward substitution in tiles, then over blocks of tiles.

    At each step blocks X, Y of the inverse are known and the block B below X joins them: [[X, 0], [-Y B X, Y]].
    """
    *batch, C, _ = lower.shape
    tiles = jnp.stack([lower[..., i : i + TILE, i : i + TILE] for i in range(0, C, TILE)], axis=-3)
    r, i = np.arange(TILE)[:, None], np.arange(TILE)[None, :]
    inverse: jax.Array = jnp.eye(TILE, dtype=lower.dtype)
    for h in reversed(HALVES):
        below = tiles * ((r // (2 * h) == i // (2 * h)) & (r // h > i // h))
        inverse = inverse - (below if h == 1 else exact_matmul(exact_matmul(inverse, below), inverse))
    block = TILE
    while block < C:
        pairs = C // (2 * block)
        below = jnp.stack(
            [lower[..., i + block : i + 2 * block, i : i + block] for i in range(0, C, 2 * block)], axis=-3
        )
        inverse = inverse.reshape(*batch, pairs, 2, block, block)
        first, second = inverse[..., 0, :, :], inverse[..., 1, :, :]
        corner = -exact_matmul(exact_matmul(second, below), first)
        upper = jnp.pad(first, [(0, 0)] * (first.ndim - 1) + [(0, block)])
        inverse = jnp.concatenate([upper, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        block *= 2
    return inverse[..., 0, :, :]
