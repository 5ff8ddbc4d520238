"""What the layers report of a step: pooled over micro-batches, read by the balancing, QK-clip and the metrics."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from k3train.config.schema import ModelConfig
from k3train.core.param import ParamInfo
from k3train.core.tree import Tree, map_leaves
from k3train.model.backbone import Nested
from k3train.model.block import LayerStats
from k3train.model.layout import slots
from k3train.ops import quantile

Metrics = dict[str, jax.Array]


def _is_stats(x: Any) -> bool:
    return isinstance(x, LayerStats)


def empty(shapes: Nested) -> Nested:
    """The neutral element of `add`, for statistics of these shapes; margins are none of its business."""

    def one(stats: LayerStats) -> LayerStats:
        router, logit = stats.router, stats.max_logit
        if router is not None:
            router = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), router._replace(margins=None))
        return LayerStats(router, None if logit is None else jnp.full(logit.shape, -jnp.inf, logit.dtype))

    return jax.tree.map(one, shapes, is_leaf=_is_stats)


def add(total: Nested, part: Nested) -> Nested:
    """Counts add up, largest logits take the larger; `part` may hold margins, which are left out."""

    def one(a: LayerStats, b: LayerStats) -> LayerStats:
        router, logit = a.router, a.max_logit
        if router is not None and b.router is not None:
            router = jax.tree.map(jnp.add, router, b.router._replace(margins=None))
        if logit is not None and b.max_logit is not None:
            logit = jnp.maximum(logit, b.max_logit)
        return LayerStats(router, logit)

    return jax.tree.map(one, total, part, is_leaf=_is_stats)


def margins(stats: Nested) -> Nested:
    """Margins of every stack of layers [layers, B, S, E]; None where none are kept."""
    return jax.tree.map(lambda s: None if s.router is None else s.router.margins, stats, is_leaf=_is_stats)


def with_margins(stats: Nested, parts: Nested) -> Nested:
    """`stats` with the margins [micro-batches, layers, B, S, E] of all micro-batches side by side."""

    def one(stat: LayerStats, part: jax.Array | None) -> LayerStats:
        if stat.router is None or part is None:
            return stat
        pooled = jnp.swapaxes(part, 0, 1).reshape(part.shape[1], -1, *part.shape[3:])
        return stat._replace(router=stat.router._replace(margins=pooled))

    return jax.tree.map(one, stats, parts, is_leaf=_is_stats)


def layer_trees(tree: Tree, stats: Nested) -> Iterator[tuple[Tree, LayerStats]]:
    """(subtree of `tree`, statistics) of every stack of layers."""
    for r, run in enumerate(stats):
        for s, segment in enumerate(run):
            for p, stat in enumerate(segment):
                layer = tree["backbone"]["runs"]
                for index in (r, s, p):  # the bias tree has no entry where no layer has a router
                    layer = layer.get(str(index), {})
                yield layer, stat


def max_logits(infos: Tree, stats: Nested) -> Tree:
    """Tree like the parameters: [layers, heads] at every leaf that QK-clip acts on, None elsewhere."""
    tree = map_leaves(lambda _: None, infos)
    for (layer, stat), (known, _) in zip(layer_trees(tree, stats), layer_trees(infos, stats), strict=True):
        for name, info in known["mixer"].items():
            if isinstance(info, ParamInfo) and info.clip is not None:
                layer["mixer"][name] = stat.max_logit
    return tree


def metrics(config: ModelConfig, stats: Nested, num_tokens: jax.Array) -> Metrics:
    """Scalars over all layers, and `expert_loads`: int32 [MoE layers in order, experts].

    Args:
        num_tokens: real tokens of the step, trained or not.
    """
    found: Metrics = {}
    loads = _loads(config, stats)
    if loads is not None:
        wanted = num_tokens.astype(jnp.float32) * loads.shape[0] * config.num_experts_per_token
        by_layer = quantile.load_metrics(loads)
        found["expert_loads"] = loads
        found["router/max_over_mean_load"] = jnp.max(by_layer["max_over_mean"])
        found["router/min_over_mean_load"] = jnp.min(by_layer["min_over_mean"])
        found["router/max_violation"] = jnp.max(by_layer["max_violation"])
        found["router/dropped_fraction"] = 1.0 - jnp.sum(loads, dtype=jnp.float32) / jnp.maximum(wanted, 1.0)
    logits = [jnp.max(s.max_logit) for s in jax.tree.leaves(stats, is_leaf=_is_stats) if s.max_logit is not None]
    if logits:
        found["mla/max_logit"] = jnp.max(jnp.stack(logits))
    return found


def _loads(config: ModelConfig, stats: Nested) -> jax.Array | None:
    """int32 [MoE layers in order, experts]; None without such layers."""
    stacks, starts, rows = [], {}, 0
    for r, run in enumerate(stats):
        for s, segment in enumerate(run):
            for p, stat in enumerate(segment):
                if stat.router is not None:
                    starts[r, s, p] = rows
                    stacks.append(stat.router.load)
                    rows += len(stat.router.load)
    if not stacks:
        return None
    places = [slots(config)[layer] for layer in sorted(config.moe_layers)]
    order = np.array([starts[place[:3]] + place.index for place in places])
    return jnp.concatenate(stacks)[order]
