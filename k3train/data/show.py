"""Rows as text, as the model will see them: document edges, what carries loss, padding."""

from itertools import groupby

import numpy as np

from k3train.data.loader import TrainLoader
from k3train.data.pack import Row
from k3train.data.tokenizer import Tokenizer

_DIM, _BOLD, _RED, _RESET = "\x1b[2m", "\x1b[1m", "\x1b[31m", "\x1b[0m"

#: Control characters of a document are shown, not sent to the terminal; newline and tab stay.
_VISIBLE = {code: chr(0x2400 + code) for code in range(32) if code not in (9, 10)} | {127: "\u2421"}
_VISIBLE |= {code: "\ufffd" for code in range(0x80, 0xA0)}


def render_row(
    row: Row, tokenizer: Tokenizer, sources: list[tuple[str, int, int]] | None = None, *, colour: bool = False
) -> str:
    """One row as text.

    Args:
        row: arrays [seq_len] named as in `pack.ROW_DTYPES`.
        tokenizer: its tokenizer.
        sources: (document name, first token in it, tokens) of each segment, from `PackedRows.sources`.
        colour: mark with terminal colours.

    Returns:
        A head line per segment, then its text. Positions whose next token carries no loss stand between ⟦ and ⟧;
        special tokens and ids without text are shown by name.
    """
    ids, segments, mask = (np.asarray(row[name]) for name in ("tokens", "segment_ids", "loss_mask"))
    lines = []
    for segment in [int(s) for s in np.unique(segments[segments > 0])]:
        here = segments == segment
        name, first, count = sources[segment - 1] if sources else ("", 0, int(here.sum()))
        place = f" {_clean(name)}, tokens {first} to {first + count - 1} of the document" if name else ""
        head = f"--- segment {segment}:{place} ({count} tokens, {int(mask[here].sum())} with loss) ---"
        lines.append(f"{_BOLD}{head}{_RESET}" if colour else head)
        lines.append(_render_text(ids[here], mask[here] > 0, tokenizer, colour))
    padding = int((segments == 0).sum())
    if padding:
        lines.append(f"--- padding: {padding} tokens ---")
    return "\n".join(lines)


def render_examples(loader: TrainLoader, count: int, *, colour: bool = False) -> str:
    """A summary of the training data, then the first `count` rows of the first epoch."""
    rows, corpora = loader.rows, loader.corpora
    tokens = len(corpora.train.tokens)
    fill = tokens / (rows.rows_per_epoch * rows.seq_len)
    held = f"{len(corpora.heldout)} held out" if corpora.heldout else "none held out"
    lines = [
        f"documents    {len(corpora.train):,} to train on, {held}",
        f"tokens       {tokens:,} an epoch",
        f"tokenizer    {corpora.tokenizer.name}, {corpora.tokenizer.vocab_size:,} ids",
        f"rows         {rows.rows_per_epoch:,} an epoch of {rows.seq_len:,} tokens, {fill:.1%} full; "
        f"{loader.batch_size} to a batch",
        *(f"note         {note}" for note in corpora.notes),
        "marks        \u27e6no loss at this position\u27e7",
    ]
    for number in range(min(count, rows.rows_per_epoch)):
        lines += ["", f"=== row {number} ==="]
        lines.append(render_row(rows[number], corpora.tokenizer, rows.sources(number), colour=colour))
    return "\n".join(lines)


def _render_text(ids: np.ndarray, with_loss: np.ndarray, tokenizer: Tokenizer, colour: bool) -> str:
    out = []
    for loss, run in groupby(zip(ids.tolist(), with_loss.tolist(), strict=True), key=lambda pair: pair[1]):
        text = _decode_visibly([i for i, _ in run], tokenizer, colour)
        marked = f"{_DIM}{text}{_RESET}" if colour else text
        out.append(text if loss else f"\u27e6{marked}\u27e7")
    return "".join(out)


def _decode_visibly(ids: list[int], tokenizer: Tokenizer, colour: bool) -> str:
    """Text of the ids, special tokens by name, ids outside the vocabulary by number."""

    def label(token: int) -> str | None:
        return tokenizer.specials.get(token) or (None if token < tokenizer.vocab_size else f"<id {token}>")

    out = []
    for name, run in groupby(ids, key=label):
        if name is None:
            out.append(_clean(tokenizer.decode(run)))
        else:
            out += [f"{_RED}{name}{_RESET}" if colour else name for _ in run]
    return "".join(out)


def _clean(text: str) -> str:
    return text.translate(_VISIBLE).encode("utf-8", "replace").decode()  # file names need not be UTF-8
