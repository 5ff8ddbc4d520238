"""Rendered conversations to tokens with flags, one row at most each; whatever is left out is counted."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from k3train.config.schema import DataConfig
from k3train.data.chat import read_conversation
from k3train.data.chat_template import Rendered, Style, encode, render
from k3train.data.tokenizer import Tokenizer


def style(config: DataConfig) -> Style:
    """What the configuration says about conversations that say nothing themselves."""
    effort = "" if config.chat_effort == "none" else config.chat_effort
    return Style(config.chat_mode == "thinking", effort, config.chat_loss == "last")


def encode_prompt(record: dict[str, Any], config: DataConfig, tokenizer: Tokenizer) -> np.ndarray:
    """int32 [tokens]: a conversation so far and the opening of the assistant's turn, for a model to go on.

    Args:
        record: as a line of a chat file: an object with `messages`, and `tools` where there are any.
        config: the data section that the model was trained with.

    Raises:
        ValueError: the record cannot be rendered, or the tokenizer has no control tokens.
    """
    rendered = render(read_conversation(record), style(config), reply=True)
    return encode([rendered], tokenizer)[0][0]


class ChatReader:
    """Encodes conversations and keeps count.

    Attributes:
        names, ids, trained: of each conversation that is kept; int [tokens] and bool [tokens].
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer):
        self.names: list[str] = []
        self.ids: list[np.ndarray] = []
        self.trained: list[np.ndarray] = []
        self._config, self._tokenizer = config, tokenizer
        self._first: dict[str, str] = {}  # first case of each kind
        self._counts: Counter[str] = Counter()
        self._fields: Counter[str] = Counter()

    def add(self, group: Iterable[tuple[str, Rendered]], dtype: type) -> None:
        """Encodes some conversations.

        Raises:
            ValueError: one is longer than a row while `data.on_long` is `stop`, or the tokenizer has no control tokens.
        """
        names, conversations = zip(*group, strict=True)
        encoded = encode(conversations, self._tokenizer)
        for name, conversation, (ids, trained) in zip(names, conversations, encoded, strict=True):
            self._remark(conversation)
            kept = self._fitting(conversation.where, len(ids))
            if not kept:
                continue
            ids, trained = ids[:kept], trained[:kept]
            if not trained.any():
                self._count("untrained", conversation.where)
                continue
            self.names.append(name)
            self.ids.append(ids.astype(dtype))
            self.trained.append(trained)

    def notes(self) -> tuple[str, ...]:
        """What was left out or changed, one line each."""
        row = f"a row of {self._config.seq_len:,} tokens"
        texts = {
            "skip": f"conversations longer than {row}, left out",
            "cut": f"conversations cut to {row}",
            "untrained": "conversations without a token to train, left out",
            "unread": "tool calls whose arguments are no JSON, shown as they are, without loss",
            "unsaid": "assistant turns whose reasoning instruct mode leaves out",
        }
        notes = []
        for kind, text in texts.items():
            if count := self._counts[kind]:
                lost = f", {self._counts['tokens']:,} tokens" if kind in ("skip", "cut") else ""
                notes.append(f"{text}: {count:,}{lost} (first: {self._first[kind]})")
        if self._fields:
            shown = ", ".join(f"{name} ({count:,})" for name, count in self._fields.most_common(8))
            notes.append(f"fields of the records that are passed over: {shown}")
        tokens, trained = sum(map(len, self.ids)), sum(int(flags.sum()) for flags in self.trained)
        notes.append(f"{trained:,} of {tokens:,} tokens are trained ({trained / max(tokens, 1):.1%})")
        return tuple(notes)

    def _fitting(self, where: str, length: int) -> int:
        """Tokens of a conversation that are kept."""
        seq_len, how = self._config.seq_len, self._config.on_long
        if length <= seq_len:
            return length
        if how == "stop":
            raise ValueError(
                f"{where}: {length:,} tokens, but a row has {seq_len:,} (data.seq_len). "
                "--config.data.on_long=skip leaves longer conversations out, cut keeps their beginning"
            )
        kept = seq_len if how == "cut" else 0
        self._count(how, where)
        self._counts["tokens"] += length - kept
        return kept

    def _remark(self, conversation: Rendered) -> None:
        for fault in conversation.unread_arguments:
            self._count("unread", f"{conversation.where}: {fault}")
        if conversation.unsaid_thoughts:
            self._count("unsaid", conversation.where, conversation.unsaid_thoughts)
        self._fields.update(conversation.passed_over)

    def _count(self, kind: str, where: str, number: int = 1) -> None:
        self._counts[kind] += number
        self._first.setdefault(kind, where)
