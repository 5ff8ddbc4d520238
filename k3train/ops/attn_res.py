"""Attention residual reader: a softmax over depth, not a sum (report equations 8 and 9; docs/k3.md section 2.4)."""

import jax
import jax.numpy as jnp


def _score(v, weight_D, eps: float):
    """RMS-normalised source times (gain * query): float32 [..., B, S]."""
    dot = jnp.einsum("...D,D->...", v, weight_D)
    mean_square = jnp.einsum("...D,...D->...", v, v) / v.shape[-1]
    return dot * jax.lax.rsqrt(mean_square + eps)


def attn_res(
    sources_NBSD: jax.Array,
    prefix_BSD: jax.Array | None,
    gain_D: jax.Array,
    query_D: jax.Array,
    *,
    eps: float,
    num_sources: int | jax.Array | None = None,
    prefix_valid: bool | jax.Array = True,
) -> jax.Array:
    """Mix of the stored sources and the running partial sum, per token.

    Args:
        sources_NBSD: stored block sums, oldest first.
        prefix_BSD: running partial sum of the current block, or None.
        gain_D, query_D: the reader's norm gain and pseudo-query; they enter as a product.
        eps: epsilon of the norm on the keys. The mix is over the raw sources.
        num_sources: how many of the N sources are filled; None: all.
        prefix_valid: False where the current block is still empty, so the prefix is no source.

    Returns:
        [B, S, D] in the dtype of the sources; float32 inside.
    """
    dtype = sources_NBSD.dtype
    weight_D = gain_D.astype(jnp.float32) * query_D.astype(jnp.float32)
    sources_NBSD = sources_NBSD.astype(jnp.float32)
    scores = _score(sources_NBSD, weight_D, eps)
    if num_sources is not None:
        filled_N = jnp.arange(scores.shape[0]) < num_sources
        scores = jnp.where(filled_N[:, None, None], scores, -jnp.inf)
    if prefix_BSD is None:
        weights = jax.nn.softmax(scores, axis=0)
        return jnp.einsum("NBS,NBSD->BSD", weights, sources_NBSD).astype(dtype)
    prefix_BSD = prefix_BSD.astype(jnp.float32)
    prefix_score = jnp.where(prefix_valid, _score(prefix_BSD, weight_D, eps), -jnp.inf)
    weights = jax.nn.softmax(jnp.concatenate([scores, prefix_score[None]]), axis=0)
    mixed = jnp.einsum("NBS,NBSD->BSD", weights[:-1], sources_NBSD) + weights[-1][..., None] * prefix_BSD
    return mixed.astype(dtype)
