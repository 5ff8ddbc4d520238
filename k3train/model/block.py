"""One decoder layer: a mixer over tokens, a mixer over channels, each reading its input from depth."""

from typing import Any, NamedTuple

import jax
from flax import nnx

from k3train.config.schema import ModelConfig
from k3train.core.param import Maker
from k3train.model.attn_res import Depth, Reader
from k3train.model.cache import LayerCache
from k3train.model.kda import KDA
from k3train.model.mla import MLA
from k3train.model.mlp import MLP
from k3train.model.moe import MoE, MoERun
from k3train.model.norm import RMSNorm
from k3train.model.router import RouterStats


class LayerKind(NamedTuple):
    """What distinguishes one layer from another; layers of one kind have the same parameters."""

    mixer: str  # "kda" or "mla"
    channel: str  # "dense" or "moe"
    first: bool  # layer 0: its first reader has nothing to read


class LayerStats(NamedTuple):
    """What the training step needs to know of a layer besides its output; None where the kind has no such thing."""

    router: RouterStats | None  # None also where nothing is collected
    max_logit: jax.Array | None  # [H] largest attention logit of an MLA layer


class Step(NamedTuple):
    """What every layer of one forward pass is told."""

    segment_ids: jax.Array  # [B, S] document numbers, 0 at padding
    length: jax.Array | None  # [B] tokens already in the cache; None in training
    collect: bool  # count router statistics


class Layer(nnx.Module):
    """Pre-norm layer; with attention residuals each sublayer's input is a softmax over depth."""

    def __init__(self, make: Maker, config: ModelConfig, kind: LayerKind, moe: MoERun):
        self.kind = kind
        self.attn_res = config.attn_res
        self.mixer_norm = RMSNorm(make.at("layer norms"), config.hidden_size, config.rms_norm_eps)
        self.mixer = (KDA if kind.mixer == "kda" else MLA)(make.at(kind.mixer), config)
        self.channel_norm = RMSNorm(make.at("layer norms"), config.hidden_size, config.rms_norm_eps)
        if kind.channel == "moe":
            self.channel = MoE(make, config, moe)
        else:
            self.channel = MLP(make.at("dense mlp"), config, config.intermediate_size)
        if self.attn_res != "none":
            readers = make.at("attention residuals")
            self.mixer_reader = Reader(readers, config, used=not kind.first)
            self.channel_reader = Reader(readers, config)

    def __call__(
        self, depth: Depth, step: Step, cache: LayerCache | None, *, prefix_valid: bool | jax.Array
    ) -> tuple[Depth, LayerCache | None, LayerStats]:
        """One layer. In the block form the caller pushes finished blocks; the full form pushes every sublayer.

        Args:
            prefix_valid: whether the current block already holds something, for the first reader.
        """
        full = self.attn_res == "full"
        if full:
            depth, prefix_valid = depth.push(), False
        h = self._read("mixer", depth, prefix_valid)
        y, cache, max_logit = self._mix(self.mixer_norm(h), step, cache)
        depth = depth.add(y)

        if full:
            depth = depth.push()
        h = self._read("channel", depth, not full)
        x = self.channel_norm(h)
        router = None
        if self.kind.channel == "moe":
            y, router = self.channel(x, step.segment_ids, collect=step.collect)
        else:
            y = self.channel(x)
        return depth.add(y), cache, LayerStats(router, max_logit)

    def _read(self, which, depth, prefix_valid):
        if self.attn_res == "none":
            return depth.prefix
        if which == "mixer" and self.kind.first:
            assert depth.sources is not None
            return depth.sources[0]  # the embedding: a softmax over one source
        reader = self.mixer_reader if which == "mixer" else self.channel_reader
        return reader(depth, prefix_valid=prefix_valid)

    def _mix(self, x, step, cache) -> tuple[jax.Array, Any, jax.Array | None]:
        if isinstance(self.mixer, KDA):
            return *self.mixer(x, step.segment_ids, cache), None
        return self.mixer(x, step.segment_ids, cache, step.length)
