"""Next-token loss of one batch and what the step collects along the way (docs/k3.md section 2.10)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from k3train.core.tree import Blueprint, Tree
from k3train.model.backbone import Nested
from k3train.ops.cross_entropy import cross_entropy_sum
from k3train.parallel.pooled import differentiable_sum_over_batch

Batch = dict[str, jax.Array]


class Sums(NamedTuple):
    """Totals over the trained tokens of a batch; they add up over micro-batches."""

    loss: jax.Array  # sum of -log p(target) in nats, float32
    tokens: jax.Array  # sum of loss weights, float32


def token_loss(blueprint: Blueprint, params: Tree, bias: Tree, batch: Batch, *, collect: bool) -> tuple[Sums, Nested]:
    """Loss sums of a batch and the statistics of every layer.

    Args:
        batch: tokens, segment_ids, targets int32 [B, S], loss_mask float32 [B, S]; without weight, no loss.
        collect: count router statistics.
    """
    model: Any = blueprint.module(params, bias)
    out = model.hidden(batch["tokens"], batch["segment_ids"], collect=collect)
    head_DX = model.head.matrix[...]  # cast on each device, so that its gradient is added up in float32
    weights = batch["loss_mask"].astype(jnp.float32)
    loss = differentiable_sum_over_batch(_cross_entropy, (out.hidden, batch["targets"], weights), head_DX)
    return Sums(loss, jnp.sum(weights)), out.stats


def _cross_entropy(hidden_BSD, targets_BS, weights_BS, head_DX) -> jax.Array:
    loss: Any = cross_entropy_sum(hidden_BSD, head_DX.astype(hidden_BSD.dtype), targets_BS, weights_BS)
    return loss
