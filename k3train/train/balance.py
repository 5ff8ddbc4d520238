"""The router bias between two steps (docs/k3.md section 3.1; report section 2.3.3 and appendices C, D)."""

from collections.abc import Callable

import jax

from k3train.config.schema import OptimConfig
from k3train.core.tree import Tree, map_leaves
from k3train.model.backbone import Nested
from k3train.model.router import NO_MARGINS, Margins, RouterStats
from k3train.ops import quantile
from k3train.train.layer_stats import layer_trees


def margins(config: OptimConfig) -> Margins:
    """What the routers must keep for `optim.balance`."""
    if config.balance == "quantile":
        return Margins("histogram", config.balance_bins)
    return Margins("all") if config.balance == "quantile_exact" else NO_MARGINS


def balanced(config: OptimConfig, bias: Tree, stats: Nested, num_selected: int) -> Tree:
    """The biases of the next step.

    Args:
        bias: router biases [layers, experts], in force during the whole step.
        stats: of the whole step: all micro-batches, devices and hosts.
        num_selected: experts per token.
    """
    new = map_leaves(lambda b: b, bias)
    if config.balance == "none" or not new:  # frozen, or no layer has a router
        return new
    update = jax.vmap(_rule(config, num_selected))
    for layer, stat in layer_trees(new, stats):
        if stat.router is not None:
            router = layer["channel"]["router"]
            router["bias"] = update(stat.router, router["bias"])
    return new


def _rule(config: OptimConfig, num_selected: int) -> Callable[[RouterStats, jax.Array], jax.Array]:
    """(statistics of a layer, bias [E]) -> bias [E]."""

    def rule(stats: RouterStats, bias_E: jax.Array) -> jax.Array:
        if config.balance == "sign":
            return quantile.sign_bias(stats.load, bias_E, step=config.balance_sign_step)
        if config.balance == "quantile_exact":
            assert stats.margins is not None
            found_E = quantile.exact_bias(stats.margins, bias_E, num_selected=num_selected)
        else:
            assert stats.histogram is not None
            found_E = quantile.quantile_bias(stats.histogram, bias_E, num_selected=num_selected)
        # the quantiles are mean-centred, so the average of the quantiles is the average of the biases: no other state
        return config.balance_ema * bias_E + (1 - config.balance_ema) * found_E if config.balance_ema else found_E

    return rule
