"""Assistant turns read back: what the template writes comes out as the message it was, anything else is said."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3train.config.schema import DataConfig
from k3train.data.chat import read_conversation
from k3train.data.chat_corpus import encode_prompt
from k3train.data.chat_reply import Reply, read_reply
from k3train.data.chat_template import Style, encode, render
from k3train.data.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()
START = {"messages": [{"role": "user", "content": "Hi"}]}
TEXTS = st.text(st.sampled_from('<|open|>sep &quot;"é\r\n'), max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXTS,
    st.lists,
    max_leaves=4,
)


def written(message, mode):
    """The prompt, and the tokens of an assistant turn as it is trained, without the last."""
    whole = read_conversation({"messages": [*START["messages"], message]})
    ids = encode([render(whole, Style(mode == "thinking", effort=""))], TOKENIZER)[0][0].tolist()
    prompt = encode_prompt(START, DataConfig(chat_mode=mode, chat_effort="none"), TOKENIZER).tolist()
    assert ids[: len(prompt)] == prompt and ids[-1] == 258
    return prompt, ids[len(prompt) : -1]


@settings(max_examples=60, deadline=None)
@given(TEXTS, TEXTS, st.lists(st.tuples(TEXTS, st.dictionaries(TEXTS, JSON, max_size=3)), max_size=2), st.booleans())
def test_a_turn_comes_back_as_it_was(content, thought, calls, thinking):
    message = {"role": "assistant", "content": content or ("" if calls else "x")}
    if thinking and thought.strip():
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{n}", "type": "function", "function": {"name": f"f{name}", "arguments": arguments}}
            for n, (name, arguments) in enumerate(calls, start=1)
        ]
    mode = "thinking" if thinking else "instruct"
    prompt, turn = written(message, mode)
    reply = read_reply(prompt, turn, TOKENIZER)
    assert not reply.fault
    again = read_conversation({"messages": [*START["messages"], reply.message]})
    assert again == read_conversation({"messages": [*START["messages"], message]})
    for end in range(0, len(turn), 7):
        assert read_reply(prompt, turn[:end], TOKENIZER).fault.startswith("cut off in ")


def test_arguments_that_are_no_json_stay():
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": '}}
    prompt, turn = written({"role": "assistant", "content": "", "tool_calls": [call]}, "thinking")
    reply = read_reply(prompt, turn, TOKENIZER)
    assert reply.message["tool_calls"] == [call] and reply.text == '[tools] f {"x": '


@pytest.mark.parametrize(
    ("short", "said", "fault"),
    [
        ("Yes", "Yes", "cut off in response"),
        ("Yes{response}", "Yes", "leaves the template after response: '<|open|>response<|sep|>'"),
        ("Yes{/think}", "Yes", "leaves the template after response: '<|close|>think<|sep|>'"),
        ("Yes{/response}no", "Yes", "leaves the template after message: '<|close|>response<|sep|>no'"),
        ("Yes}no", "Yes", "leaves the template after response: '<|sep|>no'"),
        ("Yes{/response}{/message}{think}", "Yes", "leaves the template after its end: '<|open|>think<|sep|>'"),
        ("Yes{/response}{tools}{call}x", "Yes", "leaves the template after call: '<|open|>call<|sep|>x'"),
        ("Yes{/resp", "Yes", "cut off in response"),
        ("Yes{/{/", "Yes", "leaves the template after response: '<|close|><|close|>'"),
        ("", "", "cut off in response"),
    ],
)  # fmt: skip
def test_a_model_may_write_anything(short, said, fault):
    ids = []
    for byte in short.replace("{/", "\x00").encode():
        ids.append({0: 260, ord("{"): 259, ord("}"): 261}.get(byte, byte))
    prompt = encode_prompt(START, DataConfig(chat_mode="instruct"), TOKENIZER).tolist()
    reply = read_reply(prompt, ids, TOKENIZER)
    assert (reply.message["content"], reply.fault) == (said, fault)


def test_what_people_see():
    assert Reply({"role": "assistant", "content": "A"}).text == "A"
    assert Reply({"role": "assistant", "content": "A", "reasoning_content": "B"}).text == "[think] B\n[response] A"
