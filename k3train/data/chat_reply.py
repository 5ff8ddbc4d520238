"""What a model wrote as an assistant's turn, read back into a message: the way out of K3's template.

The turn goes on where `chat_corpus.encode_prompt` ends, inside the channel that the prompt opened. A model may write
anything, so reading never fails: it stops at the first token that the template has no place for, and says so.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from k3train.data.chat_template import CHANNELS, CLOSE, OPEN, SEP, control_ids
from k3train.data.tokenizer import Tokenizer

_CHILDREN = {"message": CHANNELS, "tools": ("call",), "call": ("argument", "json")}
_WITH_TEXT = ("think", "response", "argument", "json")
_ATTRIBUTE = re.compile(r' (\w+)="([^"]*)"')


@dataclass(frozen=True)
class Reply:
    """An assistant's turn.

    Attributes:
        message: in the OpenAI form that `chat.read_conversation` takes, so that a conversation can go on with it: role,
            content and, where there are any, reasoning_content and tool_calls (ids `call_1`, ...).
        fault: where it is cut off or leaves the template; empty for a whole turn.
    """

    message: dict[str, Any]
    fault: str = ""

    @property
    def text(self) -> str:
        """For people: the content alone, or every channel that says something under its name."""
        lines = []
        if thought := self.message.get("reasoning_content"):
            lines.append(f"[think] {thought}")
        calls = [call["function"] for call in self.message.get("tool_calls", ())]
        if self.message["content"] or not calls:
            lines.append(f"[response] {self.message['content']}")
        lines += [f"[tools] {call['name']} {call['arguments']}" for call in calls]
        return self.message["content"] if len(lines) == 1 and not calls else "\n".join(lines)


def read_reply(prompt: Sequence[int], ids: Sequence[int], tokenizer: Tokenizer) -> Reply:
    """Reads a turn.

    Args:
        prompt: token ids from `encode_prompt`.
        ids: how the model went on, without `<|end_of_msg|>`.

    Raises:
        ValueError: the tokenizer lacks a control token.
    """
    *_, (_, channel), _ = _stretches(prompt, tokenizer)  # the last tag that the prompt opens
    turn = _Turn(channel)
    tag = ("", "")  # that waits for its end
    for head, text in _stretches(ids, tokenizer):
        if head in (OPEN, CLOSE):
            fits = not tag[0]
        elif head == SEP:
            fits = turn.tag(*tag) and turn.say(text)
        else:
            fits = not head and turn.say(text)
        if not fits:
            rest = "".join((*tag, head, text))
            return Reply(turn.message(), f"leaves the template after {turn.place()}: {rest[:60]!r}")
        tag = (head, text) if head in (OPEN, CLOSE) else ("", "")
    if tag[0] or turn.inside:
        return Reply(turn.message(), f"cut off in {turn.place()}")
    return Reply(turn.message())


def _stretches(ids: Sequence[int], tokenizer: Tokenizer) -> Iterator[tuple[str, str]]:
    """Every control token with the plain text up to the next one; text before the first has an empty name."""
    names = {i: name for name, i in control_ids(tokenizer).items()}
    head, begin = "", 0
    for place, token in enumerate(ids):
        if int(token) in names:
            if head or place:
                yield head, tokenizer.decode(ids[begin:place])
            head, begin = names[int(token)], place + 1
    yield head, tokenizer.decode(ids[begin:])


class _Turn:
    """Collects what the elements say.

    Attributes:
        inside: elements that are open, outermost first.
    """

    def __init__(self, channel: str):
        self.inside = ["message", channel]
        self._said: dict[str, str] = {channel: "" for channel in CHANNELS}
        self._calls: list[dict[str, Any]] = []

    def place(self) -> str:
        return self.inside[-1] if self.inside else "its end"

    def say(self, text: str) -> bool:
        """Whether there is a place for text here; there always is for none."""
        if text and self.place() not in _WITH_TEXT:
            return False
        if self.place() in self._said:
            self._said[self.place()] += text
        elif text:
            self._calls[-1]["values"][-1][2] += text
        return True

    def tag(self, head: str, text: str) -> bool:
        """Opens or closes an element, if one may be opened or closed here."""
        name = text.split(" ")[0]
        if head == CLOSE and self.place() == text:
            self.inside.pop()
            return True
        if head != OPEN or name not in _CHILDREN.get(self.place(), ()):
            return False
        self.inside.append(name)
        values = {key: value.replace("&quot;", '"').replace("&amp;", "&") for key, value in _ATTRIBUTE.findall(text)}
        if name == "call":
            self._calls.append({"tool": values.get("tool", ""), "values": []})
        elif name in ("argument", "json"):
            kind = "json" if name == "json" else values.get("type", "string")
            self._calls[-1]["values"].append([kind, values.get("key", ""), ""])
        return True

    def message(self) -> dict[str, Any]:
        """What was said so far."""
        message: dict[str, Any] = {"role": "assistant", "content": self._said["response"]}
        if self._said["think"]:
            message["reasoning_content"] = self._said["think"]
        if self._calls:
            message["tool_calls"] = [
                {"id": f"call_{n}", "type": "function", "function": {"name": call["tool"], "arguments": _json(call)}}
                for n, call in enumerate(self._calls, start=1)
            ]
        return message


def _json(call: dict[str, Any]) -> str:
    """Arguments of a call as JSON text; a block that is no JSON stays as it is."""
    for kind, _, text in call["values"]:
        if kind == "json":
            return text
    return json.dumps({key: _value(kind, text) for kind, key, text in call["values"]}, ensure_ascii=False)


def _value(kind: str, text: str) -> Any:
    try:
        return text if kind == "string" else json.loads(text)
    except (ValueError, RecursionError):
        return text
