"""Conversations in K3's XTML template (docs/k3.md section 3.9), and which of their tokens are trained.

A rendered conversation is a list of pieces. Control tokens are pieces of their own and become special ids; every other
piece is encoded as plain text, by itself, so nothing that a person or a tool wrote can become a control token.

Trained are, of every assistant turn with weight 1, the tokens after its opening tag: from `<|open|>think<|sep|>` (in
instruct mode `<|open|>response<|sep|>`) through `<|end_of_msg|>`, without which a model would never stop. Not trained
are the opening tag, all other messages, and blocks of arguments that are no JSON, with their tags (docs/k3.md section
3.8).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from k3train.data.chat import Call, ChatError, Conversation, Turn
from k3train.data.tokenizer import Tokenizer

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"

#: Parts of an assistant turn.
CHANNELS = ("think", "response", "tools")

_TOOLS = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{}\n```"
_NEW_TOOLS = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\nYou have access to all "
    "existing and extended tools.\nHere are the specs for the extended tools.\n\n```json\n{}\n```"
)
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\nNow the system is invoked with `thinking_effort={}`."
)


class Style(NamedTuple):
    """What a conversation does not say itself.

    Attributes:
        thinking: assistant turns have a think channel, empty if need be; otherwise none has (instruct mode).
        effort: said in a message at the start in thinking mode; empty: no such message.
        only_last: train the last assistant turn alone.
    """

    thinking: bool = True
    effort: str = "max"
    only_last: bool = False


class Piece(NamedTuple):
    """A control token or a stretch of plain text."""

    text: str
    control: bool
    trained: bool


@dataclass(frozen=True)
class Rendered:
    """A conversation as pieces.

    Attributes:
        pieces: none of them empty.
        where: the record it was made of, for messages.
        unread_arguments: what was wrong with each call whose arguments are a block without loss.
        unsaid_thoughts: assistant turns whose reasoning instruct mode leaves out.
        passed_over: fields of the record that are not used.
    """

    pieces: tuple[Piece, ...]
    where: str = ""
    unread_arguments: tuple[str, ...] = ()
    unsaid_thoughts: int = 0
    passed_over: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """All of it as text, control tokens by name."""
        return "".join(piece.text for piece in self.pieces)

    def __len__(self) -> int:
        """Characters."""
        return sum(len(piece.text) for piece in self.pieces)


def render(conversation: Conversation, style: Style, *, where: str = "", reply: bool = False) -> Rendered:
    """Writes a conversation out.

    Args:
        conversation: what it says itself goes before `style`.
        style: see there.
        where: the record it was made of.
        reply: end with the opening of an assistant turn, for a model to go on.

    Raises:
        ChatError: a text holds half a surrogate pair, which no tokenizer can encode; arguments or tools hold a number
            that JSON does not have.
    """
    thinking = style.thinking if conversation.thinking is None else conversation.thinking
    effort = conversation.effort or style.effort
    turns = conversation.turns
    last = max((i for i, turn in enumerate(turns) if turn.role == "assistant"), default=-1)
    out = _Writer()
    if conversation.tools:
        _system(out, "tool-declare", _TOOLS.format(_compact(conversation.tools)))
    if thinking and effort:
        _system(out, "thinking-effort", _EFFORT.format(effort))
    for number, turn in enumerate(turns):
        trained = turn.role == "assistant" and turn.weight == 1 and (not style.only_last or number == last)
        _turn(out, turn, thinking, trained)
    if reply:
        out.open("message", role="assistant")
        out.open("think" if thinking else "response")
    return Rendered(
        tuple(out.pieces),
        where,
        unread_arguments=tuple(call.fault for turn in turns for call in turn.calls if call.raw is not None),
        unsaid_thoughts=0 if thinking else sum(bool(turn.reasoning) for turn in turns),
        passed_over=conversation.passed_over,
    )


class _Writer:
    """Collects pieces; `trained` is what the next of them will be."""

    def __init__(self):
        self.pieces: list[Piece] = []
        self.trained = False

    def text(self, text: str) -> None:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            start = max(0, error.start - 20)
            raise ChatError(f"half a surrogate pair after {text[start : error.start]!r}") from error
        if text:
            self.pieces.append(Piece(text, False, self.trained))

    def control(self, token: str) -> None:
        self.pieces.append(Piece(token, True, self.trained))

    def open(self, tag: str, **attributes: str) -> None:
        self.control(OPEN)
        self.text(tag)
        for key, value in attributes.items():
            self.text(f" {key}")
            self.text('="')
            self.text(value.replace("&", "&amp;").replace('"', "&quot;"))
            self.text('"')
        self.control(SEP)

    def close(self, tag: str) -> None:
        self.control(CLOSE)
        self.text(tag)
        self.control(SEP)

    def element(self, tag: str, body: str, **attributes: str) -> None:
        self.open(tag, **attributes)
        self.text(body)
        self.close(tag)


def _system(out: _Writer, kind: str, body: str) -> None:
    out.element("message", body, role="system", type=kind)
    out.control(END)


def _turn(out: _Writer, turn: Turn, thinking: bool, trained: bool) -> None:
    if turn.tools:
        _system(out, "tool-declare", _NEW_TOOLS.format(_compact(turn.tools)))
        return
    if turn.role == "tool":
        out.open("message", role="tool", tool=turn.name, index=str(turn.index))
    else:
        out.open("message", role=turn.role, **({"name": turn.name} if turn.name else {}))
    out.trained = trained
    if turn.role == "assistant":
        _assistant(out, turn, thinking)
    else:
        out.text(turn.content)
    out.close("message")
    out.control(END)
    out.trained = False


def _assistant(out: _Writer, turn: Turn, thinking: bool) -> None:
    if thinking:
        out.element("think", turn.reasoning)
    out.element("response", turn.content)
    if turn.calls:
        out.open("tools")
        for index, call in enumerate(turn.calls, start=1):
            out.open("call", tool=call.name, index=str(index))
            _arguments(out, call)
            out.close("call")
        out.close("tools")


def _arguments(out: _Writer, call: Call) -> None:
    if call.raw is not None:
        trained, out.trained = out.trained, False
        out.element("json", call.raw, type="object")
        out.trained = trained
    for key, value in call.arguments.items():
        text = value if isinstance(value, str) else _json(value)
        out.element("argument", text, key=key, type=_type(value))


def _type(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "number", float: "number", str: "string", dict: "object", list: "array"}
    return names[type(value)]


def _compact(tools: Sequence[dict[str, Any]]) -> str:
    return _json(list(tools), sort_keys=True, separators=(",", ":"))


def _json(value: Any, **form: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, **form)
    except ValueError as error:
        raise ChatError("a number that is not finite stands where only JSON can") from error


def control_ids(tokenizer: Tokenizer) -> dict[str, int]:
    """Ids of the four control tokens.

    Raises:
        ValueError: the tokenizer lacks one.
    """
    ids = {name: i for i, name in tokenizer.specials.items() if name in (OPEN, CLOSE, SEP, END)}
    lacks = [name for name in (OPEN, CLOSE, SEP, END) if name not in ids]
    if lacks:
        raise ValueError(
            f"data.tokenizer={tokenizer.name} has no special token {', '.join(lacks)}, which K3's chat template needs; "
            "'byte' and K3's tiktoken ranks have them"
        )
    return ids


def encode(conversations: Sequence[Rendered], tokenizer: Tokenizer) -> list[tuple[np.ndarray, np.ndarray]]:
    """(int32 [tokens] ids, bool [tokens] whether the token is trained) of each conversation.

    Raises:
        ValueError: the tokenizer lacks a control token.
    """
    control = {name: np.array([i], np.int32) for name, i in control_ids(tokenizer).items()}
    texts = list(dict.fromkeys(p.text for c in conversations for p in c.pieces if not p.control))
    plain = dict(zip(texts, tokenizer.encode_batch(texts), strict=True))
    out = []
    for conversation in conversations:
        parts = [(control if piece.control else plain)[piece.text] for piece in conversation.pieces]
        trained = np.repeat([piece.trained for piece in conversation.pieces], [len(part) for part in parts])
        out.append((np.concatenate(parts), trained.astype(bool)))
    return out
