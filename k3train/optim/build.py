"""The optimizer of a run: Muon and AdamW by metadata, one schedule, decoupled decay, QK-clip last."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from k3train.config.schema import OptimConfig
from k3train.core.param import ParamInfo
from k3train.core.tree import Tree, map_leaves
from k3train.ops.newton_schulz import SIMPLE
from k3train.optim import groups
from k3train.optim.muon import muon
from k3train.optim.qk_clip import qk_clip
from k3train.optim.schedule import warmup_cosine


def learning_rate(config: OptimConfig, num_steps: int) -> optax.Schedule:
    """Learning rate by 0-based step."""
    return warmup_cosine(config.peak_lr, config.final_lr, config.warmup_fraction, num_steps)


def build(config: OptimConfig, infos: Tree, num_steps: int) -> optax.GradientTransformationExtraArgs:
    """The optimizer for parameters described by `infos` (nested dict of `ParamInfo`).

    `update(grads, state, params, max_logits=None)`; see `qk_clip` for `max_logits`. Gradients come in already clipped
    to the global norm. Which parameter goes where: `groups.table`.

    Raises:
        ValueError: a parameter without a route.
    """
    groups.check(infos)
    steps = [
        muon(
            learning_rate(config, num_steps),
            groups.matrix_views(infos),
            weight_decay=config.weight_decay,
            decay=map_leaves(groups.decays, infos),
            frozen=map_leaves(groups.frozen, infos),
            momentum=config.muon_momentum,
            nesterov=config.muon_nesterov,
            scale=config.muon_scale,
            coefficients=SIMPLE[:1] * config.muon_ns_steps,
            adam_b1=config.adam_b1,
            adam_b2=config.adam_b2,
            adam_eps=config.adam_eps,
        )
    ]
    if config.qk_clip_threshold:
        steps.append(qk_clip(config.qk_clip_threshold, groups.clip_views(infos)))
    return optax.with_extra_args_support(optax.chain(*steps))


def num_clipped(opt_state: Any) -> jax.Array:
    """int32 []: heads that QK-clip rescaled at the last step; 0 where it is off."""
    return optax.tree.get(opt_state, "num_clipped", default=jnp.zeros([], jnp.int32))


def state_shardings(infos: Tree, abstract_opt_state: Any, param_shardings: Tree, replicated: Any) -> Any:
    """Sharding of every leaf of the optimizer state: moments like their parameter, counters replicated.

    Args:
        abstract_opt_state: `jax.eval_shape(tx.init, params)`.
        param_shardings: tree like `infos`.
        replicated: the sharding of counters.
    """

    def moments(state: Any, info: Tree | ParamInfo, sharding: Any) -> Any:
        if isinstance(info, dict):
            return {key: moments(state[key], info[key], sharding[key]) for key in info}
        assert all(leaf.shape == info.shape for leaf in jax.tree.leaves(state)), (state, info)
        return jax.tree.map(lambda _: sharding, state)  # nothing where the parameter has no such moment

    def one(node: Any) -> Any:
        return moments(node, infos, param_shardings) if isinstance(node, dict) else replicated

    # In this state the only dicts are trees of moments.
    return jax.tree.map(one, abstract_opt_state, is_leaf=lambda node: isinstance(node, dict))
