"""Kimi Delta Attention in chunks: matrix products inside a chunk, one small recurrence over chunks.

Same result as `kda_reference.recurrent_kda` (docs/k3.md section 2.2, "Chunk form"). Letters: N counts chunks.
"""

import jax
import jax.numpy as jnp

from k3train.ops.kda_reference import check_shapes, silence_padding
from k3train.ops.segments import segment_runs


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
) -> tuple[jax.Array, jax.Array]:
    """`recurrent_kda`, fast for long rows: same arguments, same result, any length.

    Args:
        chunk_size: tokens per chunk, a power of two.

    Raises:
        ValueError: shapes that do not fit together, or a chunk size that is not a power of two.
    """
    check_shapes(q, k, v, log_decay, beta, initial_state, segment_ids)
    if chunk_size < 1 or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size must be a power of two, got {chunk_size}")
    dtype = v.dtype
    B, S, H, K = q.shape
    C = chunk_size
    scale = K**-0.5 if scale is None else scale
    run_BS = jnp.zeros((B, S), jnp.int32)
    q, k, v, log_decay, beta = (x.astype(jnp.float32) for x in (q, k, v, log_decay, beta))
    if segment_ids is not None:
        run_BS, real_BS = segment_runs(segment_ids)
        q, k, v, log_decay, beta = silence_padding(real_BS, q, k, v, log_decay, beta)

    def chunks(x, **pad):
        x = jnp.pad(x, ((0, 0), (0, -S % C)) + ((0, 0),) * (x.ndim - 2), **pad)
        x = x.reshape(B, -1, C, *x.shape[2:])
        return jnp.moveaxis(x, 3, 1) if x.ndim > 3 else x

    q, k, v, g, b = (chunks(x) for x in (q * scale, k, v, log_decay, beta))
    run_BNC = chunks(run_BS, mode="edge")
    before_BN = jnp.pad(run_BNC[:, :-1, -1], ((0, 0), (1, 0)))
    in_BNC = run_BNC == before_BN[..., None]
    out_BNC = run_BNC == run_BNC[..., -1:]
    keep_BN = run_BNC[..., -1] == before_BN
    same_BNCD = (run_BNC[..., :, None] == run_BNC[..., None, :])[:, None]

    qk, kk = _pair_products(q, k, g)
    qk = jnp.where(same_BNCD, qk, 0.0)
    kk = jnp.where(same_BNCD, kk, 0.0) * b[..., None]
    T = _unit_lower_inverse(kk)
    M = T * b[..., None, :]
    G = jnp.cumsum(g, axis=-2)
    decay = jnp.exp(G) * in_BNC[:, None, :, :, None]
    W = M @ (decay * k)
    U = M @ v
    q_in = decay * q
    k_out = k * jnp.exp(_suffix_sum(g)) * out_BNC[:, None, :, :, None]
    keep = jnp.exp(G[..., -1, :]) * keep_BN[:, None, :, None]

    def step(state, xs):
        W, U, q_in, qk, k_out, keep = xs
        vt = U - W @ state
        out = q_in @ state + qk @ vt
        return keep[..., None] * state + jnp.swapaxes(k_out, -1, -2) @ vt, out

    state = jnp.zeros((B, H, K, v.shape[-1]), jnp.float32) if initial_state is None else initial_state
    xs = [jnp.moveaxis(x, 2, 0) for x in (W, U, q_in, qk, k_out, keep)]
    state, out = jax.lax.scan(step, state.astype(jnp.float32), xs)
    out = jnp.moveaxis(out, 0, 2).reshape(B, H, -1, v.shape[-1])[:, :, :S]
    return jnp.swapaxes(out, 1, 2).astype(dtype), state


def _suffix_sum(g):
    """Sum over the later positions, the own one excluded."""
    later = jnp.flip(jnp.cumsum(jnp.flip(g, -2), axis=-2), -2)[..., 1:, :]
    return jnp.pad(later, ((0, 0),) * (g.ndim - 2) + ((0, 1), (0, 0)))


def _pair_products(q, k, g):
    """sum_c x_rc k_ic exp(G_rc - G_ic) for x = q (i <= r) and x = k (i < r); no exponent is ever positive."""
    qk = jnp.sum(q * k, axis=-1)[..., None, None]
    kk = jnp.zeros_like(qk)
    C, K = q.shape[-2:]
    h = 1
    while h < C:
        q2, k2, g2 = (x.reshape(*x.shape[:-2], C // (2 * h), 2, h, K) for x in (q, k, g))
        rows = jnp.exp(jnp.cumsum(g2[..., 1, :, :], axis=-2))
        cols = k2[..., 0, :, :] * jnp.exp(_suffix_sum(g2[..., 0, :, :]))
        cols = jnp.swapaxes(cols, -1, -2)
        qk = _merge(qk, (q2[..., 1, :, :] * rows) @ cols)
        kk = _merge(kk, (k2[..., 1, :, :] * rows) @ cols)
        h *= 2
    return qk[..., 0, :, :], kk[..., 0, :, :]


def _merge(blocks, below):
    h = blocks.shape[-1]
    pairs = blocks.reshape(*blocks.shape[:-3], -1, 2, h, h)
    upper = jnp.concatenate([pairs[..., 0, :, :], jnp.zeros_like(below)], axis=-1)
    lower = jnp.concatenate([below, pairs[..., 1, :, :]], axis=-1)
    return jnp.concatenate([upper, lower], axis=-2)


def _unit_lower_inverse(a):
    C = a.shape[-1]
    inverse = jnp.ones((*a.shape[:-2], C, 1, 1), a.dtype)
    h = 1
    while h < C:
        n = C // (2 * h)
        a5 = a.reshape(*a.shape[:-2], n, 2, h, n, 2, h)
        below = jnp.stack([a5[..., i, 1, :, i, 0, :] for i in range(n)], axis=-3)
        pairs = inverse.reshape(*inverse.shape[:-3], n, 2, h, h)
        inverse = _merge(inverse, -pairs[..., 1, :, :] @ below @ pairs[..., 0, :, :])
        h *= 2
    return inverse[..., 0, :, :]
