"""Kimi Delta Attention layer (report section 2.1.1; docs/k3.md section 2.2)."""

import jax
import jax.numpy as jnp
from flax import nnx

from k3train.config.schema import ModelConfig
from k3train.core.param import AdamW, Constant, Maker, Muon, Uniform
from k3train.model.cache import KdaCache
from k3train.model.init import matrix
from k3train.ops import kda_gate
from k3train.ops.kda_chunk import chunk_kda
from k3train.ops.kda_reference import recurrent_kda
from k3train.ops.short_conv import short_conv
from k3train.parallel.rules import shard

PER_HEAD = "[report 2.5] Q, K, V by Muon, head by head"
WHOLE = "[lineage guess] whole matrix by Muon"
SMALL = "[Moonlight][torchtitan] AdamW, no decay"

#: Pieces of a decoded sequence up to this length go token by token: a decode step, a short prompt.
SHORT_PIECE = 16


class KDA(nnx.Module):
    """Short convolution, bounded decay, delta rule, gated output."""

    def __init__(self, make: Maker, config: ModelConfig):
        D, H, K, R = config.hidden_size, config.kda_num_heads, config.kda_head_dim, config.kda_gate_rank
        W = config.kda_conv_size
        self.config = config
        small = AdamW(decay=False, source=SMALL)
        heads_out = Muon(("embed",), ("heads", "head_dim"), WHOLE)
        into_rank, from_rank = Muon(("embed",), ("rank",), WHOLE), Muon(("rank_in",), ("heads", "head_dim"), WHOLE)
        bounded = config.kda_gate == "bounded"
        self.min_log_decay = config.kda_gate_lower_bound if bounded else None

        self.qkv = make(
            (D, H, 3, K), ("embed", "heads", "qkv", "head_dim"),
            init=matrix(config, D), route=Muon(("embed",), ("head_dim",), PER_HEAD),
        )  # fmt: skip
        self.conv = make((H, 3, K, W), ("heads", "qkv", "head_dim", "conv_tap"), init=Uniform(W**-0.5), route=small)
        self.f_a = make((D, R), ("embed", "rank"), init=matrix(config, D), route=into_rank)
        self.f_b = make((R, H, K), ("rank_in", "heads", "head_dim"), init=matrix(config, R), route=from_rank)
        a_log = kda_gate.a_log_zeros_init if bounded else kda_gate.a_log_uniform_init
        self.a_log = make((H,), ("heads",), init=a_log, route=small)
        self.dt_bias = make((H, K), ("heads", "head_dim"), init=kda_gate.dt_bias_init, route=small)
        self.beta = make((D, H), ("embed", "heads"), init=matrix(config, D), route=Muon(("embed",), ("heads",), WHOLE))
        if config.kda_output_gate == "full":
            self.g = make((D, H, K), ("embed", "heads", "head_dim"), init=matrix(config, D), route=heads_out)
        else:
            self.g_a = make((D, R), ("embed", "rank"), init=matrix(config, D), route=into_rank)
            self.g_b = make((R, H, K), ("rank_in", "heads", "head_dim"), init=matrix(config, R), route=from_rank)
        self.o_norm = make((K,), ("norm",), init=Constant(1.0), route=small)
        self.o = make(
            (H, K, D), ("heads", "head_dim", "embed"),
            init=matrix(config, H * K), route=Muon(("heads", "head_dim"), ("embed",), WHOLE),
        )  # fmt: skip

    def __call__(
        self, x_BSD: jax.Array, segment_ids_BS: jax.Array, cache: KdaCache | None = None
    ) -> tuple[jax.Array, KdaCache | None]:
        """Normalised stream in, sublayer output out; the cache continues the first document of each row."""
        q, k, v, tail = self._convolved(x_BSD, segment_ids_BS, cache)
        log_decay, beta = self._decay(x_BSD), self._beta(x_BSD)
        state = None if cache is None else cache.state
        if cache is not None and x_BSD.shape[1] <= SHORT_PIECE:
            read, state = recurrent_kda(q, k, v, log_decay, beta, initial_state=state, segment_ids=segment_ids_BS)
        else:
            read, state = chunk_kda(
                q, k, v, log_decay, beta,
                initial_state=state, segment_ids=segment_ids_BS,
                chunk_size=self.config.kda_chunk_size, min_log_decay=self.min_log_decay,
            )  # fmt: skip
        y_BSD = self._output(x_BSD, read)
        return y_BSD, None if cache is None else KdaCache(tail, state)

    def _convolved(self, x_BSD, segment_ids_BS, cache):
        dtype = x_BSD.dtype
        qkv = jnp.einsum("BSD,DHGK->BSHGK", x_BSD, self.qkv[...].astype(dtype))
        B, S, H, G, K = qkv.shape
        flat, tail = short_conv(
            qkv.reshape(B, S, H * G * K), self.conv[...].reshape(H * G * K, -1),
            tail=None if cache is None else cache.tail, segment_ids=segment_ids_BS,
        )  # fmt: skip
        qkv = shard(flat.reshape(B, S, H, G, K), "act_batch", "act_seq", "act_heads", None, None)
        q, k, v = qkv[:, :, :, 0], qkv[:, :, :, 1], qkv[:, :, :, 2]
        return kda_gate.l2_normalise(q), kda_gate.l2_normalise(k), v, tail

    def _decay(self, x_BSD):
        """Log decay per channel, float32 [B, S, H, K] (report equation 5)."""
        dtype = x_BSD.dtype
        low = jnp.einsum("BSD,DR->BSR", x_BSD, self.f_a[...].astype(dtype))
        z = jnp.einsum("BSR,RHK->BSHK", low, self.f_b[...].astype(dtype)).astype(jnp.float32) + self.dt_bias[...]
        if self.config.kda_gate == "bounded":
            return kda_gate.bounded_log_decay(z, self.a_log[...], self.config.kda_gate_lower_bound)
        return kda_gate.softplus_log_decay(z, self.a_log[...])

    def _beta(self, x_BSD):
        """Write strength, one per head: float32 [B, S, H]."""
        logits = jnp.einsum("BSD,DH->BSH", x_BSD, self.beta[...].astype(x_BSD.dtype))
        return jax.nn.sigmoid(logits.astype(jnp.float32))

    def _output(self, x_BSD, read_BSHK):
        """Head-wise RMSNorm, sigmoid gate, both in float32; one cast; output projection (report equation 6)."""
        dtype = x_BSD.dtype
        if self.config.kda_output_gate == "full":
            gate = jnp.einsum("BSD,DHK->BSHK", x_BSD, self.g[...].astype(dtype))
        else:
            low = jnp.einsum("BSD,DR->BSR", x_BSD, self.g_a[...].astype(dtype))
            gate = jnp.einsum("BSR,RHK->BSHK", low, self.g_b[...].astype(dtype))
        read = read_BSHK.astype(jnp.float32)
        read = read * jax.lax.rsqrt(jnp.mean(read * read, axis=-1, keepdims=True) + self.config.rms_norm_eps)
        gated = (read * self.o_norm[...] * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(dtype)
        gated = shard(gated, "act_batch", "act_seq", "act_heads", None)
        y_BSD = jnp.einsum("BSHK,HKD->BSD", gated, self.o[...].astype(dtype))
        return shard(y_BSD, "act_batch", "act_seq", "act_embed")
