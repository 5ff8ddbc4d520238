"""The stack of layers: scanned inside blocks and over equal blocks. Nothing else knows that layers are stacked."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from k3train.config.schema import ModelConfig
from k3train.core.param import Maker
from k3train.model.attn_res import Depth, shard_sources
from k3train.model.block import Layer, Step
from k3train.model.cache import kda_cache, mla_cache, put, take
from k3train.model.layout import BlockRun, Segment, layout, num_sources
from k3train.model.moe import MoERun

#: Caches and statistics are nested lists run / segment / position; every leaf has a leading stack axis.
Nested = list[list[list[Any]]]


class _Pieces(NamedTuple):
    """A stack of layers taken apart for a scan: static graphs and arrays, one each per position of the period."""

    graphs: tuple[Any, ...]
    states: tuple[Any, ...]


def _reshape_stack(tree: Any, *leading: int) -> Any:
    return jax.tree.map(lambda x: x.reshape(*leading, *x.shape[1:]), tree)


def _merge_stack(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), tree)


def _first(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0], tree)


def _stack_of_one(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None], tree)


class Backbone(nnx.Module):
    """All layers, from the embedded tokens to the depth that the output reader sees."""

    def __init__(self, make: Maker, config: ModelConfig, moe: MoERun):
        self.config = config

        def stack(kind, count):
            return Layer(make.stacked(count), config, kind, moe)

        self.runs = nnx.List([
            nnx.List([
                nnx.List([stack(kind, run.repeats * segment.repeats) for kind in segment.period])
                for segment in run.segments
            ])
            for run in layout(config)
        ])  # fmt: skip

    def __call__(self, x_BSD: jax.Array, step: Step, caches: Nested | None) -> tuple[Depth, Nested | None, Nested]:
        """Returns the final depth, the caches, and the statistics of every layer."""
        stored = num_sources(self.config)
        sources = shard_sources(jnp.zeros((stored, *x_BSD.shape), x_BSD.dtype)) if stored else None
        # the full form counts under a scan; the block form knows its count while tracing, except in a run of blocks
        count = jnp.int32(0) if self.config.attn_res == "full" else 0
        depth = Depth(sources, count, x_BSD)
        new_caches, stats = [], []
        for r, run in enumerate(layout(self.config)):
            pieces = [self._pieces(segment) for segment in self.runs[r]]
            cache = None if caches is None else caches[r]
            depth, new_cache, stat = self._run(run, pieces, depth, step, cache)
            new_caches.append(new_cache)
            stats.append(stat)
        return depth, None if caches is None else new_caches, stats

    @staticmethod
    def _pieces(segment: Sequence[Layer]) -> _Pieces:
        graphs, states = zip(*(nnx.split(layer) for layer in segment), strict=True)
        return _Pieces(graphs, states)

    def _run(self, run: BlockRun, pieces: list[_Pieces], depth: Depth, step: Step, caches):
        """Equal blocks: one call, or a scan whose carry is the whole depth."""
        if run.repeats == 1:
            return self._block(run, pieces, depth, step, caches, 0)

        def outer(tree, segment):
            return _reshape_stack(tree, run.repeats, segment.repeats)

        graphs = [p.graphs for p in pieces]
        states = [outer(p.states, s) for p, s in zip(pieces, run.segments, strict=True)]

        def body(carry, block):
            states, number = block
            parts = [_Pieces(g, s) for g, s in zip(graphs, states, strict=True)]
            depth, caches, stats = self._block(run, parts, carry[0], step, carry[1], number)
            return (depth, caches), stats

        depth = depth._replace(count=jnp.asarray(depth.count, jnp.int32))
        (depth, caches), stats = jax.lax.scan(body, (depth, caches), (states, jnp.arange(run.repeats)))
        return depth, caches, _merge_stack(stats)

    def _block(self, run: BlockRun, pieces: list[_Pieces], depth: Depth, step: Step, caches, number: int | jax.Array):
        """Block `number` of a run: push the finished one, then the layers."""
        if self.config.attn_res != "block":
            return self._segments(run, pieces, depth, step, caches, number)
        if self.config.remat != "block" or caches is not None:
            return self._segments(run, pieces, depth.push(), step, caches, number)

        def block(states, sources, prefix):
            parts = [_Pieces(p.graphs, s) for p, s in zip(pieces, states, strict=True)]
            pushed = Depth(sources, depth.count, prefix).push()
            end, _, stats = self._segments(run, parts, pushed, step, None, number)
            return end.sources, end.prefix, stats

        sources, prefix, stats = jax.checkpoint(block)([p.states for p in pieces], depth.sources, depth.prefix)
        return Depth(sources, depth.count + 1, prefix), None, stats

    def _segments(
        self, run: BlockRun, pieces: list[_Pieces], depth: Depth, step: Step, caches, number: int | jax.Array
    ):
        """The segments of one block in order."""
        new_caches, stats = [], []
        for s, segment in enumerate(run.segments):
            cache = None if caches is None else caches[s]
            first = number * segment.repeats
            depth, cache, stat = self._segment(segment, pieces[s], depth, step, cache, first)
            new_caches.append(cache)
            stats.append(stat)
        return depth, None if caches is None else new_caches, stats

    def _segment(self, segment: Segment, pieces: _Pieces, depth: Depth, step: Step, caches, first: int | jax.Array):
        """The layers of a period, `repeats` times, from entry `first` of the caches' stacks on.

        In the block form the stored sources do not change inside a block: only the prefix moves, so the backward pass
        keeps one copy of the sources and not one per layer. The caches move as a whole, so that they change in place.
        """
        full = self.config.attn_res == "full"

        def body(carry: Any, repeat: Any):
            (moving, caches), (states, number, valid) = carry, repeat
            caches, stats = None if caches is None else list(caches), []
            for p, graph in enumerate(pieces.graphs):
                current = moving if full else depth._replace(prefix=moving)
                cache = None if caches is None else take(caches[p], number)
                layer: Any = nnx.merge(graph, states[p])
                current, cache, stat = layer(current, step, cache, prefix_valid=valid if p == 0 else True)
                moving = current if full else current.prefix
                if caches is not None:
                    caches[p] = put(caches[p], cache, number)
                stats.append(stat)
            return (moving, caches), stats

        if self.config.remat == "block" and self.config.attn_res != "block" and caches is None:
            body = jax.checkpoint(body)  # no attention-residual blocks: the period stands for one
        start: Any = (depth if full else depth.prefix), caches
        if segment.repeats == 1:
            (moving, caches), stats = body(start, (_first(pieces.states), first, segment.offset > 0))
            stats = _stack_of_one(stats)
        else:
            repeats = jnp.arange(segment.repeats)
            valid = (repeats > 0) | (segment.offset > 0)
            (moving, caches), stats = jax.lax.scan(body, start, (pieces.states, first + repeats, valid))
        return (moving if full else depth._replace(prefix=moving)), caches, stats


def init_caches(config: ModelConfig, batch: int, capacity: int) -> Nested:
    """Empty decode state for `batch` sequences of at most `capacity` tokens."""

    def one(kind, count):
        cache = kda_cache(config, batch) if kind.mixer == "kda" else mla_cache(config, batch, capacity)
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (count, *x.shape)), cache)

    return [
        [[one(kind, run.repeats * segment.repeats) for kind in segment.period] for segment in run.segments]
        for run in layout(config)
    ]
