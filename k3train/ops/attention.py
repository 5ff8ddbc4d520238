"""Causal attention without positions, with the largest logit of every head (docs/k3.md sections 2.3 and 3.3)."""

import jax
import jax.numpy as jnp

#: Query positions handled at once: the logits held are [B, H, block, T].
QUERY_BLOCK = 512
#: Logits held at once per row and head when attending to a cache: query positions times keys of a tile.
CACHE_LOGITS = 2**19


def visible(query_index_BS, segment_BS, key_index_BT, segment_BT):
    """bool [B, S, T]: a key is seen if it is not later, in the same document, and not padding (segment 0)."""
    causal = key_index_BT[:, None, :] <= query_index_BS[:, :, None]
    same = (segment_BT[:, None, :] == segment_BS[:, :, None]) & (segment_BT[:, None, :] > 0)
    return causal & same


def masked_softmax(logits_BHST: jax.Array, mask_BST: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Softmax over the visible keys in float32, and the largest visible logit per head.

    A query that sees nothing (padding) gets zero weights.

    Returns:
        weights [B, H, S, T] float32; largest logit [H] float32 (-inf if nothing is visible), without gradient.
    """
    mask = mask_BST[:, None]
    logits = jnp.where(mask, logits_BHST.astype(jnp.float32), -jnp.inf)
    top = jnp.max(jax.lax.stop_gradient(logits), axis=-1, keepdims=True)
    max_logit_H = jnp.max(top, axis=(0, 2, 3))
    safe_top = jnp.where(jnp.isfinite(top) | jnp.isnan(top), top, 0.0)
    weights = jnp.where(mask, jnp.exp(jnp.where(mask, logits, safe_top) - safe_top), 0.0)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights / jnp.where(total > 0, total, 1.0), max_logit_H


def _attend(q_BSHK, k_BTHK, v_BTHV, mask_BST, scale):
    logits = jnp.einsum("BSHK,BTHK->BHST", q_BSHK, k_BTHK, preferred_element_type=jnp.float32) * scale
    weights, max_logit_H = masked_softmax(logits, mask_BST)
    weights = weights.astype(v_BTHV.dtype)
    out = jnp.einsum("BHST,BTHV->BSHV", weights, v_BTHV, preferred_element_type=jnp.float32)
    return out, max_logit_H


def causal_attention(
    q_BSHK: jax.Array, k_BSHK: jax.Array, v_BSHV: jax.Array, segment_ids_BS: jax.Array, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Softmax attention inside each document of a packed row.

    Args:
        q_BSHK, k_BSHK, v_BSHV: queries, keys, values; V may differ from K.
        segment_ids_BS: int32, document number from 1, 0 for padding.
        scale: factor on the logits.

    Returns:
        out [B, S, H, V] float32 (kept in float32 until it is gated, report section 2.1.2); zero at padding.
        largest logit per head over batch and positions, float32 [H], -inf if every position is padding.
    """
    B, S = segment_ids_BS.shape
    index = jnp.broadcast_to(jnp.arange(S), (B, S))
    if S <= QUERY_BLOCK:
        mask = visible(index, segment_ids_BS, index, segment_ids_BS)
        return _attend(q_BSHK, k_BSHK, v_BSHV, mask, scale)

    num_blocks = -(-S // QUERY_BLOCK)
    padded = num_blocks * QUERY_BLOCK - S

    def split(x):
        x = jnp.pad(x, [(0, 0), (0, padded)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(B, num_blocks, QUERY_BLOCK, *x.shape[2:]), 1, 0)

    @jax.checkpoint  # the backward pass recomputes one block of logits at a time
    def one_block(block):
        q, query_index, segment = block
        mask = visible(query_index, segment, index, segment_ids_BS)
        return _attend(q, k_BSHK, v_BSHV, mask, scale)

    out, max_logit = jax.lax.map(one_block, (split(q_BSHK), split(index), split(segment_ids_BS)))
    out = jnp.moveaxis(out, 0, 1).reshape(B, num_blocks * QUERY_BLOCK, *out.shape[3:])
    return out[:, :S], jnp.max(max_logit, axis=0)


def latent_attention(
    q_BSHR: jax.Array,
    latent_NBTR: jax.Array,
    layer: int | jax.Array,
    position_BS: jax.Array,
    real_BS: jax.Array,
    *,
    scale: float,
    value_width: int,
    held_logits: int = CACHE_LOGITS,
) -> tuple[jax.Array, jax.Array]:
    """Attention of all heads to one cached row of latents, which are keys and values at once.

    Keys come in tiles, and the softmax is carried from tile to tile: what is held does not grow with the cache, and
    tiles beyond the last query are not visited. No gradient.

    Args:
        q_BSHR: queries, the key projection already moved onto them.
        latent_NBTR: keys of a stack of layers; their first `value_width` channels are the values.
        layer: which entry of the stack to attend to.
        position_BS: int32 place of each query in its row; it sees keys up to and with that place.
        real_BS: bool; False at padding, which sees nothing.
        scale: factor on the logits.
        held_logits: S times the keys of a tile.

    Returns:
        out [B, S, H, value_width] float32, zero at padding; largest logit per head, float32 [H].
    """
    B, S, H, _ = q_BSHR.shape
    T, R = latent_NBTR.shape[2:]
    tile = min(T, max(held_logits // S, 1))

    def visit(number, carry):
        top_BHS, total_BHS, out_BHSR = carry
        first = number * tile
        start = jnp.minimum(first, T - tile)  # the last tile may overlap the one before, whose keys count once
        keys_BTR = jax.lax.dynamic_slice(latent_NBTR, (layer, 0, start, 0), (1, B, tile, R))[0]
        index_T = start + jnp.arange(tile)
        mask_BST = (index_T >= first) & (index_T <= position_BS[..., None]) & real_BS[..., None]
        mask = mask_BST[:, None]
        logits = jnp.einsum("BSHR,BTR->BHST", q_BSHR, keys_BTR, preferred_element_type=jnp.float32) * scale
        logits = jnp.where(mask, logits, -jnp.inf)
        new_top_BHS = jnp.maximum(top_BHS, jnp.max(logits, axis=-1))
        anchor_BHS = jnp.where(new_top_BHS == -jnp.inf, 0.0, new_top_BHS)
        weights = jnp.exp(logits - anchor_BHS[..., None])
        shrink_BHS = jnp.exp(top_BHS - anchor_BHS)
        # all channels are mixed and the spare ones dropped at the end: cutting them off here would copy the tile
        added = jnp.einsum(
            "BHST,BTR->BHSR", weights.astype(keys_BTR.dtype), keys_BTR, preferred_element_type=jnp.float32
        )
        total_BHS = total_BHS * shrink_BHS + jnp.sum(weights, axis=-1)
        return new_top_BHS, total_BHS, out_BHSR * shrink_BHS[..., None] + added

    nothing = jnp.zeros((B, H, S), jnp.float32)
    carry = (nothing - jnp.inf, nothing, jnp.zeros((B, H, S, R), jnp.float32))
    if tile == T:
        top_BHS, total_BHS, out_BHSR = visit(0, carry)
    else:
        seen = jnp.max(jnp.where(real_BS, position_BS + 1, 0))
        top_BHS, total_BHS, out_BHSR = jax.lax.fori_loop(0, (seen + tile - 1) // tile, visit, carry)
    out_BHSR = out_BHSR[..., :value_width] / jnp.where(total_BHS == 0, 1.0, total_BHS)[..., None]
    return jnp.swapaxes(out_BHSR, 1, 2), jnp.max(top_BHS, axis=(0, 2))
