"""Depth bookkeeping of attention residuals (report section 2.2; docs/k3.md section 2.4).

The stream is not one running sum: `sources` holds finished blocks, `prefix` the sum of the block under way. A block
starts by pushing the prefix and emptying it; then its first reader sees the finished block as its last source and no
prefix, which is the released order of operations with the push moved before the read (the sources are the same).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from k3train.config.schema import ModelConfig
from k3train.core.param import AdamW, Constant, Frozen, Maker
from k3train.ops.attn_res import attn_res
from k3train.parallel.rules import shard

READER = AdamW(decay=False, source="[Moonlight][torchtitan] norm gains and queries by AdamW, no decay")
UNUSED = Frozen(source="[official code] the reader of layer 0 has no sources; kept for key parity")


def shard_sources(sources_NBSD: jax.Array) -> jax.Array:
    """Stored sources lie like the stream: said outright, because a buffer of zeros gives the compiler no hint."""
    return shard(sources_NBSD, None, "act_batch", "act_seq", "act_embed")


class Depth(NamedTuple):
    """What a layer can read of the layers before it."""

    sources: jax.Array | None  # [N, B, S, D] finished blocks, oldest first; None without attention residuals
    count: int | jax.Array  # how many of the N are filled
    prefix: jax.Array  # [B, S, D] sum of the current block; the stream itself without attention residuals

    def push(self) -> "Depth":
        """The current block is finished: store its sum, start an empty one."""
        assert self.sources is not None
        sources = jax.lax.dynamic_update_index_in_dim(self.sources, self.prefix, self.count, 0)
        empty = shard(jnp.zeros_like(self.prefix), "act_batch", "act_seq", "act_embed")
        return Depth(shard_sources(sources), self.count + 1, empty)

    def add(self, y_BSD: jax.Array) -> "Depth":
        return self._replace(prefix=self.prefix + y_BSD)


class Reader(nnx.Module):
    """One pseudo-query over depth. Queries start at zero: a plain average of the sources [AttnRes]."""

    def __init__(self, make: Maker, config: ModelConfig, *, used: bool = True):
        route = READER if used else UNUSED
        self.eps = config.rms_norm_eps
        self.gain = make((config.hidden_size,), ("norm",), init=Constant(1.0), route=route)
        self.query = make((config.hidden_size,), ("norm",), init=Constant(0.0), route=route)

    def __call__(self, depth: Depth, *, prefix_valid: bool | jax.Array = True) -> jax.Array:
        """Sublayer input [B, S, D]. `prefix_valid=False`: the current block is still empty."""
        assert depth.sources is not None
        static = isinstance(depth.count, int)
        sources = depth.sources[: depth.count] if static else depth.sources
        h_BSD = attn_res(
            sources,
            None if prefix_valid is False else depth.prefix,
            self.gain[...],
            self.query[...],
            eps=self.eps,
            num_sources=None if static else depth.count,
            prefix_valid=prefix_valid,
        )
        return shard(h_BSD, "act_batch", "act_seq", "act_embed")
