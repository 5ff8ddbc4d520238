"""Kimi Delta Attention token by token: the oracle of the chunked form, and the decode step (docs/k3.md section 2.2).

S_t = (I - beta_t k_t k_t^T) Diag(exp(log_decay_t)) S_{t-1} + beta_t k_t v_t^T        o_t = scale S_t^T q_t
"""

import jax
import jax.numpy as jnp

from k3train.ops.segments import segment_runs


def recurrent_kda(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    *,
    scale: float | None = None,
    initial_state: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Reads and writes a key-value memory per head, one token after the other (report equation 1).

    Args:
        q, k: [B, S, H, K], already normalised.
        v: [B, S, H, V].
        log_decay: [B, S, H, K], natural logarithm of the decay, <= 0.
        beta: [B, S, H] in (0, 1).
        scale: factor on the reads; default K**-0.5.
        initial_state: [B, H, K, V], continued by the first document of each row; None: zeros.
        segment_ids: int32 [B, S], 0 = padding; None: one document. A document starts from a zero state. Padding
            neither reads, writes nor decays, wherever it stands.

    Returns:
        out: [B, S, H, V] in v's dtype, computed in float32; 0 at padding.
        final_state: float32 [B, H, K, V], after the last real token of the row.

    Raises:
        ValueError: shapes that do not fit together.
    """
    check_shapes(q, k, v, log_decay, beta, initial_state, segment_ids)
    dtype = v.dtype
    B, S, H, K = q.shape
    scale = K**-0.5 if scale is None else scale
    q, k, v, log_decay, beta = (x.astype(jnp.float32) for x in (q, k, v, log_decay, beta))
    if segment_ids is None:
        starts_BS = jnp.zeros((B, S), bool)
    else:
        run_BS, real_BS = segment_runs(segment_ids)
        starts_BS = run_BS != jnp.pad(run_BS[:, :-1], ((0, 0), (1, 0)))
        q, k, v, log_decay, beta = silence_padding(real_BS, q, k, v, log_decay, beta)

    def token(state_BHKV, xs):
        *inputs, starts_B = xs
        state_BHKV = jnp.where(starts_B[:, None, None, None], 0.0, state_BHKV)
        out_BHV, state_BHKV = kda_step(*inputs, state_BHKV, scale=scale)
        return state_BHKV, out_BHV

    state_BHKV = jnp.zeros((B, H, K, v.shape[-1]), jnp.float32) if initial_state is None else initial_state
    xs = [jnp.swapaxes(x, 0, 1) for x in (q, k, v, log_decay, beta, starts_BS)]
    state_BHKV, out_SBHV = jax.lax.scan(token, state_BHKV.astype(jnp.float32), xs)
    return jnp.swapaxes(out_SBHV, 0, 1).astype(dtype), state_BHKV


def kda_step(
    q_BHK: jax.Array,
    k_BHK: jax.Array,
    v_BHV: jax.Array,
    log_decay_BHK: jax.Array,
    beta_BH: jax.Array,
    state_BHKV: jax.Array,
    *,
    scale: float | None = None,
) -> tuple[jax.Array, jax.Array]:
    """One token: decay, delta update with the decayed state, read of the updated state.

    Returns:
        out [B, H, V] and the new state [B, H, K, V], both float32.
    """
    factor = q_BHK.shape[-1] ** -0.5 if scale is None else scale
    q_BHK, k_BHK, v_BHV, beta_BH = (x.astype(jnp.float32) for x in (q_BHK, k_BHK, v_BHV, beta_BH))
    decayed_BHKV = state_BHKV * jnp.exp(log_decay_BHK.astype(jnp.float32))[..., None]
    recalled_BHV = jnp.einsum("BHKV,BHK->BHV", decayed_BHKV, k_BHK)
    write_BHV = beta_BH[..., None] * (v_BHV - recalled_BHV)
    state_BHKV = decayed_BHKV + k_BHK[..., None] * write_BHV[..., None, :]
    return factor * jnp.einsum("BHKV,BHK->BHV", state_BHKV, q_BHK), state_BHKV


def silence_padding(real_BS: jax.Array, *inputs: jax.Array) -> list[jax.Array]:
    """Zeros at padding: nothing read or written (q, k, v, beta) and no decay (log_decay), whatever stood there."""
    return [jnp.where(real_BS.reshape(real_BS.shape + (1,) * (x.ndim - 2)), x, 0.0) for x in inputs]


def check_shapes(q, k, v, log_decay, beta, initial_state, segment_ids) -> None:
    """Refuses arguments of `recurrent_kda` and `chunk_kda` that do not fit together."""
    if q.ndim != 4 or v.ndim != 4 or q.shape[1] < 1:
        raise ValueError(f"kda takes q [B, S >= 1, H, K] and v [B, S, H, V], got {q.shape} and {v.shape}")
    B, S, H, K = q.shape
    wanted = {
        "k": (k, q.shape),
        "log_decay": (log_decay, q.shape),
        "v": (v, (B, S, H, v.shape[-1])),
        "beta": (beta, (B, S, H)),
        "initial_state": (initial_state, (B, H, K, v.shape[-1])),
        "segment_ids": (segment_ids, (B, S)),
    }
    for name, (array, shape) in wanted.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"kda takes {name} of shape {shape} with q {q.shape} and v {v.shape}, got {array.shape}")
