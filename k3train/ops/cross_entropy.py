"""Cross-entropy in chunks of positions: the logits of a whole row never exist (docs/k3.md section 2.10)."""

from functools import partial

import jax
import jax.numpy as jnp


def _chunk_loss(hidden_BCD, head_DX, targets_BC, weights_BC):
    """Sum of weighted losses of one chunk, and the gradient of that sum with respect to its logits."""
    logits = jnp.einsum("BCD,DX->BCX", hidden_BCD, head_DX, preferred_element_type=jnp.float32)
    top = jnp.max(logits, axis=-1, keepdims=True)
    exp = jnp.exp(logits - top)
    total = jnp.sum(exp, axis=-1, keepdims=True)
    is_target = targets_BC[..., None] == jnp.arange(logits.shape[-1])
    picked = jnp.sum(jnp.where(is_target, logits, 0.0), axis=-1)
    # where, not a product: a position without weight must not turn a non-finite logit into NaN * 0
    losses = jnp.where(weights_BC > 0, (jnp.log(total) + top)[..., 0] - picked, 0.0)
    grad = jnp.where(weights_BC[..., None] > 0, (exp / total - is_target) * weights_BC[..., None], 0.0)
    return jnp.sum(losses * weights_BC), grad


def _split(x, size: int):
    """[B, S, ...] -> [chunks, B, size, ...], zero-padded at the end."""
    B, S = x.shape[:2]
    chunks = -(-S // size)
    x = jnp.pad(x, [(0, 0), (0, chunks * size - S)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(B, chunks, size, *x.shape[2:]), 1, 0)


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def cross_entropy_sum(
    hidden_BSD: jax.Array, head_DX: jax.Array, targets_BS: jax.Array, weights_BS: jax.Array, chunk: int = 256
) -> jax.Array:
    """Sum over positions of weight * (-log softmax(hidden @ head)[target]), float32 [].

    Memory is B x chunk x vocabulary, whatever the row length. The gradient is computed in the forward sweep, so the
    logits are made once (gradients with respect to hidden and head only).

    Args:
        hidden_BSD: final hidden states.
        head_DX: output head in the same dtype.
        targets_BS: int32 token ids; ignored where the weight is 0.
        weights_BS: float32 loss weights.
        chunk: positions per chunk.
    """

    def body(total, part):
        hidden, targets, weights = part
        loss, _ = _chunk_loss(hidden, head_DX, targets, weights)
        return total + loss, None

    parts = (_split(hidden_BSD, chunk), _split(targets_BS, chunk), _split(weights_BS, chunk))
    return jax.lax.scan(body, jnp.float32(0), parts)[0]


def _forward(hidden_BSD, head_DX, targets_BS, weights_BS, chunk):
    def body(carry, part):
        total, grad_head = carry
        hidden, targets, weights = part
        loss, grad = _chunk_loss(hidden, head_DX, targets, weights)
        grad = grad.astype(hidden.dtype)
        grad_hidden = jnp.einsum("BCX,DX->BCD", grad, head_DX)
        grad_head += jnp.einsum("BCD,BCX->DX", hidden, grad, preferred_element_type=jnp.float32)
        return (total + loss, grad_head), grad_hidden

    parts = (_split(hidden_BSD, chunk), _split(targets_BS, chunk), _split(weights_BS, chunk))
    zero = (jnp.float32(0), jnp.zeros(head_DX.shape, jnp.float32))
    (total, grad_head), grad_hidden = jax.lax.scan(body, zero, parts)
    B, S, D = hidden_BSD.shape
    grad_hidden = jnp.moveaxis(grad_hidden, 0, 1).reshape(B, -1, D)[:, :S]
    return total, (grad_hidden, grad_head.astype(head_DX.dtype))


def _backward(chunk, saved, cotangent):
    grad_hidden, grad_head = saved
    return cotangent.astype(grad_hidden.dtype) * grad_hidden, cotangent.astype(grad_head.dtype) * grad_head, None, None


cross_entropy_sum.defvjp(_forward, _backward)
