"""Router: float32 scores, bias for selection only, counts for quantile balancing (docs/k3.md sections 2.5, 3.1)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from k3train.config.schema import ModelConfig
from k3train.core.param import Maker, Muon, Uniform
from k3train.ops import quantile
from k3train.ops.routing import Routes
from k3train.parallel.expert import route_tokens
from k3train.parallel.pooled import sum_over_batch

WHOLE = "[lineage guess] whole matrix by Muon"


class RouterStats(NamedTuple):
    """Integer counts over the real tokens of a batch; they add up over micro-batches and devices."""

    load: jax.Array  # [E] int32: tokens sent to each expert
    histogram: jax.Array  # [E, bins] int32: margins of all experts


class Router(nnx.Module):
    """Sigmoid scores on the full-width stream."""

    def __init__(self, make: Maker, config: ModelConfig, num_bins: int):
        D, E = config.hidden_size, config.num_experts
        self.config = config
        self.num_bins = num_bins
        # a bare parameter in the released code: Kaiming-uniform, not the generic initialiser
        self.weight = make(
            (D, E), ("embed", "router_experts"),
            init=Uniform(D**-0.5), route=Muon(("embed",), ("router_experts",), WHOLE),
        )  # fmt: skip
        self.bias = make.router_bias(E)

    def __call__(self, x_BSD: jax.Array, segment_ids_BS: jax.Array, *, collect: bool) -> tuple[Routes, RouterStats]:
        """Routes of the tokens [B, S, ...]; counts if `collect` (training), else zeros."""
        config = self.config
        logits_BSE = jnp.einsum("BSD,DE->BSE", x_BSD.astype(jnp.float32), self.weight[...])
        routes = route_tokens(
            logits_BSE,
            self.bias[...],
            num_selected=config.num_experts_per_token,
            renormalize=config.moe_renormalize,
            scaling_factor=config.moe_routed_scaling_factor,
        )
        return routes, self._stats(routes, segment_ids_BS > 0, collect)

    def _stats(self, routes, valid_BS, collect):
        E, bins = self.config.num_experts, self.num_bins
        if not collect:
            return RouterStats(jnp.zeros((E,), jnp.int32), jnp.zeros((E, bins), jnp.int32))
        bias_E = self.bias[...]

        def histogram(scores, cutoff, valid, bias):
            return quantile.histogram(scores, cutoff, bias, valid, num_bins=bins)

        def load(ids, valid):
            return quantile.expert_loads(ids, valid, num_experts=E)

        scores, cutoff = jax.lax.stop_gradient((routes.scores_PE, routes.cutoff_P))
        return RouterStats(
            sum_over_batch(load, (routes.ids_PK, valid_BS)),
            sum_over_batch(histogram, (scores, cutoff, valid_BS), bias_E),
        )
