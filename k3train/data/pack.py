"""Documents to rows: a packing plan with random access by row number.

Texts (`PackedRows`): the documents of an epoch are laid end to end in that epoch's order and cut every `seq_len`
tokens, so every token of every document is in exactly one row and only the last row of an epoch holds padding. A
document that meets a cut goes on as a new segment of another row. The token before the cut keeps its target (the first
token after it), so every next-token pair of a document is trained on once per epoch; the last token of a document has
no target and carries no loss.

Conversations (`WholeRows`): each is whole in one row, since an answer without its question teaches nothing. Every row
takes the longest conversation left, then whatever fits best, and ends with padding. Which conversations share a row is
the same in every epoch (they do not see each other); the order of the rows is not.

Either way row `n` can be computed alone, in any order and on any host: nothing depends on how many workers or
processes read.
"""

from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

Row = dict[str, np.ndarray]

#: Row arrays and their dtypes, all [seq_len]; the loader stacks them to [batch, seq_len].
ROW_DTYPES = {
    "tokens": np.int32,  # ids; padding holds the pad id, or 0
    "targets": np.int32,  # the next id of the same document; 0 where loss_mask is 0
    "segment_ids": np.int32,  # 1.. in order of the row, 0 = padding
    "positions": np.int32,  # 0.. within the segment
    "loss_mask": np.float32,  # 1 where the target counts
}


@dataclass(frozen=True)
class Corpus:
    """Tokenised documents, end to end.

    Attributes:
        names: one per document.
        tokens: [total] ids of all documents.
        offsets: int64 [documents + 1]; document d is tokens[offsets[d]:offsets[d + 1]], never empty.
        trained: bool [total]: tokens that carry loss where they are a target; None: all do. A corpus that has it is
            one of conversations.
    """

    names: tuple[str, ...]
    tokens: np.ndarray
    offsets: np.ndarray
    trained: np.ndarray | None = None

    def __post_init__(self):
        assert self.trained is None or self.trained.shape == self.tokens.shape, "one flag a token"
        assert len(self.offsets) == len(self.names) + 1, (len(self.offsets), len(self.names))
        assert np.all(np.diff(self.offsets) > 0), "empty document"

    def __len__(self) -> int:
        return len(self.names)

    def document(self, index: int) -> np.ndarray:
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]


def build_corpus(
    names: Sequence[str],
    documents: Sequence[np.ndarray],
    *,
    eos_id: int | None,
    dtype: type = np.int32,
    trained: Sequence[np.ndarray] | None = None,
) -> Corpus:
    """A corpus of [tokens] arrays, each closed by `eos_id` where there is one; none may end up empty.

    Args:
        trained: bool [tokens] of each document, see `Corpus`; only where `eos_id` is None.
    """
    assert trained is None or eos_id is None, "conversations close themselves"
    extra = 0 if eos_id is None else 1
    offsets = np.zeros(len(documents) + 1, np.int64)
    np.cumsum([len(document) + extra for document in documents], out=offsets[1:])
    tokens = np.empty(offsets[-1], dtype)
    for document, begin, end in zip(documents, offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        tokens[begin : end - extra] = document
    if eos_id is not None:
        tokens[offsets[1:] - 1] = eos_id
    flags = None if trained is None else np.concatenate([np.zeros(0, bool), *trained])
    return Corpus(tuple(names), tokens, offsets, flags)


def shuffled(count: int, *key: int) -> np.ndarray:
    """int64 [count]: a permutation of range(count) fixed by `key`.

    Ranks of a hash rather than numpy's generator, whose stream may change between numpy releases: a run resumed
    after an upgrade must see the same order.
    """
    with np.errstate(over="ignore"):
        state = np.zeros(1, np.uint64)
        for part in key:
            state = _mix(state + np.uint64(part % 2**64))
        return np.argsort(_mix(state ^ _mix(np.arange(count, dtype=np.uint64))), kind="stable")


def _mix(x: np.ndarray) -> np.ndarray:
    """The splitmix64 step: a bijection of 64-bit words."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class _Epoch:
    """One epoch's plan: documents in order, where each starts in the stream, and the order of the rows."""

    documents: np.ndarray  # int64 [documents]
    starts: np.ndarray  # int64 [documents + 1], in tokens of the stream
    rows: np.ndarray  # int64 [rows]: which cut of the stream the n-th row is


class Rows(ABC):
    """Rows of a corpus by number; row n belongs to epoch n // rows_per_epoch.

    Args:
        corpus: the documents.
        seq_len: tokens in a row.
        shuffle: another order in every epoch.
        seed: fixes the order.
        pad_id: id written where segment_ids is 0.
    """

    rows_per_epoch: int

    def __init__(self, corpus: Corpus, seq_len: int, *, shuffle: bool, seed: int = 0, pad_id: int | None = None):
        if seq_len < 1:
            raise ValueError(f"data.seq_len={seq_len}: expected at least 1")
        self.corpus, self.seq_len = corpus, seq_len
        self._shuffle, self._seed, self._pad_id = shuffle, seed, pad_id or 0

    @abstractmethod
    def _pieces(self, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Of each piece in the row: document, first token within it, length, tokens of the document left after it."""

    def sources(self, row: int) -> list[tuple[str, int, int]]:
        """(document name, first token within the document, number of tokens) of each segment of a row."""
        documents, firsts, lengths, _ = self._pieces(row)
        triples = zip(documents, firsts, lengths, strict=True)
        return [(self.corpus.names[d], int(first), int(length)) for d, first, length in triples]

    def __getitem__(self, row: int) -> Row:
        """The arrays of `ROW_DTYPES`, each [seq_len]."""
        documents, firsts, lengths, left = self._pieces(row)
        used = int(lengths.sum())
        ends = np.cumsum(lengths)
        place = np.arange(used)
        position = place - np.repeat(ends - lengths, lengths)
        source = np.repeat(self.corpus.offsets[documents] + firsts, lengths) + position
        has_target = np.ones(used, bool)
        has_target[ends[left == 0] - 1] = False
        target = np.where(has_target, source + 1, source)
        if self.corpus.trained is not None:
            has_target &= self.corpus.trained[target]
        out = self.empty_row()
        out["tokens"][:used] = self.corpus.tokens[source]
        out["targets"][:used] = np.where(has_target, self.corpus.tokens[target], 0)
        out["segment_ids"][:used] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        out["positions"][:used] = position
        out["loss_mask"][:used] = has_target
        return out

    def empty_row(self) -> Row:
        """A row of padding only."""
        row = {name: np.zeros(self.seq_len, dtype) for name, dtype in ROW_DTYPES.items()}
        row["tokens"][:] = self._pad_id
        return row


class PackedRows(Rows):
    """Rows cut from the documents of an epoch laid end to end.

    `shuffle` shuffles documents, then rows (a long document would otherwise fill a batch).
    """

    def __init__(self, corpus: Corpus, seq_len: int, *, shuffle: bool, seed: int = 0, pad_id: int | None = None):
        super().__init__(corpus, seq_len, shuffle=shuffle, seed=seed, pad_id=pad_id)
        self.rows_per_epoch = -(-len(corpus.tokens) // seq_len)
        self._epoch = lru_cache(maxsize=2)(self._plan)  # neighbours: a batch may span two epochs

    def _plan(self, epoch: int) -> _Epoch:
        count = len(self.corpus)
        documents = shuffled(count, self._seed, epoch, 0) if self._shuffle else np.arange(count)
        starts = np.zeros(count + 1, np.int64)
        np.cumsum(np.diff(self.corpus.offsets)[documents], out=starts[1:])
        rows = self.rows_per_epoch
        return _Epoch(documents, starts, shuffled(rows, self._seed, epoch, 1) if self._shuffle else np.arange(rows))

    def _pieces(self, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        epoch, nth = divmod(int(row), self.rows_per_epoch)
        plan = self._epoch(epoch)
        begin = plan.rows[nth] * self.seq_len
        end = min(begin + self.seq_len, plan.starts[-1])
        first = np.searchsorted(plan.starts, begin, side="right") - 1
        last = np.searchsorted(plan.starts, end, side="left")
        starts, ends = plan.starts[first:last], plan.starts[first + 1 : last + 1]
        low, high = np.maximum(starts, begin), np.minimum(ends, end)
        return plan.documents[first:last], low - starts, high - low, ends - high


class WholeRows(Rows):
    """Rows of whole documents, none of them longer than a row."""

    def __init__(self, corpus: Corpus, seq_len: int, *, shuffle: bool, seed: int = 0, pad_id: int | None = None):
        super().__init__(corpus, seq_len, shuffle=shuffle, seed=seed, pad_id=pad_id)
        self._bins = best_fit(np.diff(corpus.offsets), seq_len)
        self.rows_per_epoch = len(self._bins)
        self._order = lru_cache(maxsize=2)(self._plan)

    def _plan(self, epoch: int) -> np.ndarray:
        rows = self.rows_per_epoch
        return shuffled(rows, self._seed, epoch, 1) if self._shuffle else np.arange(rows)

    def _pieces(self, row: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        epoch, nth = divmod(int(row), self.rows_per_epoch)
        documents = self._bins[self._order(epoch)[nth]]
        nothing = np.zeros(len(documents), np.int64)
        return documents, nothing, np.diff(self.corpus.offsets)[documents], nothing


def best_fit(lengths: np.ndarray, size: int) -> list[np.ndarray]:
    """Items to bins, longest first, each into the bin with the least room that still holds it.

    Args:
        lengths: int [items], none above `size`.
        size: room of an empty bin.

    Returns:
        int64 [items of the bin] indices, growing, of each bin; bins in order of their first item.
    """
    assert not len(lengths) or lengths.max() <= size, (lengths.max(), size)
    bins: list[list[int]] = []
    rooms: list[int] = []  # the different amounts of room there are, growing
    with_room: dict[int, list[int]] = {}  # room -> bins that have it
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        place = bisect_left(rooms, length)
        if place == len(rooms):
            bins.append([])
            number, room = len(bins) - 1, size
        else:
            room = rooms[place]
            number = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[place]
        bins[number].append(item)
        left = room - length
        if left not in with_room:
            with_room[left] = []
            insort(rooms, left)
        with_room[left].append(number)
    return sorted((np.array(sorted(items), np.int64) for items in bins), key=lambda items: items[0])


def check_segments(segment_ids: np.ndarray, shape: tuple[int, ...]) -> None:
    """Refuses segment ids that do not describe whole documents side by side.

    Args:
        segment_ids: integers [..., seq_len]: 0 is padding, anywhere; a document is one unbroken run of one id, and
            ids grow along the row.
        shape: shape of the tokens they belong to.

    Raises:
        ValueError: another shape than the tokens, not integers, negative ids, or ids that come back or fall.
    """
    ids = np.asarray(segment_ids)
    if ids.shape != tuple(shape):
        raise ValueError(f"segment_ids have shape {ids.shape}, the tokens {tuple(shape)}: every token needs one id")
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"segment_ids have dtype {ids.dtype}: expected integers")
    if ids.size and ids.min() < 0:
        raise ValueError(f"segment_ids hold {ids.min()}: expected 0 (padding) or 1.. (document)")
    rows = ids.reshape(-1, ids.shape[-1]) if ids.size else ids.reshape(0, 1)
    for number, row in enumerate(rows):
        starts = row[np.flatnonzero(np.diff(row, prepend=0))]
        starts = starts[starts > 0]
        if np.any(np.diff(starts) <= 0):
            raise ValueError(
                f"segment_ids of row {number} are not monotone: documents come in order {starts[:8].tolist()}; "
                "expected growing ids, each document one unbroken run"
            )
