"""Short causal depthwise convolution with SiLU, in front of KDA's queries, keys and values (docs/k3.md section 2.2)."""

import jax
import jax.numpy as jnp

from k3train.ops.segments import segment_runs


def short_conv(
    x_BSC: jax.Array,
    w_CW: jax.Array,
    *,
    tail: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """`silu(sum_j w[:, j] x[t - (W-1) + j])`: one filter per channel, the last tap is the current token.

    A tap counts only where its position belongs to the same document; padding counts nowhere.

    Args:
        x_BSC: inputs.
        w_CW: filters.
        tail: [B, W-1, C] inputs that precede the first document of the row; None: it starts here.
        segment_ids: int32 [B, S], 0 = padding; None: one document.

    Returns:
        out_BSC: in x's dtype, computed in float32; 0 at padding.
        new_tail: [B, W-1, C], the `tail` for what follows this row: its last W-1 inputs (padding may stand at the
            right end and is skipped), zeros where they belong to an earlier document than the last.

    Raises:
        ValueError: shapes that do not fit together.
    """
    B, S, C = x_BSC.shape
    W = w_CW.shape[-1]
    if w_CW.shape != (C, W) or W < 2:
        raise ValueError(f"short_conv takes filters [{C}, taps >= 2] for {C} channels, got {w_CW.shape}")
    if tail is not None and tail.shape != (B, W - 1, C):
        raise ValueError(f"short_conv takes a tail of shape {(B, W - 1, C)}, got {tail.shape}")
    if segment_ids is not None and segment_ids.shape != (B, S):
        raise ValueError(f"short_conv takes segment_ids of shape {(B, S)}, got {segment_ids.shape}")
    tail = jnp.zeros((B, W - 1, C), x_BSC.dtype) if tail is None else tail.astype(x_BSC.dtype)
    if segment_ids is None:
        history_BTC = jnp.concatenate([tail, x_BSC], axis=1)
        return _filter(history_BTC, w_CW, None).astype(x_BSC.dtype), history_BTC[:, S:]

    run_BS, real_BS = segment_runs(segment_ids)
    history_BTC = jnp.concatenate([tail, jnp.where(real_BS[..., None], x_BSC, 0)], axis=1)
    run_BT = jnp.pad(run_BS, ((0, 0), (W - 1, 0)))  # the tail belongs to the first document
    out_BSC = jnp.where(real_BS[..., None], _filter(history_BTC, w_CW, run_BT), 0.0)
    length_B = jnp.sum(real_BS, axis=1, dtype=jnp.int32)
    last_BW = length_B[:, None] + jnp.arange(W - 1)
    same_BW = jnp.take_along_axis(run_BT, last_BW, axis=1) == run_BS[:, -1:]
    new_tail = jnp.where(same_BW[..., None], jnp.take_along_axis(history_BTC, last_BW[..., None], axis=1), 0)
    return out_BSC.astype(x_BSC.dtype), new_tail


@jax.custom_vjp
def _filter(history_BTC: jax.Array, w_CW: jax.Array, run_BT: jax.Array | None) -> jax.Array:
    """silu of the convolution, float32 [B, S, C]; `T = W-1 + S`."""
    return jax.nn.silu(_convolve(history_BTC, w_CW, run_BT))


def _filter_fwd(history_BTC, w_CW, run_BT):
    return _filter(history_BTC, w_CW, run_BT), (history_BTC, w_CW, run_BT)


def _filter_bwd(residuals, d_out_BSC):
    """Written out because the transpose of slices is a chain of pads, several times slower on CPU."""
    history_BTC, w_CW, run_BT = residuals
    B, T, C = history_BTC.shape
    W = w_CW.shape[1]
    S = T - (W - 1)
    y_BSC = _convolve(history_BTC, w_CW, run_BT)
    gate_BSC = jax.nn.sigmoid(y_BSC)
    d_y_BSC = d_out_BSC * gate_BSC * (1.0 + y_BSC * (1.0 - gate_BSC))
    padded = jnp.pad(d_y_BSC, ((0, 0), (W - 1, W - 1), (0, 0)))
    d_history_BTC, d_w = jnp.zeros((), jnp.float32), []
    for j in range(W):
        d_tap_BTC = padded[:, W - 1 - j : W - 1 - j + T] * w_CW[:, j].astype(jnp.float32)
        product_BSC = d_y_BSC * history_BTC[:, j : j + S].astype(jnp.float32)
        if run_BT is not None:
            counts_BS = _counts(run_BT, j, W)
            counts_BT = jnp.pad(counts_BS, ((0, 0), (j, W - 1 - j)))
            d_tap_BTC = jnp.where(counts_BT[..., None], d_tap_BTC, 0.0)
            product_BSC = jnp.where(counts_BS[..., None], product_BSC, 0.0)
        d_history_BTC += d_tap_BTC
        d_w.append(_sum_of_rows(product_BSC))
    return d_history_BTC.astype(history_BTC.dtype), jnp.stack(d_w, axis=-1).astype(w_CW.dtype), None


_filter.defvjp(_filter_fwd, _filter_bwd)


def _convolve(history_BTC: jax.Array, w_CW: jax.Array, run_BT: jax.Array | None) -> jax.Array:
    """Shift and add in float32."""
    W = w_CW.shape[1]
    S = history_BTC.shape[1] - (W - 1)
    total_BSC = jnp.zeros((), jnp.float32)
    for j in range(W):
        tap_BSC = history_BTC[:, j : j + S].astype(jnp.float32) * w_CW[:, j].astype(jnp.float32)
        if run_BT is not None and j < W - 1:
            tap_BSC = jnp.where(_counts(run_BT, j, W)[..., None], tap_BSC, 0.0)
        total_BSC = total_BSC + tap_BSC
    return total_BSC


def _counts(run_BT: jax.Array, j: int, W: int) -> jax.Array:
    """[B, S] whether tap j lies in the document of the current token."""
    S = run_BT.shape[1] - (W - 1)
    return run_BT[:, j : j + S] == run_BT[:, W - 1 :]


def _sum_of_rows(x_BSC: jax.Array) -> jax.Array:
    """Sum over B and S, first over short runs of rows: a CPU reads them from its cache."""
    B, S, C = x_BSC.shape
    rows = next(rows for rows in (32, 16, 8, 4, 2, 1) if S % rows == 0)
    return jnp.sum(jnp.sum(x_BSC.reshape(B * S // rows, rows, C), axis=1), axis=0)
