"""Conversations from JSON records in the OpenAI messages form: checked, and with every tool result in its place.

A record is an object with `messages` and, if wanted, `tools`, `thinking` (true or false) and `thinking_effort` (or
`reasoning_effort`), which go before the configuration. Other fields are metadata: passed over and counted.

| role | fields |
|---|---|
| `system` (or `developer`) | `content`, `name`; or `tools` without content: tools that are new from here on |
| `user` | `content`, `name` |
| `assistant` | `content`, `reasoning_content` (or `reasoning`), `tool_calls`, `weight` (0: no loss, 1) |
| `tool` | `content`, `tool_call_id`, `name` (must be that of the call) |

`content` is text or an array of text parts, which are joined. A field that is null or an empty array is as good as
absent. Anything else that a message says is refused: a template that has no place for it would lose it.
"""

import json
from dataclasses import dataclass
from typing import Any

from k3train.data.records import NamedTwice, json_kind, json_members

#: Efforts that K3 was trained on (docs/k3.md section 3.9).
EFFORTS = ("low", "high", "max")

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_FIELDS = {
    "system": ("content", "name", "tools"),
    "user": ("content", "name"),
    "assistant": ("content", "reasoning_content", "reasoning", "tool_calls", "weight"),
    "tool": ("content", "tool_call_id", "name"),
}
_RECORD_FIELDS = ("messages", "tools", "thinking", "thinking_effort", "reasoning_effort")
#: Of a request rather than of a conversation; K3 turns them into messages that this program does not write.
_REQUEST_FIELDS = ("tool_choice", "response_format")


class ChatError(ValueError):
    """What is wrong with a conversation, and in which message."""


@dataclass(frozen=True)
class Call:
    """One tool call of an assistant turn.

    Attributes:
        id: by which results refer to it; may be empty.
        name: of the tool.
        arguments: by name, in order.
        raw: the arguments as they came where they are no JSON at all; `arguments` is then empty.
        fault: what is wrong with `raw`.
    """

    id: str
    name: str
    arguments: dict[str, Any]
    raw: str | None = None
    fault: str = ""


@dataclass(frozen=True)
class Turn:
    """One message.

    Attributes:
        role: system, user, assistant or tool.
        content: its text.
        name: of the speaker, or of the tool whose result this is; may be empty.
        index: of a tool result: its place among the results of the calls before it, from 1.
        reasoning: what the assistant thought; empty where it is blank.
        calls: of the assistant.
        tools: that a system message declares in the middle of the conversation.
        weight: 0 takes the loss off an assistant turn.
    """

    role: str
    content: str = ""
    name: str = ""
    index: int = 0
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    weight: int = 1


@dataclass(frozen=True)
class Conversation:
    """A checked record.

    Attributes:
        turns: in order, the results of one turn's calls in the order of the calls.
        tools: declared at the start.
        thinking, effort: what the record asks for; None where it leaves that to the configuration.
        passed_over: fields of the record that are not used.
    """

    turns: tuple[Turn, ...]
    tools: tuple[dict[str, Any], ...] = ()
    thinking: bool | None = None
    effort: str | None = None
    passed_over: tuple[str, ...] = ()


def read_conversation(record: dict[str, Any]) -> Conversation:
    """Checks a record.

    Raises:
        ChatError: it cannot be rendered without a guess or a loss; says which message and what would be accepted.
    """
    asked = [name for name in _REQUEST_FIELDS if _given(record.get(name))]
    if asked:
        raise ChatError(f"{asked[0]!r} belongs to a request; the template for training has no place for it")
    messages = record.get("messages")
    if not isinstance(messages, list):
        found = "is missing" if messages is None else f"is {json_kind(messages)}"
        raise ChatError(f"'messages' {found}; expected an array of messages")
    if not messages:
        raise ChatError("'messages' is empty: a conversation needs at least one message")
    thinking = record.get("thinking")
    if thinking is not None and not isinstance(thinking, bool):
        raise ChatError(f"'thinking' is {json_kind(thinking)}; expected true or false")
    return Conversation(
        turns=_turns(messages),
        tools=_tools(record.get("tools"), "'tools'"),
        thinking=thinking,
        effort=_effort(record),
        passed_over=tuple(name for name in record if name not in (*_RECORD_FIELDS, *_REQUEST_FIELDS)),
    )


def _effort(record: dict[str, Any]) -> str | None:
    given = [record[name] for name in ("thinking_effort", "reasoning_effort") if record.get(name) is not None]
    if not given:
        return None
    if any(effort not in EFFORTS for effort in given) or len(set(given)) > 1:
        raise ChatError(f"thinking effort {' and '.join(map(repr, given))}: expected one of {', '.join(EFFORTS)}")
    return given[0]


def _turns(messages: list[Any]) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    results: list[tuple[int, int, Turn]] = []  # of the run of results under way: place of the call, of the message
    waiting: dict[str, tuple[int, str]] = {}  # calls without a result: place and tool
    answered = 0

    def close() -> None:
        nonlocal answered
        for _, _, turn in sorted(results, key=lambda result: result[:2]):
            answered += 1
            turns.append(Turn("tool", turn.content, turn.name, index=answered))
        results.clear()

    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        role, fields = _message(message, where)
        if role == "tool":
            place, turn = _result(fields, where, waiting)
            results.append((place, number, turn))
            continue
        close()
        if role == "assistant":
            turn = _assistant(fields, where)
            waiting = {call.id: (place, call.name) for place, call in enumerate(turn.calls, start=1) if call.id}
            answered = 0
        else:
            turn = _speech(role, fields, where)
        turns.append(turn)
    close()
    return tuple(turns)


def _message(message: Any, where: str) -> tuple[str, dict[str, Any]]:
    """Role, and the other fields that say something."""
    if not isinstance(message, dict):
        raise ChatError(f"{where} is {json_kind(message)}; expected an object with a role")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise ChatError(f"{where} has the role {role!r}; expected one of {', '.join(_ROLES)}")
    role = _ROLES[role]
    fields = {name: value for name, value in message.items() if name != "role" and _given(value)}
    strange = [name for name in fields if name not in _FIELDS[role]]
    if strange:
        known = ", ".join(_FIELDS[role])
        raise ChatError(
            f"{where} ({role}) has the field {strange[0]!r}, which the template cannot show; known: {known}"
        )
    return role, fields


def _speech(role: str, fields: dict[str, Any], where: str) -> Turn:
    if "tools" in fields:
        if fields.get("content"):
            raise ChatError(f"{where} (system) has tools and content; expected one of them, content in its own message")
        return Turn("system", tools=_tools(fields["tools"], f"{where}.tools"))
    if "content" not in fields:
        raise ChatError(f"{where} ({role}) has no content")
    return Turn(role, _content(fields["content"], where), _text(fields.get("name", ""), f"{where}.name"))


def _assistant(fields: dict[str, Any], where: str) -> Turn:
    content = _content(fields.get("content", ""), where)
    calls = fields.get("tool_calls", [])
    if not isinstance(calls, list):
        raise ChatError(f"{where}.tool_calls is {json_kind(calls)}; expected an array")
    read = tuple(_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls))
    ids = [call.id for call in read if call.id]
    twice = [id for i, id in enumerate(ids) if id in ids[:i]]
    if twice:
        raise ChatError(f"{where} has two tool calls with the id {twice[0]!r}")
    if not content and not read:
        raise ChatError(f"{where} (assistant) has neither content nor tool calls")
    given = [fields[name] for name in ("reasoning_content", "reasoning") if name in fields]
    if len(given) == 2 and given[0] != given[1]:
        raise ChatError(f"{where} has reasoning_content and another reasoning; expected one of them")
    reasoning = _text(given[0], f"{where}.reasoning_content") if given else ""
    weight = fields.get("weight", 1)
    if isinstance(weight, bool) or weight not in (0, 1):
        raise ChatError(f"{where}.weight is {weight!r}; expected 0 or 1")
    return Turn("assistant", content, reasoning=reasoning if reasoning.strip() else "", calls=read, weight=int(weight))


def _call(call: Any, where: str) -> Call:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise ChatError(f"{where} is no function call; expected an id, a type and a function with name and arguments")
    if call.get("type", "function") != "function":
        raise ChatError(f"{where}.type is {call['type']!r}; expected 'function'")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise ChatError(f"{where}.function.name is {name!r}; expected the name of a tool")
    id = _text(call.get("id") or "", f"{where}.id")
    arguments = function.get("arguments")
    if arguments is None or isinstance(arguments, str) and not arguments.strip():
        return Call(id, name, {})
    if isinstance(arguments, str):
        try:
            decoded = json.loads(arguments, object_pairs_hook=json_members, parse_constant=_no_number)
        except NamedTwice as error:
            raise ChatError(f"{where}.function.arguments: {error}") from error
        except (ValueError, RecursionError) as error:
            return Call(id, name, {}, raw=arguments, fault=f"{where}: arguments are no JSON: {error}")
        arguments = decoded
    if not isinstance(arguments, dict):
        raise ChatError(f"{where}.function.arguments hold {json_kind(arguments)}; expected an object, or its JSON text")
    return Call(id, name, arguments)


def _no_number(name: str) -> float:
    """Python reads NaN and Infinity, JSON does not have them."""
    raise ValueError(f"{name} is no number")


def _result(fields: dict[str, Any], where: str, waiting: dict[str, tuple[int, str]]) -> tuple[int, Turn]:
    """Place of the answered call, and the result; the call is no longer waiting."""
    id = fields.get("tool_call_id")
    if id is None:
        raise ChatError(f"{where} (tool) has no tool_call_id; expected the id of a call before it")
    if not isinstance(id, str) or id not in waiting:
        open_calls = ", ".join(map(repr, waiting)) or "none"
        raise ChatError(f"{where} answers the tool call {id!r}; calls that wait for an answer: {open_calls}")
    place, tool = waiting.pop(id)
    if fields.get("name", tool) != tool:
        raise ChatError(f"{where} has the name {fields['name']!r}, but the tool call {id!r} is of {tool!r}")
    if "content" not in fields:
        raise ChatError(f"{where} (tool) has no content; an empty result is an empty text")
    return place, Turn("tool", _content(fields["content"], where), tool)


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ChatError(f"{where}.content is {json_kind(content)}; expected text or an array of text parts")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text":
            raise ChatError(f"{where}.content[{number}] has the type {kind!r}; only 'text' can be trained on yet")
        texts.append(_text(part.get("text"), f"{where}.content[{number}].text"))
    return "".join(texts)


def _tools(tools: Any, where: str) -> tuple[dict[str, Any], ...]:
    if not _given(tools):
        return ()
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ChatError(f"{where} must be an array of tool declarations (objects)")
    return tuple(tools)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ChatError(f"{where} is {json_kind(value)}; expected text")
    return value


def _given(value: Any) -> bool:
    return value is not None and value != []
