"""The optimizer of a run: Muon and AdamW by metadata, one schedule, decoupled decay, QK-clip last."""

from math import inf
from typing import Any

import jax
import jax.numpy as jnp
import optax

from k3train.config.schema import OptimConfig
from k3train.core.param import ParamInfo
from k3train.core.tree import Tree, map_leaves
from k3train.ops.newton_schulz import QUINTIC, SIMPLE, Coefficients
from k3train.optim import groups, joint
from k3train.optim.qk_clip import QkClipState, muon_clip
from k3train.optim.schedule import warmup_cosine
from k3train.parallel.rules import spec


def schedule(config: OptimConfig, num_steps: int) -> optax.Schedule:
    """Learning rate by 0-based step."""
    return warmup_cosine(config.peak_lr, config.final_lr, config.warmup_fraction, num_steps)


def coefficients(config: OptimConfig) -> Coefficients:
    """Of the Newton-Schulz iteration."""
    return QUINTIC if config.muon_coefficients == "quintic" else SIMPLE[:1] * config.muon_ns_steps


def build(config: OptimConfig, infos: Tree, num_steps: int) -> optax.GradientTransformationExtraArgs:
    """The optimizer for parameters that the model describes by `infos` (nested dict of `ParamInfo`).

    `update(grads, state, params, max_logits=None)`; see `qk_clip` for `max_logits`. Gradients come in already clipped
    to the global norm. Which parameter goes where: `groups.table`.

    Raises:
        ValueError: a parameter without a route.
    """
    infos = groups.assigned(config, infos)
    whole = joint.merged_infos(infos)
    inner = muon_clip(
        schedule(config, num_steps),
        groups.matrix_views(whole),
        groups.clip_views(whole),
        threshold=config.qk_clip_threshold or inf,
        weight_decay=config.weight_decay,
        decay=map_leaves(groups.decays, whole),
        frozen=map_leaves(groups.frozen, whole),
        momentum=config.muon_momentum,
        nesterov=config.muon_nesterov,
        scale=config.muon_scale,
        specs=map_leaves(lambda info: spec(info.axes), whole),
        coefficients=coefficients(config),
        adam_b1=config.adam_b1,
        adam_b2=config.adam_b2,
        adam_eps=config.adam_eps,
    )
    return joint.on_merged(inner, infos)


def learning_rate(config: OptimConfig, num_steps: int, opt_state: Any) -> jax.Array:
    """float32 []: the learning rate that the update which made `opt_state` used."""
    return jnp.asarray(schedule(config, num_steps)(_only(opt_state, optax.ScaleByScheduleState).count - 1))


def num_clipped(opt_state: Any) -> jax.Array:
    """int32 []: heads that QK-clip rescaled at the last step; 0 where it is off."""
    return _only(opt_state, QkClipState).num_clipped


def restarted(opt_state: Any) -> Any:
    """The state with its moments, but at the beginning of the learning-rate schedule."""

    def one(node: Any) -> Any:
        if isinstance(node, optax.ScaleByScheduleState):
            return jax.tree.map(jnp.zeros_like, node)
        return node

    return jax.tree.map(one, opt_state, is_leaf=lambda node: isinstance(node, optax.ScaleByScheduleState))


def _only(opt_state: Any, kind: type) -> Any:
    """The one state of this kind in a chain."""
    nodes = jax.tree.leaves(opt_state, is_leaf=lambda node: isinstance(node, kind))
    (found,) = (node for node in nodes if isinstance(node, kind))
    return found


def state_shardings(
    config: OptimConfig, infos: Tree, abstract_opt_state: Any, param_shardings: Tree, replicated: Any
) -> Any:
    """Sharding of every leaf of the optimizer state: moments like their parameter, counters replicated.

    Args:
        infos: as given to `build`.
        abstract_opt_state: `jax.eval_shape(tx.init, params)`.
        param_shardings: tree like `infos`.
        replicated: the sharding of counters.
    """

    infos = groups.assigned(config, infos)
    param_shardings = joint.merged(infos, param_shardings, joint.first)
    infos = joint.merged_infos(infos)

    def moments(state: Any, info: Tree | ParamInfo, sharding: Any) -> Any:
        if isinstance(info, dict):
            return {key: moments(state[key], info[key], sharding[key]) for key in info}
        assert all(leaf.shape == info.shape for leaf in jax.tree.leaves(state)), (state, info)
        return jax.tree.map(lambda _: sharding, state)  # nothing where the parameter has no such moment

    def one(node: Any) -> Any:
        return moments(node, infos, param_shardings) if isinstance(node, dict) else replicated

    # In this state the only dicts are trees of moments.
    return jax.tree.map(one, abstract_opt_state, is_leaf=lambda node: isinstance(node, dict))
