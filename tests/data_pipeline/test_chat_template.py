"""Conversations as K3 writes them: strings derived by hand from docs/k3.md section 3.9, and which tokens are trained.

In the table ‹tag› stands for `<|open|>tag<|sep|>`, ‹/tag› for `<|close|>tag<|sep|>`, ‹.› for `<|end_of_msg|>`, and what
is trained is between { and }.
"""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3train.config.schema import DataConfig
from k3train.data.chat import read_conversation
from k3train.data.chat_corpus import encode_prompt
from k3train.data.chat_template import Style, encode, render
from k3train.data.tokenizer import ByteTokenizer

PLAIN = Style(effort="")
INSTRUCT = Style(thinking=False)


def marked(rendered) -> str:
    """Its text with { and } around what is trained."""
    out, before = "", False
    for piece in rendered.pieces:
        out += "" if piece.trained == before else "{" if piece.trained else "}"
        out, before = out + piece.text, piece.trained
    return out + "}" * before


def full(short: str) -> str:
    text = short.replace("‹.›", "<|end_of_msg|>")
    text = re.sub("‹/(.*?)›", r"<|close|>\1<|sep|>", text)
    return re.sub("‹(.*?)›", r"<|open|>\1<|sep|>", text)


def rendered(*messages, style=PLAIN, reply=False, **record):
    return render(read_conversation({"messages": list(messages), **record}), style, reply=reply)


def user(content, **more):
    return {"role": "user", "content": content, **more}


def assistant(content=None, *calls, **more):
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **more}


def call(name, arguments, id="c"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content, id="c"):
    return {"role": "tool", "tool_call_id": id, "content": content}


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "d",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}

#: As printed in docs/k3.md section 3.9, without the line breaks that it adds for reading.
WORKED = (
    '<|open|>message role="system" type="tool-declare"<|sep|># Tools\nHere are the available tools, described in '
    'JSONSchema.\n\n```json\n[{"function":{"description":"d","name":"get_weather","parameters":{"properties":{"city":'
    '{"type":"string"}},"type":"object"}},"type":"function"}]\n```<|close|>message<|sep|><|end_of_msg|>'
    '<|open|>message role="system" type="thinking-effort"<|sep|>`thinking_effort` guides on how much to think in your '
    "thinking channel (not including the response channel), supported values include `low`, `medium`, `high`, and "
    "`max`.\nNow the system is invoked with `thinking_effort=high`.<|close|>message<|sep|><|end_of_msg|>"
    '<|open|>message role="user"<|sep|>Weather in Oslo?<|close|>message<|sep|><|end_of_msg|>'
    '<|open|>message role="assistant"<|sep|>'
    "{<|open|>think<|sep|>Need the tool.<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|>"
    '<|open|>tools<|sep|><|open|>call tool="get_weather" index="1"<|sep|>'
    '<|open|>argument key="city" type="string"<|sep|>Oslo<|close|>argument<|sep|>'
    '<|open|>argument key="days" type="number"<|sep|>2<|close|>argument<|sep|>'
    "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>}"
    '<|open|>message role="tool" tool="get_weather" index="1"<|sep|>4 C<|close|>message<|sep|><|end_of_msg|>'
    '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
)


@pytest.mark.parametrize("arguments", ['{"city": "Oslo", "days": 2}', {"city": "Oslo", "days": 2}])
def test_the_worked_example(arguments):
    got = rendered(
        user("Weather in Oslo?"),
        assistant(None, call("get_weather", arguments), reasoning_content="Need the tool."),
        result("4 C"),
        tools=[TOOL],
        style=Style(effort="high"),
        reply=True,
    )
    assert marked(got) == WORKED


HI = '‹message role="user"›Hi‹/message›‹.›'
A = '‹message role="assistant"›'
OFF = "‹/message›‹.›"
EFFORT = (
    '‹message role="system" type="thinking-effort"›`thinking_effort` guides on how much to think in your thinking '
    "channel (not including the response channel), supported values include `low`, `medium`, `high`, and `max`.\nNow "
    "the system is invoked with `thinking_effort={}`.‹/message›‹.›"
).format
CALL = '‹call tool="f" index="1"›'
EMPTY = "‹think›‹/think›‹response›‹/response›‹tools›"


def ask_f(arguments):
    """The calls of an assistant turn that only calls f."""
    return [assistant(None, call("f", arguments))]


def turn_f(arguments):
    return A + "{" + EMPTY + CALL + arguments + "‹/call›‹/tools›" + OFF + "}"


def argument(key, kind, text):
    return f'‹argument key="{key}" type="{kind}"›{text}‹/argument›'


TABLE = {
    "user": ([user("Hi")], {}, HI),
    "system": ([{"role": "system", "content": "Be brief."}], {}, '‹message role="system"›Be brief.‹/message›‹.›'),
    "developer is system": ([{"role": "developer", "content": "x"}], {}, '‹message role="system"›x‹/message›‹.›'),
    "order is kept": (
        [{"role": "system", "content": "x"}, user("Hi"), {"role": "system", "content": "y"}],
        {},
        f'‹message role="system"›x‹/message›‹.›{HI}‹message role="system"›y‹/message›‹.›',
    ),
    "named user": ([user("Hi", name="Ann")], {}, '‹message role="user" name="Ann"›Hi‹/message›‹.›'),
    "attributes escape two characters": (
        [user("Hi", name='<A & "B">')],
        {},
        '‹message role="user" name="<A &amp; &quot;B&quot;>"›Hi‹/message›‹.›',
    ),
    "bodies escape nothing": ([user('a & "b" &amp; <c>')], {}, '‹message role="user"›a & "b" &amp; <c>‹/message›‹.›'),
    "parts are joined": (
        [user([{"type": "text", "text": "one "}, {"type": "text", "text": "two"}])],
        {},
        '‹message role="user"›one two‹/message›‹.›',
    ),
    "empty body": ([user("")], {}, '‹message role="user"›‹/message›‹.›'),
    "spaces and lines stay": ([user("\n a\r\n ")], {}, '‹message role="user"›\n a\r\n ‹/message›‹.›'),
    "answer without reasoning": (
        [user("Hi"), assistant("Yes")],
        {},
        HI + A + "{‹think›‹/think›‹response›Yes‹/response›" + OFF + "}",
    ),
    "answer with reasoning": (
        [assistant("Yes", reasoning_content=" why\n")],
        {},
        A + "{‹think› why\n‹/think›‹response›Yes‹/response›" + OFF + "}",
    ),
    "blank reasoning is none": (
        [assistant("Yes", reasoning_content=" \n")],
        {},
        A + "{‹think›‹/think›‹response›Yes‹/response›" + OFF + "}",
    ),
    "reasoning by its other name": (
        [assistant("Yes", reasoning="why")],
        {},
        A + "{‹think›why‹/think›‹response›Yes‹/response›" + OFF + "}",
    ),
    "instruct mode": ([assistant("Yes")], {"style": INSTRUCT}, A + "{‹response›Yes‹/response›" + OFF + "}"),
    "instruct mode leaves reasoning out": (
        [assistant("Yes", reasoning_content="why")],
        {"style": INSTRUCT},
        A + "{‹response›Yes‹/response›" + OFF + "}",
    ),
    "history keeps what was thought": (
        [assistant("1", reasoning_content="a"), user("Hi"), assistant("2", reasoning_content="b")],
        {},
        A + "{‹think›a‹/think›‹response›1‹/response›" + OFF + "}" + HI
        + A + "{‹think›b‹/think›‹response›2‹/response›" + OFF + "}",
    ),
    "effort max is the default": ([user("Hi")], {"style": Style()}, EFFORT("max") + HI),
    "effort low": ([user("Hi")], {"style": Style(effort="low")}, EFFORT("low") + HI),
    "no effort in instruct mode": ([user("Hi")], {"style": INSTRUCT}, HI),
    "a record's effort": ([user("Hi")], {"style": Style(), "thinking_effort": "low"}, EFFORT("low") + HI),
    "a record's effort by its other name": ([user("Hi")], {"reasoning_effort": "high"}, EFFORT("high") + HI),
    "a record's instruct mode": (
        [assistant("Yes")],
        {"thinking": False, "style": Style()},
        A + "{‹response›Yes‹/response›" + OFF + "}",
    ),
    "a record's thinking mode": (
        [assistant("Yes")],
        {"thinking": True, "style": INSTRUCT},
        EFFORT("max") + A + "{‹think›‹/think›‹response›Yes‹/response›" + OFF + "}",
    ),
    "weight 0": ([assistant("Yes", weight=0)], {}, A + "‹think›‹/think›‹response›Yes‹/response›" + OFF),
    "only the last turn": (
        [assistant("1"), user("Hi"), assistant("2"), user("Hi")],
        {"style": Style(effort="", only_last=True)},
        A + "‹think›‹/think›‹response›1‹/response›" + OFF + HI
        + A + "{‹think›‹/think›‹response›2‹/response›" + OFF + "}" + HI,
    ),
    "call without arguments": (ask_f(None), {}, turn_f("")),
    "call with blank arguments": (ask_f("  "), {}, turn_f("")),
    "call with no arguments in it": (ask_f("{}"), {}, turn_f("")),
    "string": (ask_f({"x": 'a "b" & 1'}), {}, turn_f(argument("x", "string", 'a "b" & 1'))),
    "string of digits": (ask_f('{"x": "2"}'), {}, turn_f(argument("x", "string", "2"))),
    "empty string": (ask_f({"x": ""}), {}, turn_f(argument("x", "string", ""))),
    "numbers": (
        ask_f('{"i": -3, "f": 2.50}'),
        {},
        turn_f(argument("i", "number", "-3") + argument("f", "number", "2.5")),
    ),
    "boolean is no number": (
        ask_f({"yes": True, "no": False}),
        {},
        turn_f(argument("yes", "boolean", "true") + argument("no", "boolean", "false")),
    ),
    "null": (ask_f({"x": None}), {}, turn_f(argument("x", "null", "null"))),
    "object keeps its order": (
        ask_f('{"x":{"b":1,"a":["é",null]}}'),
        {},
        turn_f(argument("x", "object", '{"b": 1, "a": ["é", null]}')),
    ),
    "array": (ask_f({"x": [1, "two", {}]}), {}, turn_f(argument("x", "array", '[1, "two", {}]'))),
    "key that needs escaping": (ask_f({'a"&': 1}), {}, turn_f(argument("a&quot;&amp;", "number", "1"))),
    "tool that needs escaping": (
        [assistant(None, call('f"', {}))],
        {},
        A + "{" + EMPTY + '‹call tool="f&quot;" index="1"›‹/call›‹/tools›' + OFF + "}",
    ),
    "arguments that are no JSON": (
        ask_f('{"x": '),
        {},
        A + "{" + EMPTY + CALL + '}‹json type="object"›{"x": ‹/json›{‹/call›‹/tools›' + OFF + "}",
    ),
    "NaN is no JSON": (
        ask_f('{"x": NaN}'),
        {},
        A + "{" + EMPTY + CALL + '}‹json type="object"›{"x": NaN}‹/json›{‹/call›‹/tools›' + OFF + "}",
    ),
    "answer and two calls": (
        [assistant("Look.", call("f", {}, "1"), call("g", {"x": 1}, "2"))],
        {"style": INSTRUCT},
        A + "{‹response›Look.‹/response›‹tools›" + CALL + '‹/call›‹call tool="g" index="2"›'
        + argument("x", "number", "1") + "‹/call›‹/tools›" + OFF + "}",
    ),
    "results in the order of the calls": (
        [assistant("x", call("f", {}, "1"), call("g", {}, "2")), result("of g", "2"), result("of f", "1"), user("Hi")],
        {"style": INSTRUCT},
        A + "{‹response›x‹/response›‹tools›" + CALL + '‹/call›‹call tool="g" index="2"›‹/call›‹/tools›' + OFF + "}"
        '‹message role="tool" tool="f" index="1"›of f‹/message›‹.›'
        '‹message role="tool" tool="g" index="2"›of g‹/message›‹.›' + HI,
    ),
    "results count from 1 in every turn": (
        [*ask_f({}), result("a"), *ask_f({}), result("")],
        {},
        turn_f("") + '‹message role="tool" tool="f" index="1"›a‹/message›‹.›'
        + turn_f("") + '‹message role="tool" tool="f" index="1"›‹/message›‹.›',
    ),
    "no tools": ([user("Hi")], {"tools": []}, HI),
    "tools before effort, keys sorted, compact": (
        [user("Hi")],
        {"tools": [{"z": {"b": 1, "a": "é"}, "f": [{"d": 1.0, "c": None}]}], "style": Style()},
        '‹message role="system" type="tool-declare"›# Tools\nHere are the available tools, described in JSONSchema.\n\n'
        '```json\n[{"f":[{"c":null,"d":1.0}],"z":{"a":"é","b":1}}]\n```‹/message›‹.›' + EFFORT("max") + HI,
    ),
    "tools in the middle": (
        [user("Hi"), {"role": "system", "tools": [{"b": 1, "a": 2}]}, user("Hi")],
        {},
        HI + '‹message role="system" type="tool-declare"›## New Tools Available\nThe system dynamically extends the '
        "toolset via lazy-loading.\nYou have access to all existing and extended tools.\nHere are the specs for the "
        'extended tools.\n\n```json\n[{"a":2,"b":1}]\n```‹/message›‹.›' + HI,
    ),
    "reply": ([user("Hi")], {"reply": True}, HI + A + "‹think›"),
    "reply in instruct mode": ([user("Hi")], {"reply": True, "style": INSTRUCT}, HI + A + "‹response›"),
    "control tokens as text": (
        [user("<|end_of_msg|>"), assistant("<|open|>think<|sep|>")],
        {"style": INSTRUCT},
        '‹message role="user"›<|end_of_msg|>' + OFF + A + "{‹response›<|open|>think<|sep|>‹/response›" + OFF + "}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_strings_by_hand(name):
    messages, more, expected = TABLE[name]
    assert marked(rendered(*messages, **more)) == full(expected)


def test_what_cannot_be_shown_is_remarked():
    got = rendered(*TABLE["arguments that are no JSON"][0], id=7, source="x")
    assert len(got.unread_arguments) == 1 and got.passed_over == ("id", "source")
    assert got.unread_arguments[0].startswith("messages[0].tool_calls[0]: arguments are no JSON: Expecting value")
    thoughts = [assistant("Yes", reasoning_content="why"), assistant("Yes", reasoning_content=" "), assistant("No")]
    assert rendered(*thoughts, style=INSTRUCT).unsaid_thoughts == 1
    assert rendered(*thoughts).unsaid_thoughts == 0


def test_ids_and_flags():
    tokenizer = ByteTokenizer()
    first, second = encode([rendered(user("é<|open|>"), assistant("A")), rendered(user("B"))], tokenizer)
    expected = (
        [259, *b'message role="user"', 261, *"é<|open|>".encode(), 260, *b"message", 261, 258]
        + [259, *b'message role="assistant"', 261]
        + [259, *b"think", 261, 260, *b"think", 261, 259, *b"response", 261, 65, 260, *b"response", 261]
        + [260, *b"message", 261, 258]
    )
    assert first[0].tolist() == expected and first[0].dtype == np.int32
    start = len(expected) - (7 + 7 + 10 + 1 + 10 + 9 + 1)
    assert np.flatnonzero(first[1]).tolist() == list(range(start, len(expected)))
    assert expected[start : start + 2] == [259, ord("t")] and not second[1].any()


def test_pieces_of_a_tag_are_encoded_apart():
    texts = [piece.text for piece in rendered(user("Hi", name="A&B")).pieces]
    head = ["<|open|>", "message", " role", '="', "user", '"', " name", '="', "A&amp;B", '"', "<|sep|>"]
    assert texts == [*head, "Hi", "<|close|>", "message", "<|sep|>", "<|end_of_msg|>"]


@settings(max_examples=50, deadline=None)
@given(st.text(st.sampled_from("<|open>clsepndfmg_ é\n"), max_size=40), st.booleans())
def test_no_text_becomes_a_control_token(text, thinking):
    """Wherever a text stands, the number of control tokens is that of the structure."""
    style = Style(thinking, effort="")

    def controls(body):
        turns = [
            {"role": "system", "content": body},
            user(body, name=body),
            assistant(body, call(f"f{body}", {f"k{body}": body}), reasoning_content=f"x{body}"),
            result(body),
        ]
        got = rendered(*turns, tools=[{"name": body}], style=style)
        ids = encode([got], ByteTokenizer())[0][0]
        return ids[ids > 255].tolist()

    assert controls(text) == controls("a")


def test_a_prompt_opens_the_answer():
    tokenizer = ByteTokenizer()
    record = {"messages": [user("Hi")]}
    ids = encode_prompt(record, DataConfig(source="chat", chat_effort="none"), tokenizer)
    whole = encode([rendered(user("Hi"), assistant("Yes"))], tokenizer)[0][0]
    assert ids.tolist() == whole[: len(ids)].tolist() and ids[-7:].tolist() == [259, *b"think", 261]
    instruct = encode_prompt(record, DataConfig(source="chat", chat_mode="instruct"), tokenizer)
    assert instruct[-10:].tolist() == [259, *b"response", 261]


def test_a_tokenizer_without_control_tokens_is_refused():
    class Bare(ByteTokenizer):
        name = "bare"
        specials = {256: "<eos>", 259: "<|open|>"}

    with pytest.raises(ValueError, match=r"data.tokenizer=bare has no special token <\|close\|>, <\|sep\|>, <\|end_of"):
        encode([rendered(user("Hi"))], Bare())
