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
        self.remat = config.remat

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
        kept = "none" if cache is not None else self.remat  # decoding has no backward pass

        def mix(prefix):
            x = self._input("mixer", depth._replace(prefix=prefix), prefix_valid, kept)
            return self._mix(x, step, cache)

        def mix_channels(prefix):
            x = self._input("channel", depth._replace(prefix=prefix), not full, kept)
            if self.kind.channel == "moe":
                return self.channel(x, step.segment_ids, collect=step.collect)
            return self.channel(x), None

        if kept in ("sublayer", "block"):
            mix, mix_channels = jax.checkpoint(mix), jax.checkpoint(mix_channels)
        y, cache, max_logit = mix(depth.prefix)
        depth = depth.add(y)
        if full:
            depth = depth.push()
        y, router = mix_channels(depth.prefix)
        return depth.add(y), cache, LayerStats(router, max_logit)

    def _input(self, which: str, depth: Depth, prefix_valid: bool | jax.Array, kept: str) -> jax.Array:
        """What a sublayer's matrices read: the mix over depth, normalised."""
        norm = self.mixer_norm if which == "mixer" else self.channel_norm

        def read(prefix):
            return norm(self._read(which, depth._replace(prefix=prefix), prefix_valid))

        # with the norm, whose input would be kept otherwise
        return (jax.checkpoint(read) if kept == "attention_residuals" else read)(depth.prefix)

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
