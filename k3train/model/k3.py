"""The whole text model. One set of switches serves K3 and Kimi-Linear (docs/k3.md sections 1.2, 1.9 and 2)."""

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from k3train.config.schema import ModelConfig
from k3train.core.param import Maker
from k3train.core.tree import Blueprint
from k3train.model.attn_res import Reader
from k3train.model.backbone import Backbone, Nested, init_caches
from k3train.model.block import Step
from k3train.model.embed import Embedding, Head
from k3train.model.moe import PLAIN_RUN, MoERun
from k3train.model.norm import RMSNorm


class Cache(NamedTuple):
    """Decode state of a batch of sequences."""

    length: jax.Array  # [B] int32 tokens seen
    layers: Nested


class Hidden(NamedTuple):
    """Result of the forward pass before the head."""

    hidden: jax.Array  # [B, S, D] after the final norm
    cache: Cache | None
    stats: Nested  # LayerStats per layer, nested as run / segment / position, stacked


class K3(nnx.Module):
    """Embedding, layers, output reader, final norm, head."""

    def __init__(self, make: Maker, config: ModelConfig, moe: MoERun):
        self.config = config
        self.embed = Embedding(make.at("embedding"), config)
        self.backbone = Backbone(make, config, moe)
        if config.attn_res != "none":
            self.output_reader = Reader(make.at("attention residuals"), config)
        self.norm = RMSNorm(make.at("final norm"), config.hidden_size, config.rms_norm_eps)
        self.head = Head(make.at("output head"), config)

    def hidden(
        self,
        tokens_BS: jax.Array,
        segment_ids_BS: jax.Array,
        *,
        cache: Cache | None = None,
        collect: bool = False,
    ) -> Hidden:
        """Hidden states for the head.

        Args:
            tokens_BS: int32 token ids.
            segment_ids_BS: int32 document numbers from 1, 0 at padding. With a cache each row is one document: 1 for
                its tokens, 0 for padding, which must lie on the right.
            cache: decode state to continue from; the new one is returned.
            collect: count router statistics (training only).
        """
        dtype = jnp.dtype(self.config.compute_dtype)
        step = Step(segment_ids_BS, None if cache is None else cache.length, collect)
        x_BSD = self.embed(tokens_BS, dtype)
        depth, layers, stats = self.backbone(x_BSD, step, None if cache is None else cache.layers)
        h_BSD = depth.prefix if self.config.attn_res == "none" else self.output_reader(depth)
        if cache is not None and layers is not None:
            seen = jnp.sum(segment_ids_BS > 0, axis=1, dtype=jnp.int32)
            cache = Cache(cache.length + seen, layers)
        return Hidden(self.norm(h_BSD), cache, stats)

    def logits(self, tokens_BS: jax.Array, segment_ids_BS: jax.Array, *, cache: Cache | None = None):
        """float32 logits [B, S, vocabulary] and the new cache."""
        out = self.hidden(tokens_BS, segment_ids_BS, cache=cache)
        return self.head(out.hidden), out.cache


def init_cache(config: ModelConfig, batch: int, capacity: int) -> Cache:
    """Empty decode state for `batch` sequences of at most `capacity` tokens."""
    return Cache(jnp.zeros((batch,), jnp.int32), init_caches(config, batch, capacity))


@cache
def blueprint(config: ModelConfig, moe: MoERun = PLAIN_RUN) -> Blueprint:
    """The model taken apart; nothing is allocated.

    Args:
        moe: what the run decides about its MoE layers.
    """
    return Blueprint(lambda make: K3(make, config, moe))
