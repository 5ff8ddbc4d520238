"""Batches from documents: tokenise once, plan rows, hand each process its share, remember the position.

A batch is a dict of numpy arrays [rows, seq_len] named as in `pack.ROW_DTYPES`. Batch b of the run is global rows
b * batch_size to (b + 1) * batch_size - 1 of an endless sequence of epochs; process p of n reads the p-th of n equal
contiguous parts. So the global batch, and the saved position, do not depend on the number of processes. Epochs follow
each other without a short batch; every epoch holds every training document once, in its own order.
"""

import hashlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import grain
import numpy as np

from k3train.config.schema import DataConfig
from k3train.data.chat_corpus import ChatReader
from k3train.data.pack import Corpus, PackedRows, Row, Rows, WholeRows, build_corpus
from k3train.data.sources import documents, held_out, open_source
from k3train.data.tokenizer import Tokenizer, load_tokenizer

Batch = dict[str, np.ndarray]

#: Texts are tokenised in groups of about this many characters, so that few of them are in memory at a time.
_GROUP_CHARACTERS = 1 << 24

#: Tokens counted at a time by `baselines`: the pairs of a block stay in the cache.
_COUNT_BLOCK = 1 << 18

#: Global rows of a run; only an upper bound for libraries that want a length.
_ENDLESS = 2**62


@dataclass(frozen=True)
class Corpora:
    """Tokenised training and held-out documents of one source.

    Attributes:
        tokenizer: made them; every text ends with its eos_id where it has one.
        train, heldout: disjoint by document; heldout is None where nothing is held out.
        notes: what was left out or changed, one line each, for the log.
    """

    tokenizer: Tokenizer
    train: Corpus
    heldout: Corpus | None
    notes: tuple[str, ...]


def read_corpora(config: DataConfig) -> Corpora:
    """Reads, tokenises and splits the documents of `config`.

    Raises:
        ValueError: the source, a record of it (while `data.on_bad_line` is `stop`), the tokenizer or the split is not
            usable; the message names it.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    found = _read(config, "path", tokenizer)
    if config.eval_path:
        held = _read(config, "eval_path", tokenizer)
        notes = tuple(f"held out: {note}" for note in held.notes)
        return Corpora(tokenizer, found.corpus(), held.corpus(), found.notes + notes)
    out = held_out(found.names, config.eval_fraction)
    return Corpora(tokenizer, found.corpus(~out), found.corpus(out) if out.any() else None, found.notes)


@dataclass(frozen=True)
class _Read:
    """All documents of a source; `trained` is None where they are texts."""

    names: list[str]
    ids: list[np.ndarray]
    trained: list[np.ndarray] | None
    eos_id: int | None
    notes: tuple[str, ...]

    def corpus(self, keep: np.ndarray | None = None) -> Corpus:
        """Those that bool [documents] `keep` names, or all."""
        chosen = range(len(self.names)) if keep is None else np.flatnonzero(keep).tolist()
        return build_corpus(
            [self.names[i] for i in chosen],
            [self.ids[i] for i in chosen],
            eos_id=self.eos_id,
            dtype=self.ids[0].dtype.type,
            trained=None if self.trained is None else [self.trained[i] for i in chosen],
        )


def _read(config: DataConfig, knob: str, tokenizer: Tokenizer) -> _Read:
    source = open_source(config, knob)
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.int32
    bad: list[str] = []
    groups = _groups(documents(source, config.on_bad_line), bad)
    if config.is_chat:
        chats = ChatReader(config, tokenizer)
        for group in groups:
            chats.add(group, dtype)
        found = _Read(chats.names, chats.ids, chats.trained, None, source.notes + chats.notes())
    else:
        found = _Read([], [], None, tokenizer.eos_id, source.notes)
        for group in groups:
            for (name, _), ids in zip(group, tokenizer.encode_batch([text for _, text in group]), strict=True):
                if len(ids):
                    found.names.append(name)
                    found.ids.append(ids.astype(dtype))
    skipped = (f"skipped {len(bad)} of {len(source)} records; first: {bad[0]}",) if bad else ()
    if not found.names:
        why = f"; first fault: {bad[0]}" if bad else f"; {found.notes[0]}" if found.notes else ""
        raise ValueError(f"data.{knob}={getattr(config, knob)!r}: no usable document{why}")
    return replace(found, notes=found.notes + skipped)


def _groups(pairs: Generator[tuple[str, Any], None, list[str]], bad: list[str]) -> Iterator[list[tuple[str, Any]]]:
    """The pairs in lists of about `_GROUP_CHARACTERS`; `bad` receives what the iterator returns at its end."""
    group, characters = [], 0
    while True:
        try:
            pair = next(pairs)
        except StopIteration as end:
            bad.extend(end.value)
            break
        group.append(pair)
        characters += len(pair[1])
        if characters >= _GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group


def _rows(corpus: Corpus, config: DataConfig, *, shuffle: bool, seed: int, pad_id: int | None) -> Rows:
    kind = PackedRows if corpus.trained is None else WholeRows
    return kind(corpus, config.seq_len, shuffle=shuffle, seed=seed, pad_id=pad_id)


class _HostRows:
    """What one process reads of the global rows, as a grain source: its rows of batch 0, of batch 1, ..."""

    def __init__(self, rows: Rows, num_rows: int, num_batches: int, batch_size: int, index: int, count: int):
        self._rows, self._num_rows, self._num_batches = rows, num_rows, num_batches
        self._batch_size, self._local = batch_size, batch_size // count
        self._offset = index * self._local

    def __len__(self) -> int:
        return self._num_batches * self._local

    def __getitem__(self, index: int) -> Row:
        batch, inside = divmod(index, self._local)
        row = batch * self._batch_size + self._offset + inside
        return self._rows[row] if row < self._num_rows else self._rows.empty_row()


def _batches(rows: Rows, num_rows: int, batch_size: int, process_index: int, process_count: int) -> grain.MapDataset:
    if batch_size < 1 or batch_size % process_count:
        raise ValueError(f"data.batch_size={batch_size}: expected a positive multiple of {process_count} process(es)")
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index={process_index}: expected 0 to {process_count - 1}")
    num_batches = -(-num_rows // batch_size)
    source = _HostRows(rows, num_rows, num_batches, batch_size, process_index, process_count)
    return grain.MapDataset.source(source).batch(batch_size // process_count)


def _get(dataset: grain.MapDataset, batch: int) -> Batch:
    found = dataset[batch]
    assert found is not None, batch  # grain gives None for filtered elements; nothing here filters
    return found


class TrainLoader:
    """Endless iterator over this process's share of the training batches, with a saved position.

    `next(loader)` gives the next batch, `loader[b]` batch b of the run without moving. A thread prepares the next two.

    Attributes:
        corpora: the documents; tokenizer: theirs; rows: the packing plan.
        fingerprint: what fixes the sequence of batches; compared when a position is restored.
    """

    def __init__(self, corpora: Corpora, config: DataConfig, seed: int, process_index: int, process_count: int):
        self.corpora, self.tokenizer = corpora, corpora.tokenizer
        self.batch_size = config.batch_size
        pad_id = corpora.tokenizer.pad_id
        self.rows = _rows(corpora.train, config, shuffle=config.shuffle, seed=seed, pad_id=pad_id)
        self.fingerprint: dict[str, Any] = {
            "documents": len(corpora.train),
            "tokens": len(corpora.train.tokens),
            "content": _content_hash(corpora.train),
            "tokenizer": corpora.tokenizer.name,
            "seq_len": config.seq_len,
            "batch_size": config.batch_size,
            "shuffle": config.shuffle,
            "seed": seed,
        }
        self._dataset = _batches(self.rows, _ENDLESS, config.batch_size, process_index, process_count)
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)
        self._iterator = iter(self._dataset.to_iter_dataset(options))

    @property
    def next_batch(self) -> int:
        """Number of the batch that `next` will give."""
        return int(self._iterator.get_state()["next_index"])

    @property
    def epoch(self) -> float:
        """Passes over the training documents so far."""
        return self.next_batch * self.batch_size / self.rows.rows_per_epoch

    def __iter__(self) -> "TrainLoader":
        return self

    def __next__(self) -> Batch:
        return next(self._iterator)

    def __getitem__(self, batch: int) -> Batch:
        return _get(self._dataset, batch)

    def get_state(self) -> dict[str, Any]:
        """Position after the last batch handed out, the same on every process and for any number of them (JSON)."""
        return {"next_batch": self.next_batch, "fingerprint": dict(self.fingerprint)}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues where `state` was taken.

        Raises:
            ValueError: it belongs to other data, another order or another batch; the message says what differs.
        """
        saved = state["fingerprint"]
        keys = [key for key in {**self.fingerprint, **saved} if saved.get(key) != self.fingerprint.get(key)]
        if keys:
            changes = "; ".join(f"{key} was {saved.get(key)!r}, is {self.fingerprint.get(key)!r}" for key in keys)
            raise ValueError(f"the data position was saved for other data: {changes}. Restore the data or start anew.")
        self._iterator.set_state({"next_index": int(state["next_batch"])})


class EvalLoader:
    """This process's share of the held-out batches: each row once, in one fixed order, again at every iteration.

    The last batch is filled up with rows of padding (segment_ids 0, loss_mask 0); average the loss by loss_mask.
    `len()` is the number of batches, the same on every process.
    """

    def __init__(self, corpora: Corpora, config: DataConfig, process_index: int, process_count: int):
        if corpora.heldout is None:
            raise ValueError("data.eval_fraction=0 holds nothing out: there is nothing to evaluate on")
        self.corpora, self.tokenizer = corpora, corpora.tokenizer
        # Shuffled by a constant: the first `eval_batches` are then a fair sample, whatever the seed of the run.
        self.rows = _rows(corpora.heldout, config, shuffle=True, seed=0, pad_id=corpora.tokenizer.pad_id)
        num_rows = self.rows.rows_per_epoch
        self._dataset = _batches(self.rows, num_rows, config.batch_size, process_index, process_count)
        self._limit = config.eval_batches or len(self._dataset)

    def __len__(self) -> int:
        return min(self._limit, len(self._dataset))

    def __iter__(self) -> Iterator[Batch]:
        return (_get(self._dataset, batch) for batch in range(len(self)))


def make_train_loader(
    config: DataConfig, seed: int, process_index: int = 0, process_count: int = 1, *, corpora: Corpora | None = None
) -> TrainLoader:
    """Training batches; pass `corpora` of another loader to read the documents once."""
    return TrainLoader(corpora or read_corpora(config), config, seed, process_index, process_count)


def make_eval_loader(
    config: DataConfig, process_index: int = 0, process_count: int = 1, *, corpora: Corpora | None = None
) -> EvalLoader:
    """Held-out batches; pass `corpora` of the training loader to read the documents once."""
    return EvalLoader(corpora or read_corpora(config), config, process_index, process_count)


def baselines(corpus: Corpus, vocab_size: int) -> dict[str, float]:
    """What a model that only counts would reach on the training tokens, in nats per token.

    Over the (token, next token) pairs inside documents, exactly those that carry loss in training:
    `unigram` is the entropy of the next token, `bigram` its entropy given the token before it. Plain counts, no
    smoothing, no held-out text. Empty for vocabularies above 1,024 ids, where counts of pairs say nothing.
    """
    if vocab_size > 1024:
        return {}
    pairs = np.zeros(vocab_size**2, np.int64)
    last = np.zeros(len(corpus.tokens), bool)
    last[corpus.offsets[1:] - 1] = True
    for begin in range(0, len(last) - 1, _COUNT_BLOCK):
        block = slice(begin, begin + _COUNT_BLOCK)
        before, after = corpus.tokens[:-1][block], corpus.tokens[1:][block]
        inside = ~last[:-1][block]
        if corpus.trained is not None:
            inside &= corpus.trained[1:][block]
        pairs += np.bincount(before[inside].astype(np.int64) * vocab_size + after[inside], minlength=len(pairs))
    if not pairs.any():
        return {}
    table = pairs.reshape(vocab_size, vocab_size)
    return {"unigram": _entropy(table.sum(axis=0)), "bigram": _entropy(pairs) - _entropy(table.sum(axis=1))}


def _entropy(counts: np.ndarray) -> float:
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log(p)).sum())


def _content_hash(corpus: Corpus) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in (corpus.offsets, corpus.tokens, *(() if corpus.trained is None else (corpus.trained,))):
        digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()
