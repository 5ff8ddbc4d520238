"""Conversations that cannot be used say which message is at fault, and what would be accepted."""

import pytest

from k3train.data.chat import ChatError, read_conversation
from k3train.data.chat_template import Style, render

USER = {"role": "user", "content": "Hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ASKS = {"role": "assistant", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "x"}


def calling(**changes):
    return {"messages": [USER, {"role": "assistant", "tool_calls": [{**CALL, **changes}]}]}


def arguments(value):
    return calling(function={"name": "f", "arguments": value})


def messages(*turns):
    return {"messages": list(turns)}


BAD = {
    "no messages": ({"text": "x"}, "'messages' is missing; expected an array of messages"),
    "messages of another kind": ({"messages": "Hi"}, "'messages' is a string; expected an array"),
    "empty conversation": ({"messages": []}, "'messages' is empty: a conversation needs at least one message"),
    "message of another kind": (messages(USER, "Hi"), r"messages\[1\] is a string; expected an object with a role"),
    "unknown role": (
        messages(USER, {"role": "robot", "content": "x"}),
        r"messages\[1\] has the role 'robot'; expected one of system, developer, user, assistant, tool",
    ),
    "no role": (messages({"content": "x"}), r"messages\[0\] has the role None; expected one of"),
    "role of another kind": (messages({"role": ["user"]}), r"messages\[0\] has the role \['user'\]; expected one of"),
    "field that would be lost": (
        messages(USER, {"role": "assistant", "content": "x", "audio": {"id": 1}}),
        r"messages\[1\] \(assistant\) has the field 'audio', which the template cannot show; known: content, reasoning",
    ),
    "user without content": (messages({"role": "user"}), r"messages\[0\] \(user\) has no content"),
    "content of another kind": (messages({"role": "user", "content": 3}), r"content is a number; expected text or an"),
    "image": (
        messages({"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}),
        r"messages\[0\].content\[1\] has the type 'image_url'; only 'text' can be trained on yet",
    ),
    "part without text": (messages({"role": "user", "content": [{"type": "text"}]}), r"content\[0\].text is null"),
    "name of another kind": (messages({**USER, "name": 3}), r"messages\[0\].name is a number; expected text"),
    "empty answer": (
        messages({"role": "assistant", "content": ""}),
        r"messages\[0\] \(assistant\) has neither content",
    ),
    "two reasonings": (
        messages({"role": "assistant", "content": "x", "reasoning": "a", "reasoning_content": "b"}),
        r"messages\[0\] has reasoning_content and another reasoning",
    ),
    "weight": (messages({"role": "assistant", "content": "x", "weight": 0.5}), "weight is 0.5; expected 0 or 1"),
    "result without call": (
        messages(USER, RESULT),
        r"messages\[1\] answers the tool call '1'; calls that wait for an answer: none",
    ),
    "result of another call": (
        messages(USER, ASKS, {**RESULT, "tool_call_id": "2"}),
        r"messages\[2\] answers the tool call '2'; calls that wait for an answer: '1'",
    ),
    "result twice": (messages(ASKS, RESULT, RESULT), r"messages\[2\] answers the tool call '1'; .* answer: none"),
    "result after the next turn": (
        messages(ASKS, {"role": "assistant", "content": "x"}, RESULT),
        r"messages\[2\] answers the tool call '1'; .* answer: none",
    ),
    "result without id": (
        messages(ASKS, {"role": "tool", "content": "x"}),
        r"messages\[1\] \(tool\) has no tool_call_i",
    ),
    "result of another tool": (
        messages(ASKS, {**RESULT, "name": "g"}),
        r"messages\[1\] has the name 'g', but the tool call '1' is of 'f'",
    ),
    "result without content": (
        messages(ASKS, {"role": "tool", "tool_call_id": "1"}),
        r"messages\[1\] \(tool\) has no co",
    ),
    "two calls with one id": (
        messages({"role": "assistant", "tool_calls": [CALL, CALL]}),
        r"messages\[0\] has two tool calls with the id '1'",
    ),
    "calls of another kind": (
        messages({"role": "assistant", "tool_calls": {}}),
        "tool_calls is an object; expected an",
    ),
    "call of another kind": (
        messages({"role": "assistant", "tool_calls": ["f"]}),
        r"messages\[0\].tool_calls\[0\] is no function call; expected an id, a type and a function",
    ),
    "call type": (calling(type="web"), r"messages\[1\].tool_calls\[0\].type is 'web'; expected 'function'"),
    "call without name": (
        calling(function={"arguments": "{}"}),
        r"tool_calls\[0\].function.name is None; expected the n",
    ),
    "call id": (calling(id=1), r"messages\[1\].tool_calls\[0\].id is a number; expected text"),
    "arguments array": (
        arguments("[1, 2]"),
        r"messages\[1\].tool_calls\[0\].function.arguments hold an array; expected an object, or its JSON text",
    ),
    "arguments number": (arguments(3), "function.arguments hold a number; expected an object"),
    "arguments null in text": (arguments("null"), "function.arguments hold null; expected an object"),
    "argument twice": (
        arguments('{"x": {"a": 1, "b": 2, "a": 3}}'),
        r"messages\[1\].tool_calls\[0\].function.arguments: an object has the name 'a' twice",
    ),
    "tools and content": (
        messages({"role": "system", "tools": [{}], "content": "x"}),
        r"messages\[0\] \(system\) has tools and content; expected one of them",
    ),
    "tools of another kind": ({"messages": [USER], "tools": "f"}, r"'tools' must be an array of tool declarations"),
    "tool of another kind": (messages({"role": "system", "tools": ["f"]}), r"messages\[0\].tools must be an array"),
    "thinking": ({"messages": [USER], "thinking": "yes"}, "'thinking' is a string; expected true or false"),
    "effort": ({"messages": [USER], "thinking_effort": "medium"}, "effort 'medium': expected one of low, high, max"),
    "two efforts": (
        {"messages": [USER], "thinking_effort": "low", "reasoning_effort": "high"},
        "thinking effort 'low' and 'high': expected one of",
    ),
    "request": ({"messages": [USER], "tool_choice": "required"}, "'tool_choice' belongs to a request"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_said(name):
    record, said = BAD[name]
    with pytest.raises(ChatError, match=said) as caught:
        read_conversation(record)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "record",
    [
        messages({"role": "user", "content": "a\ud800"}),
        arguments('{"x": "\\ud800"}'),
        {"messages": [USER], "tools": [{"\udfff": 1}]},
    ],
)
def test_half_a_surrogate_pair_is_refused_wherever_it_stands(record):
    with pytest.raises(ChatError, match="half a surrogate pair after '"):
        render(read_conversation(record), Style())


@pytest.mark.parametrize("record", [arguments({"x": [float("nan")]}), {"messages": [USER], "tools": [{"a": 1e999}]}])
def test_numbers_that_json_does_not_have_are_refused(record):
    with pytest.raises(ChatError, match="a number that is not finite"):
        render(read_conversation(record), Style())


def test_absent_and_null_are_one():
    nulls = {"name": None, "tool_calls": None, "refusal": None, "function_call": None, "annotations": []}
    record = messages({**USER, **nulls}, {"role": "assistant", "content": "x", **nulls})
    assert read_conversation({**record, "tools": None, "thinking": None}) == read_conversation(
        messages(USER, {"role": "assistant", "content": "x"})
    )


def test_calls_need_no_id_if_nothing_refers_to_them():
    nameless = {"function": {"name": "f", "arguments": None}}
    turns = read_conversation(messages({"role": "assistant", "tool_calls": [nameless, nameless]})).turns
    assert [call.id for call in turns[0].calls] == ["", ""]


def test_an_interrupted_round_of_tools_keeps_its_results():
    """A result that comes after a word of the user still belongs to the call."""
    two = {"role": "assistant", "tool_calls": [CALL, {**CALL, "id": "2", "function": {"name": "g"}}]}
    turns = read_conversation(messages(two, {**RESULT, "tool_call_id": "2"}, USER, RESULT)).turns
    assert [(turn.name, turn.index) for turn in turns if turn.role == "tool"] == [("g", 1), ("f", 2)]
