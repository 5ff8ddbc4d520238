"""Stable LatentMoE, and plain MoE without the latent (report section 2.3; docs/k3.md section 2.5)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from k3train.config.schema import ModelConfig
from k3train.core.param import Maker, Muon
from k3train.model.init import matrix
from k3train.model.mlp import MLP, activation
from k3train.model.norm import RMSNorm
from k3train.model.router import NO_MARGINS, Margins, Router, RouterStats
from k3train.ops.mx import Rounding
from k3train.parallel.expert import PLAIN, Sharing, routed_experts
from k3train.parallel.rules import shard

PER_EXPERT = "[lineage guess] Muon per expert matrix"
WHOLE = "[lineage guess] whole matrix by Muon"


class MoERun(NamedTuple):
    """What a run decides about its MoE layers. Their parameters are the same whatever it is."""

    margins: Margins = NO_MARGINS  # what routers keep in training
    rounding: Rounding | None = None  # of what the experts' matrices are multiplied with
    sharing: Sharing = PLAIN


PLAIN_RUN = MoERun()


class MoE(nnx.Module):
    """Routed experts in the latent space, shared experts on the stream."""

    def __init__(self, make: Maker, config: ModelConfig, run: MoERun):
        D, E, F = config.hidden_size, config.num_experts, config.moe_intermediate_size
        self.run = run
        L = config.moe_latent_size or D
        self.activation = activation(config)
        self.router = Router(make.at("router"), config, run.margins)
        routed = make.at("routed experts")
        into, out = Muon(("expert_in",), ("expert_mlp",), PER_EXPERT), Muon(("expert_mlp",), ("expert_in",), PER_EXPERT)
        up_axes, down_axes = ("experts", "expert_in", "expert_mlp"), ("experts", "expert_mlp", "expert_in")
        self.w1 = routed((E, L, F), up_axes, init=matrix(config, L), route=into, quantised="expert_in")
        self.w3 = routed((E, L, F), up_axes, init=matrix(config, L), route=into, quantised="expert_in")
        self.w2 = routed((E, F, L), down_axes, init=matrix(config, F), route=out, quantised="expert_mlp")
        self.latent = bool(config.moe_latent_size)
        self.latent_norm = config.moe_latent_norm
        if self.latent:
            latent = make.at("latent projections")
            down, up = Muon(("embed",), ("latent",), WHOLE), Muon(("latent",), ("embed",), WHOLE)
            self.down = latent((D, L), ("embed", "latent"), init=matrix(config, D), route=down)
            self.up = latent((L, D), ("latent", "embed"), init=matrix(config, L), route=up)
            if self.latent_norm:
                self.norm = RMSNorm(latent, L, config.rms_norm_eps)
        self.num_shared = config.num_shared_experts
        if self.num_shared:
            self.shared = MLP(make.at("shared experts"), config, self.num_shared * F)

    def __call__(
        self, x_BSD: jax.Array, segment_ids_BS: jax.Array, *, collect: bool
    ) -> tuple[jax.Array, RouterStats | None]:
        """Normalised stream in, sublayer output and router statistics out."""
        dtype = x_BSD.dtype
        routes, stats = self.router(x_BSD, segment_ids_BS, collect=collect)
        z_BSL = jnp.einsum("BSD,DL->BSL", x_BSD, self.down[...].astype(dtype)) if self.latent else x_BSD
        u_BSL = routed_experts(
            z_BSL,
            # padding is sent to no expert
            jnp.where(segment_ids_BS[..., None] > 0, routes.ids_PK, self.w1.shape[0]),
            routes.weights_PK,
            self.w1[...].astype(dtype),
            self.w3[...].astype(dtype),
            self.w2[...].astype(dtype),
            activation=self.activation,
            rounding=self.run.rounding,
            sharing=self.run.sharing,
        )
        y_BSD = u_BSL.astype(dtype)  # summed over experts in float32, then cast [official code]
        if self.latent:
            if self.latent_norm:
                y_BSD = self.norm(y_BSD)
            y_BSD = jnp.einsum("BSL,LD->BSD", y_BSD, self.up[...].astype(dtype))
        if self.num_shared:
            y_BSD = y_BSD + self.shared(x_BSD)
        return shard(y_BSD, "act_batch", "act_seq", "act_embed"), stats
