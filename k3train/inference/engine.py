"""Prefill and decode: the model of training, fed piece by piece (docs/k3.md sections 1.8 and 5).

Every shape that reaches the compiler is a bucket: rows, tokens of a piece and capacity of the cache are powers of two,
long prompts go through in several pieces. So the number of compiled programs grows with the logarithm of the lengths.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3train.config.schema import ModelConfig
from k3train.core.tree import Tree
from k3train.inference.sample import NONFINITE, Sampling, draw
from k3train.model.cache import KdaCache, MlaCache
from k3train.model.k3 import Cache, blueprint, init_cache
from k3train.parallel.mesh import BATCH_AXES, use_mesh
from k3train.parallel.rules import param_shardings, spec

#: Tokens of the longest piece.
CHUNK = 512
_SHORTEST_PIECE = 16
_SMALLEST_CAPACITY = 64
#: Logical axes of the cached arrays, the stack of layers first; a short convolution's channels are split by heads.
_CACHE_AXES = {
    KdaCache: ((None, "act_batch", None, "act_heads"), (None, "act_batch", "act_heads", None, None)),
    MlaCache: ((None, "act_batch", None, None),),
}
#: What a row that has stopped emits.
_STOPPED = -1


Tokens = Sequence[int] | np.ndarray


class NonFiniteLogits(ValueError):
    """The next token cannot be drawn."""


class Weights(NamedTuple):
    """What the forward pass reads; nothing here is ever changed by it."""

    params: Tree
    bias: Tree


class State(NamedTuple):
    """Decode state on the device."""

    cache: Cache
    hidden: jax.Array  # [B, D] of each row's last token, before the head


class Request(NamedTuple):
    """`Sampling` and the stop tokens as arrays, so that their values are not compiled in."""

    seed: jax.Array  # uint32
    temperature: jax.Array  # float32
    top_p: jax.Array  # float32
    stops: jax.Array  # bool [vocabulary]: tokens that end a row


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


def bucket(count: int, least: int = 1) -> int:
    """The smallest `least` times a power of two that holds `count`."""
    size = least
    while size < count:
        size *= 2
    return size


class Engine:
    """The compiled functions of a model on a mesh; weights are arguments, so they may change between calls.

    Args:
        config: the model.
        mesh: from `parallel.mesh.make_mesh`; parameters are sharded over it as in training, rows over data and expert.
        chunk: tokens of the longest piece of a prompt, a power of two.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh, *, chunk: int = CHUNK):
        assert chunk > 0 and chunk & (chunk - 1) == 0, f"chunk must be a power of two, got {chunk}"
        self.config = config
        self.mesh = mesh
        self.chunk = chunk
        #: One entry per compiled program: its name and the shapes it was compiled for.
        self.programs: list[tuple[Any, ...]] = []
        self._blueprint = blueprint(config)
        self._row_shards = int(np.prod([mesh.shape[axis] for axis in BATCH_AXES]))
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._per_row = NamedSharding(mesh, spec(("act_batch",)))
        self._per_token = NamedSharding(mesh, spec(("act_batch", "act_seq")))
        state, everywhere = self._state_shardings(), self._everywhere
        weights = self._weight_shardings = Weights(
            param_shardings(self._blueprint.infos, mesh),
            jax.tree.map(lambda _: everywhere, self._blueprint.abstract_bias),
        )
        self._start = jax.jit(self._empty_state, static_argnums=(0, 1), out_shardings=state)
        self._logits = jax.jit(
            self._full, in_shardings=(weights, self._per_token, self._per_token), out_shardings=everywhere
        )
        self._extend = jax.jit(
            self._piece,
            in_shardings=(weights, state, self._per_token, self._per_row), out_shardings=state, donate_argnums=1,
        )  # fmt: skip
        self._next = jax.jit(self._head, in_shardings=(weights, self._per_row), out_shardings=everywhere)
        self._decode = jax.jit(
            self._draw_and_feed,
            in_shardings=(weights, state, self._per_row, everywhere, everywhere),
            out_shardings=(state, self._per_row, everywhere, everywhere), donate_argnums=(1, 2, 3),
        )  # fmt: skip

    @property
    def num_programs(self) -> int:
        """Programs compiled so far."""
        return len(self.programs)

    def abstract_weights(self) -> Weights:
        """Shapes, dtypes and shardings of the weights; nothing is allocated."""
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            Weights(self._blueprint.abstract_params, self._blueprint.abstract_bias),
            self._weight_shardings,
        )

    def logits(self, weights: Weights, tokens_BS: np.ndarray, segment_ids_BS: np.ndarray) -> np.ndarray:
        """One full forward pass: int32 [B, S] twice -> float32 [B, S, vocabulary]."""
        B, S = tokens_BS.shape
        shape = (self._row_bucket(B), bucket(S, _SHORTEST_PIECE))
        tokens, segment_ids = (self._put(_padded(x, shape), self._per_token) for x in (tokens_BS, segment_ids_BS))
        with use_mesh(self.mesh):
            return np.asarray(self._logits(weights, tokens, segment_ids))[:B, :S].copy()

    def start(self, rows: int, capacity: int) -> Sequences:
        """Empty sequences of at most `capacity` tokens (rounded up to a bucket)."""
        capacity = bucket(capacity, _SMALLEST_CAPACITY)
        with use_mesh(self.mesh):
            state = self._start(self._row_bucket(rows), capacity)
        return Sequences(state, np.zeros(rows, np.int64), capacity)

    def extend(self, weights: Weights, sequences: Sequences, tokens: Sequence[Tokens]) -> Sequences:
        """Prefill: appends tokens, any number to each row (none to some); `sequences` is consumed."""
        added = np.array([len(row) for row in tokens])
        lengths = sequences.lengths + added
        assert lengths.max() <= sequences.capacity, f"{lengths.max()} tokens in a cache of {sequences.capacity}"
        state = sequences.state
        for first in range(0, added.max(), self.chunk):
            counts = np.clip(added - first, 0, self.chunk)
            longest = counts.max()
            size = 1 if longest == 1 else min(self.chunk, bucket(longest, _SHORTEST_PIECE))
            piece = np.zeros((self._rows(state), size), np.int32)
            for row, count in enumerate(counts):
                piece[row, :count] = tokens[row][first : first + count]
            counts = _padded(counts.astype(np.int32), piece.shape[:1])
            with use_mesh(self.mesh):
                state = self._extend(
                    weights, state, self._put(piece, self._per_token), self._put(counts, self._per_row)
                )
        return Sequences(state, lengths, sequences.capacity)

    def next_logits(self, weights: Weights, sequences: Sequences) -> np.ndarray:
        """float32 [rows, vocabulary] for the token after the last one of each row; consumes nothing."""
        with use_mesh(self.mesh):
            return np.asarray(self._next(weights, sequences.state.hidden))[: len(sequences.lengths)]

    def decode(
        self, weights: Weights, sequences: Sequences, max_tokens: int, sampling: Sampling, stops: Sequence[int] = ()
    ) -> list[list[int]]:
        """Continues every row until a stop token (left out of the result) or `max_tokens`; consumes `sequences`.

        Raises:
            NonFiniteLogits: a row's next token cannot be drawn; names row and position.
        """
        rows = len(sequences.lengths)
        assert sequences.lengths.min() > 0, "an empty row has no next token"
        assert sequences.lengths.max() + max_tokens <= sequences.capacity
        texts: list[list[int]] = [[] for _ in range(rows)]

        def collect(emitted: jax.Array) -> bool:
            """Reads one token per row; whether any row goes on."""
            tokens = np.asarray(emitted)[:rows]
            for row in np.flatnonzero(tokens == NONFINITE):
                position = sequences.lengths[row] + len(texts[row])
                raise NonFiniteLogits(f"the logits of row {row} at position {position} are not finite")
            going = np.flatnonzero(tokens >= 0)
            for row in going:
                texts[row].append(int(tokens[row]))
            return len(going) > 0

        state, request = sequences.state, self._request(sampling, stops)
        active = self._put(np.arange(self._rows(state)) < rows, self._per_row)
        drawn = self._put(np.zeros((), np.int32), self._everywhere)
        previous = None
        for _ in range(max_tokens):
            with use_mesh(self.mesh):
                state, active, drawn, emitted = self._decode(weights, state, active, drawn, request)
            # read one step late, so that the device works on the next token meanwhile
            if previous is not None and not collect(previous):
                return texts
            previous = emitted
        if previous is not None:
            collect(previous)
        return texts

    def generate(
        self, weights: Weights, prompts: Sequence[Tokens], max_tokens: int, sampling: Sampling,
        stops: Sequence[int] = (),
    ) -> list[list[int]]:  # fmt: skip
        """`decode` after a prefill of `prompts`, none of them empty."""
        sequences = self.start(len(prompts), max(map(len, prompts)) + max_tokens)
        return self.decode(weights, self.extend(weights, sequences, prompts), max_tokens, sampling, stops)

    # ---- host helpers

    def _row_bucket(self, rows: int) -> int:
        return bucket(rows, self._row_shards)

    @staticmethod
    def _rows(state: State) -> int:
        return state.hidden.shape[0]

    @staticmethod
    def _put(x: np.ndarray, sharding: NamedSharding) -> jax.Array:
        """A global array of which every process holds all values."""
        return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

    def _request(self, sampling: Sampling, stops: Sequence[int]) -> Request:
        marks = np.zeros(self.config.vocab_size, bool)
        marks[[stop for stop in stops if stop < self.config.vocab_size]] = True
        seed, temperature = np.uint32(sampling.seed), np.float32(sampling.temperature)
        values = (np.asarray(x) for x in (seed, temperature, np.float32(sampling.top_p), marks))
        return Request(*(self._put(x, self._everywhere) for x in values))

    def _state_shardings(self) -> State:
        """A sharding in place of every array of `State`: rows as in training, heads over tensor."""

        def one(x):
            if not isinstance(x, KdaCache | MlaCache):
                return self._per_row
            split = [NamedSharding(self.mesh, spec(names)) for names in _CACHE_AXES[type(x)]]
            return jax.tree.unflatten(jax.tree.structure(x), split)

        return jax.tree.map(one, jax.eval_shape(lambda: _empty(self.config, 1, 1)), is_leaf=_is_cache)

    # ---- traced from here on; Python runs through a function once for every program that is compiled

    def _empty_state(self, rows: int, capacity: int) -> State:
        self.programs.append(("start", rows, capacity))
        return _empty(self.config, rows, capacity)

    def _full(self, weights: Weights, tokens_BS: jax.Array, segment_ids_BS: jax.Array) -> jax.Array:
        self.programs.append(("logits", *tokens_BS.shape))
        return self._blueprint.module(*weights).logits(tokens_BS, segment_ids_BS)[0]

    def _piece(self, weights: Weights, state: State, tokens_BS: jax.Array, counts_B: jax.Array) -> State:
        self.programs.append(("extend", *tokens_BS.shape, _capacity(state)))
        model: Any = self._blueprint.module(*weights)
        return _advance(model, state, tokens_BS, counts_B)

    def _head(self, weights: Weights, hidden_BD: jax.Array) -> jax.Array:
        self.programs.append(("next", len(hidden_BD)))
        return _next_logits(self._blueprint.module(*weights), hidden_BD)

    def _draw_and_feed(
        self, weights: Weights, state: State, active_B: jax.Array, drawn: jax.Array, request: Request
    ) -> tuple[State, jax.Array, jax.Array, jax.Array]:
        """One token for every active row; a row that stops is fed padding, so its state does not move any more.

        Returns:
            state, active rows, number of tokens drawn, and what the host reads: token ids, `_STOPPED`, `NONFINITE`.
        """
        self.programs.append(("decode", len(active_B), _capacity(state)))
        model: Any = self._blueprint.module(*weights)
        logits_BX = _next_logits(model, state.hidden)
        token_B = draw(logits_BX, request.seed, drawn, request.temperature, request.top_p)
        stops_B = ~active_B | ((token_B >= 0) & request.stops[jnp.maximum(token_B, 0)])
        emitted_B = jnp.where(stops_B, _STOPPED, token_B)
        active_B = emitted_B >= 0
        fed_B = jnp.where(active_B, token_B, 0)
        state = _advance(model, state, fed_B[:, None], active_B.astype(jnp.int32))
        return state, active_B, drawn + 1, emitted_B


def _empty(config: ModelConfig, rows: int, capacity: int) -> State:
    hidden_BD = jnp.zeros((rows, config.hidden_size), config.compute_dtype)
    return State(init_cache(config, rows, capacity), hidden_BD)


def _next_logits(model: Any, hidden_BD: jax.Array) -> jax.Array:
    return model.head(hidden_BD[:, None])[:, 0]


def _advance(model: Any, state: State, tokens_BS: jax.Array, counts_B: jax.Array) -> State:
    """Feeds the first `counts_B` tokens of each row; the others are padding and leave no trace."""
    S = tokens_BS.shape[1]
    segment_ids_BS = (jnp.arange(S) < counts_B[:, None]).astype(jnp.int32)
    out = model.hidden(tokens_BS, segment_ids_BS, cache=state.cache)
    last_B11 = jnp.maximum(counts_B - 1, 0)[:, None, None]
    last_BD = jnp.take_along_axis(out.hidden, last_B11, axis=1)[:, 0]
    return State(out.cache, jnp.where(counts_B[:, None] > 0, last_BD, state.hidden))


def _capacity(state: State) -> int:
    """Tokens that the cache has room for; 0 for a model whose layers all have a state of fixed size."""
    caches = jax.tree.leaves(state.cache.layers, is_leaf=_is_cache)
    return max((cache.latent.shape[2] for cache in caches if isinstance(cache, MlaCache)), default=0)


def _is_cache(x: Any) -> bool:
    return isinstance(x, KdaCache | MlaCache)


def _padded(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.pad(x, [(0, size - length) for size, length in zip(shape, x.shape, strict=True)])
