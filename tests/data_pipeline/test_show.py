"""Rows as a person sees them."""

import json

import numpy as np

from k3train.config.schema import DataConfig
from k3train.data.loader import make_train_loader
from k3train.data.pack import PackedRows, build_corpus
from k3train.data.show import channels, render_examples, render_row
from k3train.data.tokenizer import ByteTokenizer

TOKENIZER = ByteTokenizer()


def rows(*texts: str, seq_len: int) -> PackedRows:
    documents = [TOKENIZER.encode(text) for text in texts]
    names = [f"{i}.txt" for i in range(len(texts))]
    return PackedRows(build_corpus(names, documents, eos_id=256), seq_len, shuffle=False, pad_id=257)


def test_edges_mask_and_padding():
    packed = rows("hi there", "über", seq_len=18)
    assert render_row(packed[0], TOKENIZER, packed.sources(0)) == (
        "--- segment 1: 0.txt, tokens 0 to 8 of the document (9 tokens, 8 with loss) ---\n"
        "hi there⟦<eos>⟧\n"
        "--- segment 2: 1.txt, tokens 0 to 5 of the document (6 tokens, 5 with loss) ---\n"
        "über⟦<eos>⟧\n"
        "--- padding: 3 tokens ---"
    )


def test_a_masked_stretch_without_sources():
    row = rows("question answer", seq_len=16)[0]
    row["loss_mask"][:9] = 0
    assert render_row(row, TOKENIZER) == ("--- segment 1: (16 tokens, 6 with loss) ---\n⟦question ⟧answer⟦<eos>⟧")


def test_documents_cannot_steer_the_terminal():
    packed = rows("\x1b[31mred\x9b\x07\tok\n", seq_len=20)
    plain = render_row(packed[0], TOKENIZER)
    assert "\x1b" not in plain and "\x9b" not in plain and "\x07" not in plain
    assert "␛[31mred\ufffd␇\tok\n" in plain
    coloured = render_row(packed[0], TOKENIZER, colour=True)
    assert coloured.count("\x1b[") == coloured.count("\x1b") > 0 and "␛[31mred" in coloured


def test_ids_outside_the_vocabulary_are_shown_by_number():
    row = rows("ab", seq_len=3)[0]
    row["tokens"] = np.array([97, 300, 98], np.int32)
    assert "a<id 300>⟦b⟧" in render_row(row, TOKENIZER)


def test_examples_show_what_the_loader_gives(tmp_path):
    for i in range(8):
        (tmp_path / f"{i}.txt").write_text(f"document number {i}")
    (tmp_path / "9.txt").touch()
    loader = make_train_loader(DataConfig(source="text", path=str(tmp_path), seq_len=20, batch_size=2), seed=0)
    text = render_examples(loader, 2)
    assert "left out 1 empty files" in text and "byte, 264 ids" in text
    assert "=== row 1 ===" in text and "=== row 2 ===" not in text
    batch = next(loader)
    for row in range(2):
        shown = render_row({k: v[row] for k, v in batch.items()}, TOKENIZER, loader.rows.sources(row))
        assert shown in text
    assert loader.next_batch == 1


CHAT = {
    "messages": [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": "Yes",
            "tool_calls": [{"function": {"name": "f", "arguments": "{x"}}],
        },
    ]
}


def chat_loader(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps(CHAT))
    config = DataConfig(
        source="chat", path=str(tmp_path), seq_len=200, batch_size=1, eval_fraction=0.0, chat_effort="none"
    )
    return make_train_loader(config, seed=0)


def test_chat_shows_what_is_trained(tmp_path):
    text = render_examples(chat_loader(tmp_path), 1)
    assert "note         tool calls whose arguments are no JSON" in text
    assert "marks        ⟦not trained⟧\n" in text
    body = text.split("with loss) ---\n")[1]
    assert body == (
        '⟦<|open|>message role="user"<|sep|>Hi<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|>⟧<|open|>think<|sep|>hm<|close|>think<|sep|>'
        "<|open|>response<|sep|>Yes<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="f" index="1"<|sep|>⟦<|open|>json type="object"<|sep|>{x<|close|>json<|sep|>⟧'
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>\n--- padding: 19 tokens ---"
    )


def test_chat_channels_and_their_colours(tmp_path):
    loader = chat_loader(tmp_path)
    ids = loader.corpora.train.document(0).tolist()
    found = channels(ids, TOKENIZER)
    parts = {name: [i for i, channel in zip(ids, found, strict=True) if channel == name] for name in set(found)}
    assert parts.keys() == {"", "think", "response", "tools"}
    assert TOKENIZER.decode(parts["think"]) == "thinkhmthink"
    assert TOKENIZER.decode(parts["response"]) == "responseYesresponse"
    assert TOKENIZER.decode(parts["tools"]).startswith("toolscall") and parts["tools"][-2:] == [ord("s"), 261]
    assert channels(ids[:50], TOKENIZER) == found[:50]  # a conversation that was cut
    shown = render_examples(loader, 1, colour=True)
    for part in ("\x1b[36mhm\x1b[0m", "\x1b[32mYes\x1b[0m", "\x1b[2m\x1b[33m{x\x1b[0m", "\x1b[2mHi\x1b[0m"):
        assert part in shown
    assert "\x1b[36mthink: cyan\x1b[0m" in shown
