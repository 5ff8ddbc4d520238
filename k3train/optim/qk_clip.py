"""QK-clip, the weight half of MuonClip (docs/k3.md section 3.3; Kimi K2 report, Algorithm 1)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from k3train.optim.muon import Tagged, flatten, muon


@dataclass(frozen=True)
class ClipView:
    """Which entries of a leaf belong to a head's logits.

    Args:
        head_axis: axis of the leaf that counts heads.
        axis: axis along which `parts` lie.
        parts: (length, exponent), in order, adding up to the axis: the entries are scaled by gamma ** exponent. The
            exponents of the query's and the key's part of one product add up to 1; 0 leaves entries alone.
    """

    head_axis: int
    axis: int
    parts: tuple[tuple[int, float], ...]

    def exponents(self) -> np.ndarray:
        """[length of `axis`] float32."""
        return np.concatenate([np.full(length, exponent, np.float32) for length, exponent in self.parts])


class QkClipState(NamedTuple):
    """`num_clipped`: int32 [], heads rescaled at the last step, counted over layers."""

    num_clipped: jax.Array


def _clip(update: jax.Array, weight: jax.Array, view: ClipView, max_logits: jax.Array, threshold: float):
    """(rewritten update of one leaf, which heads are clipped)."""
    stack = max_logits.ndim - 1  # leading axes that leaf and max_logits share
    expected = (*weight.shape[:stack], weight.shape[view.head_axis])
    if max_logits.shape != expected:
        raise ValueError(f"max_logits of shape {max_logits.shape} for a leaf of shape {weight.shape}: want {expected}")
    exponents = view.exponents()
    if len(exponents) != weight.shape[view.axis]:
        raise ValueError(f"parts {view.parts} add up to {len(exponents)}, the axis has {weight.shape[view.axis]}")
    clipped = (max_logits > threshold) & jnp.isfinite(max_logits)  # false for NaN, and a negative logit needs no clip
    gamma = jnp.where(clipped, threshold / jnp.where(clipped, max_logits, 1), 1)
    other = [axis for axis in range(stack, weight.ndim) if axis != view.head_axis]
    exponents = np.expand_dims(exponents, [axis for axis in range(weight.ndim) if axis != view.axis])
    factor = jnp.expand_dims(gamma, other) ** exponents
    moved = jnp.expand_dims(clipped, other) & (exponents != 0)
    new = (weight.astype(jnp.float32) + update) * factor
    return jnp.where(moved, new - weight, update).astype(update.dtype), clipped


def qk_clip(threshold: float, clip_views: Tagged) -> optax.GradientTransformationExtraArgs:
    """Rewrites updates so that `params + updates` already holds the clipped weights. Keep it last in the chain.

    `update(updates, state, params, max_logits=...)` takes a tree like params with the largest attention logit of each
    head over the whole step (all rows, positions, micro-batches and devices; softmax scale included): float32
    [stack axes..., heads] at clipped leaves, where the stack axes are the leading axes of the leaf, and `None`
    elsewhere. Without `max_logits` nothing is clipped. A head whose logit S exceeds `threshold` has gamma =
    threshold / S; every other head keeps its update bit for bit, as do NaN and infinite S (skip such a step).

    >>> import jax.numpy as jnp, optax
    >>> from k3train.optim import ClipView, qk_clip
    >>> params = {"query": jnp.ones((8, 2, 4)), "key": jnp.ones((8, 2, 4)), "value": jnp.ones((8, 2, 4))}
    >>> half = ClipView(head_axis=1, axis=2, parts=((4, 0.5),))  # sqrt(gamma) on queries and on keys
    >>> tx = optax.chain(optax.sgd(0.0), qk_clip(100.0, {"query": half, "key": half, "value": None}))
    >>> state = tx.init(params)
    >>> largest = jnp.array([400.0, 30.0])  # the attention logits of head 0 have grown too large
    >>> logits = {"query": largest, "key": largest, "value": None}
    >>> updates, state = tx.update(params, state, params, max_logits=logits)
    >>> clipped = optax.apply_updates(params, updates)
    >>> [float(clipped[name][0, head, 0]) for name in ("query", "value") for head in (0, 1)]
    [0.5, 1.0, 1.0, 1.0]

    Args:
        threshold: largest logit allowed per head (K2: 100).
        clip_views: tree like params: `ClipView`, or `None`.

    Raises:
        ValueError: threshold not positive, no params, or shapes that do not fit.
    """
    if threshold <= 0:
        raise ValueError(f"the qk_clip threshold must be positive, got {threshold}")

    def init(params):
        del params
        return QkClipState(jnp.zeros([], jnp.int32))

    def update(updates, state, params=None, *, max_logits=None, **extra_args):
        del state, extra_args
        if params is None:
            raise ValueError("qk_clip rescales weights: call update(updates, state, params)")
        if max_logits is None:
            return updates, QkClipState(jnp.zeros([], jnp.int32))
        leaves, views, structure = flatten(updates, clip_views)
        weights, largest = structure.flatten_up_to(params), structure.flatten_up_to(max_logits)
        count = jnp.zeros([], jnp.float32)
        for index, (weight, view, logits) in enumerate(zip(weights, views, largest, strict=True)):
            if view is None or logits is None:
                continue
            leaves[index], clipped = _clip(leaves[index], weight, view, logits, threshold)
            # Query and key leaf of a head both count; their smallest exponents add up to 1.
            share = min(exponent for _, exponent in view.parts if exponent > 0)
            count = count + share * jnp.sum(clipped)
        return structure.unflatten(leaves), QkClipState(jnp.round(count).astype(jnp.int32))

    return optax.GradientTransformationExtraArgs(init, update)


def muon_clip(
    learning_rate: optax.ScalarOrSchedule,
    views: Tagged,
    clip_views: Tagged,
    *,
    threshold: float = 100.0,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """MuonClip: Muon (and AdamW where there is no matrix view), decoupled decay, then QK-clip.

    >>> import jax.numpy as jnp
    >>> from k3train.optim import ClipView, MatrixView, muon_clip
    >>> params = {"query": jnp.ones((8, 2, 4)), "key": jnp.ones((8, 2, 4)), "gain": jnp.ones(8)}
    >>> per_head, half = MatrixView((0,), (2,)), ClipView(head_axis=1, axis=2, parts=((4, 0.5),))
    >>> tx = muon_clip(
    ...     0.02, {"query": per_head, "key": per_head, "gain": None}, {"query": half, "key": half, "gain": None}
    ... )
    >>> state = tx.init(params)  # then tx.update(grads, state, params, max_logits=...)

    Args:
        learning_rate, views, options: see `muon.muon`.
        clip_views, threshold: see `qk_clip`; infinity never clips.
    """
    return optax.chain(muon(learning_rate, views, **options), qk_clip(threshold, clip_views))
