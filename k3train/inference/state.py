"""Decode state of a batch of sequences: made, split over a mesh, taken to host memory and filled from there.

What grows with a sequence are MLA's latents; all else has a fixed size (docs/k3.md sections 1.8 and 5).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from k3train.config.schema import ModelConfig
from k3train.model.cache import KdaCache, MlaCache
from k3train.model.k3 import Cache, init_cache
from k3train.parallel.rules import spec

#: Read-only host copies of one sequence's share of the state, in the order of the layers.
HostArrays = tuple[np.ndarray, ...]

#: Logical axes of the cached arrays, the stack of layers first; a short convolution's channels are split by heads.
_CACHE_AXES = {
    KdaCache: ((None, "act_batch", None, "act_heads"), (None, "act_batch", "act_heads", None, None)),
    MlaCache: ((None, "act_batch", None, None),),
}


class State(NamedTuple):
    """On the device."""

    cache: Cache
    hidden: jax.Array  # [B, D] of each row's last token, before the head


@dataclass(frozen=True)
class Sequences:
    """A batch under way. Whatever continues it consumes it: its arrays are written in place.

    Attributes:
        state: on the device, for a bucket of rows of which the first `len(lengths)` are in use.
        lengths: int64 [rows], tokens seen so far.
        capacity: tokens that fit in each row.
    """

    state: State
    lengths: np.ndarray
    capacity: int


def empty(config: ModelConfig, rows: int, capacity: int) -> State:
    """`rows` sequences without tokens, with room for `capacity` each."""
    hidden_BD = jnp.zeros((rows, config.hidden_size), config.compute_dtype)
    return State(init_cache(config, rows, capacity), hidden_BD)


def shardings(config: ModelConfig, mesh: Mesh) -> State:
    """A sharding in place of every array of `State`: rows as in training, heads over tensor."""
    per_row = NamedSharding(mesh, spec(("act_batch",)))

    def one(x):
        if not isinstance(x, KdaCache | MlaCache):
            return per_row
        split = [NamedSharding(mesh, spec(names)) for names in _CACHE_AXES[type(x)]]
        return jax.tree.unflatten(jax.tree.structure(x), split)

    return jax.tree.map(one, jax.eval_shape(lambda: empty(config, 1, 1)), is_leaf=_is_cache)


def fixed_arrays(state: State) -> list[jax.Array]:
    """What does not grow, rows on axis 1: tails and states of every stack of KDA layers."""
    return [x for cache in _caches(state) if isinstance(cache, KdaCache) for x in cache]


def growing_arrays(state: State) -> list[jax.Array]:
    """Latents of every stack of MLA layers, [N, B, capacity, R + P]."""
    return [cache.latent for cache in _caches(state) if isinstance(cache, MlaCache)]


def room(state: State) -> int:
    """Tokens that the cache has room for; 0 for a model whose layers all have a state of fixed size."""
    return max((latent.shape[2] for latent in growing_arrays(state)), default=0)


def filled(
    config: ModelConfig, rows: int, capacity: int, length: int, fixed: HostArrays, latents: Sequence[HostArrays]
) -> State:
    """Numpy arrays of a state whose first row is a copy of what was saved and whose other rows are empty.

    Args:
        length: tokens the saved row had seen.
        fixed: its `fixed_arrays` without the axis of rows, then its hidden state.
        latents: its `growing_arrays` without the axis of rows, of all places in order, in any pieces.
    """
    abstract = jax.eval_shape(lambda: empty(config, rows, capacity))
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract)
    *arrays, state.hidden[0] = fixed
    state.cache.length[0] = length
    for stack, saved in zip(fixed_arrays(state), arrays, strict=True):
        stack[:, 0] = saved
    stacks = growing_arrays(state)
    first = 0 if stacks else length
    for piece in latents if stacks else ():
        last = first + piece[0].shape[1]
        for stack, saved in zip(stacks, piece, strict=True):
            stack[:, 0, first:last] = saved
        first = last
    assert first == length, f"latents of {first} places for a row of {length}"
    return state


def _caches(state: State) -> list[KdaCache | MlaCache]:
    return jax.tree.leaves(state.cache.layers, is_leaf=_is_cache)


def _is_cache(x: object) -> bool:
    return isinstance(x, KdaCache | MlaCache)
