"""Router: float32 scores, bias for selection only, counts for quantile balancing (docs/k3.md sections 2.5, 3.1)."""

from dataclasses import dataclass
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


@dataclass(frozen=True)
class Margins:
    """What routers keep, in training, of how far each score was from being chosen.

    Attributes:
        kind: `none`; `histogram`: counts over `bins`; `all`: every margin.
    """

    kind: str = "none"
    bins: int = 0


NO_MARGINS = Margins()


class RouterStats(NamedTuple):
    """Of the real tokens of a batch. Counts add up over micro-batches and devices; margins lie side by side."""

    load: jax.Array  # [E] int32: tokens sent to each expert
    histogram: jax.Array | None = None  # [E, bins] int32: margins of all experts
    margins: jax.Array | None = None  # [B, S, E] float32, infinite at padding


class Router(nnx.Module):
    """Sigmoid scores on the full-width stream."""

    def __init__(self, make: Maker, config: ModelConfig, margins: Margins):
        D, E = config.hidden_size, config.num_experts
        self.config = config
        self.margins = margins
        # a bare parameter in the released code: Kaiming-uniform, not the generic initialiser
        self.weight = make(
            (D, E), ("embed", "router_experts"),
            init=Uniform(D**-0.5), route=Muon(("embed",), ("router_experts",), WHOLE),
        )  # fmt: skip
        self.bias = make.router_bias(E)

    def __call__(
        self, x_BSD: jax.Array, segment_ids_BS: jax.Array, *, collect: bool
    ) -> tuple[Routes, RouterStats | None]:
        """Routes of the tokens [B, S, ...]; statistics if `collect` (training)."""
        config = self.config
        logits_BSE = jnp.einsum("BSD,DE->BSE", x_BSD.astype(jnp.float32), self.weight[...])
        routes = route_tokens(
            logits_BSE,
            self.bias[...],
            num_selected=config.num_experts_per_token,
            renormalize=config.moe_renormalize,
            scaling_factor=config.moe_routed_scaling_factor,
        )
        return routes, self._stats(routes, segment_ids_BS > 0) if collect else None

    def _stats(self, routes, valid_BS):
        def load(ids, valid):
            return quantile.expert_loads(ids, valid, num_experts=self.config.num_experts)

        def histogram(scores, cutoff, valid, bias):
            return quantile.histogram(quantile.margins(scores, cutoff, valid), bias, num_bins=self.margins.bins)

        stats = RouterStats(sum_over_batch(load, (routes.ids_PK, valid_BS)))
        scores, cutoff = jax.lax.stop_gradient((routes.scores_PE, routes.cutoff_P))
        if self.margins.kind == "histogram":
            return stats._replace(histogram=sum_over_batch(histogram, (scores, cutoff, valid_BS), self.bias[...]))
        if self.margins.kind == "all":
            return stats._replace(margins=quantile.margins(scores, cutoff, valid_BS))
        return stats
