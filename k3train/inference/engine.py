"""Prefill and decode: the model of training, fed piece by piece (docs/k3.md sections 1.8 and 5).

Every shape that reaches the compiler is a bucket: rows, tokens of a piece and capacity of the cache are powers of two,
long prompts go through in several pieces. So the number of compiled programs grows with the logarithm of the lengths.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3train.config.schema import ModelConfig, QuantConfig
from k3train.core.tree import Tree
from k3train.inference.sample import NONFINITE, Sampling, draw
from k3train.inference.state import (
    HostArrays,
    Sequences,
    State,
    empty,
    filled,
    fixed_arrays,
    growing_arrays,
    room,
    shardings,
)
from k3train.model.k3 import blueprint
from k3train.model.moe import MoERun
from k3train.model.quantise import input_rounding, rounded_params
from k3train.parallel.mesh import BATCH_AXES, use_mesh
from k3train.parallel.rules import param_shardings, spec

#: Tokens of the longest piece.
CHUNK = 512
_SHORTEST_PIECE = 16
_SMALLEST_CAPACITY = 64
#: What a row that has stopped emits.
_STOPPED = -1


Tokens = Sequence[int] | np.ndarray


class NonFiniteLogits(ValueError):
    """The next token cannot be drawn."""


class Weights(NamedTuple):
    """What the forward pass reads; nothing here is ever changed by it."""

    params: Tree
    bias: Tree


class Request(NamedTuple):
    """`Sampling` and the stop tokens as arrays, so that their values are not compiled in."""

    seed: jax.Array  # uint32
    temperature: jax.Array  # float32
    top_p: jax.Array  # float32
    first_row: jax.Array  # int32, the number of the batch's first row, of which the draws are made
    stops: jax.Array  # bool [vocabulary]: tokens that end a row


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
        quant: how routed experts compute, their weights given as `rounded` makes them; None: not quantised.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh, *, chunk: int = CHUNK, quant: QuantConfig | None = None):
        assert chunk > 0 and chunk & (chunk - 1) == 0, f"chunk must be a power of two, got {chunk}"
        self.config = config
        self.mesh = mesh
        self.chunk = chunk
        #: One entry per compiled program: its name and the shapes it was compiled for.
        self.programs: list[tuple[Any, ...]] = []
        self._quant = quant or QuantConfig()
        self._blueprint = blueprint(config, MoERun(rounding=input_rounding(self._quant)))
        self._row_shards = int(np.prod([mesh.shape[axis] for axis in BATCH_AXES]))
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._per_row = NamedSharding(mesh, spec(("act_batch",)))
        self._per_token = NamedSharding(mesh, spec(("act_batch", "act_seq")))
        state, everywhere = shardings(config, mesh), self._everywhere
        self._state_shardings = state
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
        self._fixed = jax.jit(self._fixed_of_row, out_shardings=everywhere)
        self._latents = jax.jit(self._latents_of_row, static_argnums=3, out_shardings=everywhere)
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

    def rounded(self, params: Tree) -> Tree:
        """Parameters as the forward pass of training sees them; those that are not quantised are the same arrays."""
        with use_mesh(self.mesh):
            return rounded_params(params, self._blueprint.infos, self._quant)

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
        self, weights: Weights, sequences: Sequences, max_tokens: int, sampling: Sampling, stops: Sequence[int] = (),
        *, first_row: int = 0,
    ) -> tuple[list[list[int]], Sequences]:  # fmt: skip
        """Continues every row until a stop token (left out of the result) or `max_tokens`; consumes `sequences`.

        Args:
            first_row: number of the first row: row r draws and is named as row `first_row + r`.

        Returns:
            New token ids of every row; the sequences with these tokens appended.

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
                raise NonFiniteLogits(f"the logits of row {first_row + row} at position {position} are not finite")
            going = np.flatnonzero(tokens >= 0)
            for row in going:
                texts[row].append(int(tokens[row]))
            return len(going) > 0

        state, request = sequences.state, self._request(sampling, stops, first_row)
        active = self._put(np.arange(self._rows(state)) < rows, self._per_row)
        drawn = self._put(np.zeros((), np.int32), self._everywhere)
        previous, going = None, True
        for _ in range(max_tokens):
            with use_mesh(self.mesh):
                state, active, drawn, emitted = self._decode(weights, state, active, drawn, request)
            # read one step late, so that the device works on the next token meanwhile
            going = previous is None or collect(previous)
            if not going:
                break
            previous = emitted
        if going and previous is not None:
            collect(previous)
        lengths = sequences.lengths + np.array([len(text) for text in texts])
        return texts, Sequences(state, lengths, sequences.capacity)

    def generate(
        self, weights: Weights, prompts: Sequence[Tokens], max_tokens: int, sampling: Sampling,
        stops: Sequence[int] = (),
    ) -> list[list[int]]:  # fmt: skip
        """`decode` after a prefill of `prompts`, none of them empty."""
        sequences = self.start(len(prompts), max(map(len, prompts)) + max_tokens)
        return self.decode(weights, self.extend(weights, sequences, prompts), max_tokens, sampling, stops)[0]

    # ---- a sequence's state in host memory

    def fixed_state(self, sequences: Sequences, row: int = 0) -> HostArrays:
        """What of a row's state does not grow with its length; consumes nothing.

        Returns:
            Of every stack of N KDA layers the tails [N, taps - 1, 3 * heads * head_dim] and the states float32
            [N, heads, key, value]; last the hidden state [D] that the next token is drawn from.
        """
        state = sequences.state
        with use_mesh(self.mesh):
            return tuple(np.asarray(x) for x in self._fixed(fixed_arrays(state), state.hidden, np.int32(row)))

    def latents(self, sequences: Sequences, first: int, count: int, row: int = 0) -> HostArrays:
        """MLA latents of a row's places `first` to `first + count`, [N, count, R + P] of every stack of N layers.

        Consumes nothing.
        """
        arrays = growing_arrays(sequences.state)
        if not arrays:
            return ()
        size = min(bucket(count, _SHORTEST_PIECE), sequences.capacity)
        start = min(first, sequences.capacity - size)
        with use_mesh(self.mesh):
            slices = self._latents(arrays, np.int32(row), np.int32(start), size)
        if count == size:
            return tuple(np.asarray(x) for x in slices)
        parts = tuple(np.asarray(x)[:, first - start : first - start + count].copy() for x in slices)
        for part in parts:
            part.setflags(write=False)
        return parts

    def resume(self, length: int, fixed: HostArrays, latents: Sequence[HostArrays], capacity: int) -> Sequences:
        """One row that stands where host arrays were taken, as a private copy of them.

        Args:
            length: tokens seen there.
            fixed: from `fixed_state`.
            latents: from `latents`, of all places in order, in any pieces.
            capacity: tokens that must fit in all (rounded up to a bucket).
        """
        capacity = bucket(capacity, _SMALLEST_CAPACITY)
        state = filled(self.config, self._row_bucket(1), capacity, length, fixed, latents)
        return Sequences(jax.tree.map(self._put, state, self._state_shardings), np.array([length]), capacity)

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

    def _request(self, sampling: Sampling, stops: Sequence[int], first_row: int) -> Request:
        marks = np.zeros(self.config.vocab_size, bool)
        marks[[stop for stop in stops if stop < self.config.vocab_size]] = True
        seed, temperature, top_p = (
            np.uint32(sampling.seed),
            np.float32(sampling.temperature),
            np.float32(sampling.top_p),
        )
        values = (np.asarray(x) for x in (seed, temperature, top_p, np.int32(first_row), marks))
        return Request(*(self._put(x, self._everywhere) for x in values))

    # ---- traced from here on; Python runs through a function once for every program that is compiled

    def _empty_state(self, rows: int, capacity: int) -> State:
        self.programs.append(("start", rows, capacity))
        return empty(self.config, rows, capacity)

    def _full(self, weights: Weights, tokens_BS: jax.Array, segment_ids_BS: jax.Array) -> jax.Array:
        self.programs.append(("logits", *tokens_BS.shape))
        return self._blueprint.module(*weights).logits(tokens_BS, segment_ids_BS)[0]

    def _piece(self, weights: Weights, state: State, tokens_BS: jax.Array, counts_B: jax.Array) -> State:
        self.programs.append(("extend", *tokens_BS.shape, room(state)))
        model: Any = self._blueprint.module(*weights)
        return _advance(model, state, tokens_BS, counts_B)

    def _head(self, weights: Weights, hidden_BD: jax.Array) -> jax.Array:
        self.programs.append(("next", len(hidden_BD)))
        return _next_logits(self._blueprint.module(*weights), hidden_BD)

    def _fixed_of_row(self, arrays: list[jax.Array], hidden_BD: jax.Array, row: jax.Array) -> tuple[jax.Array, ...]:
        self.programs.append(("fixed", len(hidden_BD)))
        return *(x[:, row] for x in arrays), hidden_BD[row]

    def _latents_of_row(
        self, latents: list[jax.Array], row: jax.Array, start: jax.Array, size: int
    ) -> tuple[jax.Array, ...]:
        self.programs.append(("latents", *latents[0].shape[1:3], size))

        def cut(x):
            return jax.lax.dynamic_slice(x, (0, row, start, 0), (len(x), 1, size, x.shape[3]))[:, 0]

        return tuple(map(cut, latents))

    def _draw_and_feed(
        self, weights: Weights, state: State, active_B: jax.Array, drawn: jax.Array, request: Request
    ) -> tuple[State, jax.Array, jax.Array, jax.Array]:
        """One token for every active row; a row that stops is fed padding, so its state does not move any more.

        Returns:
            state, active rows, number of tokens drawn, and what the host reads: token ids, `_STOPPED`, `NONFINITE`.
        """
        self.programs.append(("decode", len(active_B), room(state)))
        model: Any = self._blueprint.module(*weights)
        logits_BX = _next_logits(model, state.hidden)
        token_B = draw(logits_BX, request.seed, drawn, request.temperature, request.top_p, first_row=request.first_row)
        stops_B = ~active_B | ((token_B >= 0) & request.stops[jnp.maximum(token_B, 0)])
        emitted_B = jnp.where(stops_B, _STOPPED, token_B)
        active_B = emitted_B >= 0
        fed_B = jnp.where(active_B, token_B, 0)
        state = _advance(model, state, fed_B[:, None], active_B.astype(jnp.int32))
        return state, active_B, drawn + 1, emitted_B


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


def _padded(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return np.pad(x, [(0, size - length) for size, length in zip(shape, x.shape, strict=True)])
