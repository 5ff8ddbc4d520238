"""Gated multi-head latent attention without positions (report section 2.1.2; docs/k3.md section 2.3)."""

import jax
import jax.numpy as jnp
from flax import nnx

from k3train.config.schema import ModelConfig
from k3train.core.param import Clip, Joint, Maker, Muon
from k3train.model.cache import MlaLayer
from k3train.model.init import matrix
from k3train.model.norm import RMSNorm
from k3train.ops.attention import causal_attention, latent_attention
from k3train.parallel.rules import shard

PER_HEAD_Q = "[report 2.5] reading: q_b by Muon, head by head"
PER_HEAD_KV = "[suggestion] key and value block of a head apart"
WHOLE = "[lineage guess] whole matrix by Muon"


class MLA(nnx.Module):
    """Low-rank queries, one latent for keys and values, output gate; nothing is ever rotated."""

    def __init__(self, make: Maker, config: ModelConfig):
        D, H, R = config.hidden_size, config.mla_num_heads, config.mla_kv_lora_rank
        N, P, V = config.mla_qk_nope_head_dim, config.mla_qk_rope_head_dim, config.mla_v_head_dim
        self.config = config
        self.scale = (N + P) ** -0.5
        # QK-clip: content channels take sqrt(gamma) on both sides, the extra query channels all of gamma,
        # because the extra key is shared by all heads (docs/k3.md section 3.3)
        clip_q, clip_k = Clip("head_dim", ((N, 0.5), (P, 1.0))), Clip("head_dim", ((N, 0.5),))
        head_axes = ("heads", "head_dim")
        if config.mla_q_lora_rank:
            Q = config.mla_q_lora_rank
            self.q_a = make((D, Q), ("embed", "rank"), init=matrix(config, D), route=Muon(("embed",), ("rank",), WHOLE))
            self.q_a_norm = RMSNorm(make, Q, config.mla_norm_eps)
        q_in, q_axis = (config.mla_q_lora_rank, "rank_in") if config.mla_q_lora_rank else (D, "embed")
        self.q_b = make(
            (q_in, H, N + P), (q_axis, *head_axes),
            init=matrix(config, q_in), route=Muon((q_axis,), ("head_dim",), PER_HEAD_Q), clip=clip_q,
        )  # fmt: skip
        self.kv_a = make(
            (D, R + P), ("embed", "rank"), init=matrix(config, D), route=Muon(("embed",), ("rank",), WHOLE)
        )
        self.kv_a_norm = RMSNorm(make, R, config.mla_norm_eps)
        per_head = Muon(("rank_in",), ("head_dim",), PER_HEAD_KV, Joint("kv_b", "head_dim"))
        self.k_b = make((R, H, N), ("rank_in", *head_axes), init=matrix(config, R), route=per_head, clip=clip_k)
        self.v_b = make((R, H, V), ("rank_in", *head_axes), init=matrix(config, R), route=per_head)
        if config.mla_output_gate:
            self.g = make(
                (D, H, V), ("embed", *head_axes), init=matrix(config, D), route=Muon(("embed",), head_axes, WHOLE)
            )
        self.o = make(
            (H, V, D), (*head_axes, "embed"), init=matrix(config, H * V), route=Muon(head_axes, ("embed",), WHOLE)
        )

    def __call__(
        self, x_BSD: jax.Array, segment_ids_BS: jax.Array, cache: MlaLayer | None, length_B: jax.Array | None
    ) -> tuple[jax.Array, MlaLayer | None, jax.Array]:
        """Normalised stream in, sublayer output out.

        Args:
            segment_ids_BS: document numbers, 0 at padding. With a cache: 1 for tokens, 0 for padding on the right.
            cache, length_B: latents of earlier tokens and how many there are per row; None in training.

        Returns:
            output [B, S, D], the cache with this chunk written into it, largest attention logit per head [H].
        """
        q_BSHK = self._queries(x_BSD)
        latent_BSR, extra_BSP = self._latent(x_BSD)
        if cache is None:
            out, max_logit = self._expanded(q_BSHK, latent_BSR, extra_BSP, segment_ids_BS)
        else:
            row = jnp.concatenate([latent_BSR, extra_BSP], axis=-1)
            out, max_logit, cache = self._absorbed(q_BSHK, row, segment_ids_BS, cache, length_B)
        return self._output(x_BSD, out), cache, max_logit

    def _queries(self, x_BSD):
        dtype = x_BSD.dtype
        if self.config.mla_q_lora_rank:
            x_BSD = self.q_a_norm(jnp.einsum("BSD,DR->BSR", x_BSD, self.q_a[...].astype(dtype)))
        q_BSHK = jnp.einsum("BSR,RHK->BSHK", x_BSD, self.q_b[...].astype(dtype))
        return shard(q_BSHK, "act_batch", "act_seq", "act_heads", None)

    def _latent(self, x_BSD):
        """Normalised latent [B, S, R] and the shared extra key [B, S, P], which is not normalised."""
        both = jnp.einsum("BSD,DR->BSR", x_BSD, self.kv_a[...].astype(x_BSD.dtype))
        R = self.config.mla_kv_lora_rank
        return self.kv_a_norm(both[..., :R]), both[..., R:]

    def _expanded(self, q_BSHK, latent_BSR, extra_BSP, segment_ids_BS):
        """Keys and values per head, for training."""
        dtype = q_BSHK.dtype
        k = jnp.einsum("BSR,RHK->BSHK", latent_BSR, self.k_b[...].astype(dtype))
        v = jnp.einsum("BSR,RHV->BSHV", latent_BSR, self.v_b[...].astype(dtype))
        extra = jnp.broadcast_to(extra_BSP[:, :, None, :], (*k.shape[:3], extra_BSP.shape[-1]))
        k = shard(jnp.concatenate([k, extra], axis=-1), "act_batch", "act_seq", "act_heads", None)
        v = shard(v, "act_batch", "act_seq", "act_heads", None)
        return causal_attention(q_BSHK, k, v, segment_ids_BS, scale=self.scale)

    def _absorbed(self, q_BSHK, row_BSR, segment_ids_BS, cache, length_B):
        """Scores against the cached latents themselves: the key projection moves onto the query."""
        dtype = q_BSHK.dtype
        N, R = self.config.mla_qk_nope_head_dim, self.config.mla_kv_lora_rank
        B, S = segment_ids_BS.shape
        position_BS = length_B[:, None] + jnp.arange(S)
        # padding is dropped, not written: it lies beyond the capacity
        target_BS = jnp.where(segment_ids_BS > 0, position_BS, cache.latent.shape[2])
        latent_NBTR = cache.latent.at[cache.layer, jnp.arange(B)[:, None], target_BS].set(row_BSR, mode="drop")
        content = jnp.einsum("BSHK,RHK->BSHR", q_BSHK[..., :N], self.k_b[...].astype(dtype))
        query = jnp.concatenate([content, q_BSHK[..., N:]], axis=-1)
        mixed, max_logit = latent_attention(
            query, latent_NBTR, cache.layer, position_BS, segment_ids_BS > 0, scale=self.scale, value_width=R
        )
        out = jnp.einsum(
            "BSHR,RHV->BSHV", mixed.astype(dtype), self.v_b[...].astype(dtype), preferred_element_type=jnp.float32
        )
        return out, max_logit, cache._replace(latent=latent_NBTR)

    def _output(self, x_BSD, out_BSHV):
        """Gate (sigmoid in the compute dtype, as released), one cast, output projection (report equation 7)."""
        dtype = x_BSD.dtype
        if self.config.mla_output_gate:
            gate = jax.nn.sigmoid(jnp.einsum("BSD,DHV->BSHV", x_BSD, self.g[...].astype(dtype)))
            out_BSHV = out_BSHV * gate.astype(jnp.float32)
        out_BSHV = shard(out_BSHV.astype(dtype), "act_batch", "act_seq", "act_heads", None)
        y_BSD = jnp.einsum("BSHV,HVD->BSD", out_BSHV, self.o[...].astype(dtype))
        return shard(y_BSD, "act_batch", "act_seq", "act_embed")
