"""Rows as text, as the model will see them: document edges, what carries loss, channels of chat, padding."""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from k3train.data.chat_template import CHANNELS, CLOSE, OPEN, SEP, control_ids
from k3train.data.loader import TrainLoader
from k3train.data.pack import Row
from k3train.data.tokenizer import Tokenizer

_DIM, _BOLD, _RED, _RESET = "\x1b[2m", "\x1b[1m", "\x1b[31m", "\x1b[0m"
_COLOURS = {"think": ("\x1b[36m", "cyan"), "response": ("\x1b[32m", "green"), "tools": ("\x1b[33m", "yellow")}

#: Control characters of a document are shown, not sent to the terminal; newline and tab stay.
_VISIBLE = {code: chr(0x2400 + code) for code in range(32) if code not in (9, 10)} | {127: "\u2421"}
_VISIBLE |= {code: "\ufffd" for code in range(0x80, 0xA0)}


def render_row(
    row: Row,
    tokenizer: Tokenizer,
    sources: list[tuple[str, int, int]] | None = None,
    *,
    chat: bool = False,
    colour: bool = False,
) -> str:
    """One row as text.

    Args:
        row: arrays [seq_len] named as in `pack.ROW_DTYPES`.
        tokenizer: its tokenizer.
        sources: (document name, first token in it, tokens) of each segment, from `PackedRows.sources`.
        chat: the documents are conversations.
        colour: mark with terminal colours, the channels of conversations too.

    Returns:
        A head line per segment, then its text. Positions whose next token carries no loss stand between ⟦ and ⟧; in
        conversations, which are whole, it is the tokens that are not trained themselves. Special tokens and ids without
        text are shown by name.
    """
    ids, segments, mask = (np.asarray(row[name]) for name in ("tokens", "segment_ids", "loss_mask"))
    lines = []
    for segment in [int(s) for s in np.unique(segments[segments > 0])]:
        here = segments == segment
        name, first, count = sources[segment - 1] if sources else ("", 0, int(here.sum()))
        place = f" {_clean(name)}, tokens {first} to {first + count - 1} of the document" if name else ""
        head = f"--- segment {segment}:{place} ({count} tokens, {int(mask[here].sum())} with loss) ---"
        lines.append(_styled(head, _BOLD, colour))
        loss = mask[here] > 0
        shown = np.concatenate([[False], loss[:-1]]) if chat else loss
        within = channels(ids[here].tolist(), tokenizer) if chat else [""] * count
        lines.append(_render_text(ids[here].tolist(), shown.tolist(), within, tokenizer, colour))
    padding = int((segments == 0).sum())
    if padding:
        lines.append(f"--- padding: {padding} tokens ---")
    return "\n".join(lines)


def render_examples(loader: TrainLoader, count: int, *, colour: bool = False) -> str:
    """A summary of the training data, then the first `count` rows of the first epoch."""
    rows, corpora = loader.rows, loader.corpora
    chat = corpora.train.trained is not None
    tokens = len(corpora.train.tokens)
    fill = tokens / (rows.rows_per_epoch * rows.seq_len)
    held = f"{len(corpora.heldout)} held out" if corpora.heldout else "none held out"
    marks = "\u27e6not trained\u27e7" if chat else "\u27e6no loss at this position\u27e7"
    if chat and colour:
        marks += "".join(f" {_styled(f'{name}: {word}', code, True)}" for name, (code, word) in _COLOURS.items())
    lines = [
        f"documents    {len(corpora.train):,} to train on, {held}",
        f"tokens       {tokens:,} an epoch",
        f"tokenizer    {corpora.tokenizer.name}, {corpora.tokenizer.vocab_size:,} ids",
        f"rows         {rows.rows_per_epoch:,} an epoch of {rows.seq_len:,} tokens, {fill:.1%} full; "
        f"{loader.batch_size} to a batch",
        *(f"note         {note}" for note in corpora.notes),
        f"marks        {marks}",
    ]
    for number in range(min(count, rows.rows_per_epoch)):
        lines += ["", f"=== row {number} ==="]
        lines.append(render_row(rows[number], corpora.tokenizer, rows.sources(number), chat=chat, colour=colour))
    return "\n".join(lines)


def channels(ids: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    """Of each token of a conversation: think, response or tools with their tags, or the empty string."""
    control = control_ids(tokenizer)
    out: list[str] = []
    inside: list[str] = []  # elements that are open, outermost first
    while len(out) < len(ids):
        begin = len(out)
        opens, closes = ids[begin] == control[OPEN], ids[begin] == control[CLOSE]
        end = begin + 1
        while (opens or closes) and end < len(ids) and ids[end - 1] != control[SEP]:
            end += 1
        if opens:
            inside.append(tokenizer.decode(ids[begin + 1 : end]).split(" ")[0])
        out += [next((tag for tag in inside if tag in CHANNELS), "")] * (end - begin)
        if closes:
            inside.pop()
    return out


def _render_text(ids: list[int], with_loss: list[bool], within: list[str], tokenizer: Tokenizer, colour: bool) -> str:
    out = []
    for loss, run in groupby(zip(with_loss, within, ids, strict=True), key=lambda token: token[0]):
        faint = "" if loss else _DIM
        parts = [
            _decode_visibly([i for _, _, i in part], tokenizer, faint, _COLOURS.get(channel, ("",))[0], colour)
            for channel, part in groupby(run, key=lambda token: token[1])
        ]
        text = "".join(parts)
        out.append(text if loss else f"\u27e6{text}\u27e7")
    return "".join(out)


def _decode_visibly(ids: list[int], tokenizer: Tokenizer, faint: str, tint: str, colour: bool) -> str:
    """Text of the ids, special tokens by name, ids outside the vocabulary by number."""

    def label(token: int) -> str | None:
        return tokenizer.specials.get(token) or (None if token < tokenizer.vocab_size else f"<id {token}>")

    out = []
    for name, run in groupby(ids, key=label):
        if name is None:
            out.append(_styled(_clean(tokenizer.decode(run)), faint + tint, colour))
        else:
            out += [_styled(name, faint + _RED, colour) for _ in run]
    return "".join(out)


def _styled(text: str, codes: str, colour: bool) -> str:
    return f"{codes}{text}{_RESET}" if colour and codes else text


def _clean(text: str) -> str:
    return text.translate(_VISIBLE).encode("utf-8", "replace").decode()  # file names need not be UTF-8
