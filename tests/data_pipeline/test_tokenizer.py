"""Ids of the three kinds of tokenizer; text never turns into special tokens."""

import base64
import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from k3train.data.tokenizer import K3_NUM_SPECIALS, ByteTokenizer, K3Tokenizer, k3_parts, load_tokenizer

MERGES = [b"th", b"the", b" the", b"he", b"in", b"ing", b"12", b"\n\n", "中文".encode(), b"aa", b"aaaa"]
SAMPLE = "The 中文 cat's naïve 12345 don't\r\n\n  stop… 🎉\ttabs"


def write_ranks(path, tokens):
    lines = [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]
    path.write_bytes(b"\n".join(lines) + b"\n")
    return str(path)


@pytest.fixture
def k3(tmp_path):
    return load_tokenizer(write_ranks(tmp_path / "small.tiktoken", [bytes([b]) for b in range(256)] + MERGES))


@pytest.fixture(scope="module")
def trained():
    """A byte-level BPE with an end token, truncation and padding switched on, as files in the wild have."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>", "<|other|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(["the thing in the thin thicket " * 20], trainer)
    inner.enable_truncation(4)
    inner.enable_padding(length=64, pad_id=1)
    return inner.to_str()


@pytest.fixture
def json_path(tmp_path, trained):
    path = tmp_path / "tokenizer.json"
    path.write_text(trained)
    return path


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_bytes_round_trip(text):
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and ids.tolist() == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_byte_ids():
    tokenizer = load_tokenizer("byte")
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.pad_id, tokenizer.bos_id) == (264, 256, 257, None)
    assert sorted(tokenizer.specials) == list(range(256, 264))
    assert [tokenizer.specials[i] for i in tokenizer.stop_ids] == ["<eos>", "<|end_of_msg|>"]
    assert tokenizer.decode([104, 105, 256, 257, 300, 0xC3]) == "hi\ufffd"


def test_k3_special_ids_follow_the_ranks(k3):
    first = 256 + len(MERGES)
    assert k3.vocab_size == first + K3_NUM_SPECIALS and sorted(k3.specials) == list(range(first, first + 256))
    # docs/k3.md section 3.9, whose ids start at 163,584
    released = {
        163584: "[BOS]", 163585: "[EOS]", 163586: "<|end_of_msg|>", 163587: "<|open|>", 163588: "<|close|>",
        163589: "<|sep|>", 163590: "[start_header_id]", 163591: "[end_header_id]", 163593: "[EOT]",
        163602: "<|media_begin|>", 163603: "<|media_content|>", 163604: "<|media_end|>", 163605: "<|media_pad|>",
        163649: "<osagent_mode>", 163838: "[UNK]", 163839: "[PAD]",
    }  # fmt: skip
    named = {163584 + i - first: name for i, name in k3.specials.items() if not name.startswith("<|reserved")}
    assert named == released
    assert k3.specials[first + 8] == f"<|reserved_token_{first + 8}|>"
    assert (k3.bos_id, k3.eos_id, k3.pad_id) == (first, first + 1, first + 255)
    assert k3.stop_ids == (first + 1, first + 2)


def test_k3_text_never_becomes_special(k3):
    text = "<|open|>[EOS]<|end_of_msg|><|reserved_token_275|>"
    ids = k3.encode(text)
    assert ids.dtype == np.int32 and ids.max() < 256 + len(MERGES) and k3.decode(ids) == text
    assert k3.decode([104, k3.eos_id, 105, 10**6, -1]) == "hi"


def test_k3_merges_inside_splits_only(k3):
    rank = {token: 256 + i for i, token in enumerate(MERGES)}
    assert k3.encode("in the").tolist() == [rank[b"in"], rank[b" the"]]
    assert k3.encode("12312").tolist() == [rank[b"12"], ord("3"), rank[b"12"]]  # digits in threes: 123|12
    assert k3.encode("x中文").tolist() == [ord("x"), rank["中文".encode()]]  # Han runs stand alone
    assert k3.encode("iN").tolist() == [ord("i"), ord("N")]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("中文English混合", ["中文", "English", "混合"]),
        ("HTTPServer don't WE'RE", ["HTTPServer", " don't", " WE'RE"]),
        ("aB", ["a", "B"]),
        ("12345", ["123", "45"]),
        ("x?!\n\ny", ["x", "?!\n\n", "y"]),
        ("a  \n b", ["a", "  \n", " b"]),
        ("a   b", ["a", "  ", " b"]),
        ("end  ", ["end", "  "]),
    ],
)
def test_k3_split(tmp_path, text, pieces):
    # With every wanted piece one token, the tokens show where the text was split.
    units = [bytes([b]) for b in range(256)]
    for size in range(2, 20):
        units += sorted({t[i : i + size] for t in [text.encode()] for i in range(len(t) - size + 1)} - set(units))
    tokenizer = load_tokenizer(write_ranks(tmp_path / "all", units))
    assert [units[i].decode() for i in tokenizer.encode(text)] == pieces


def test_k3_long_texts_are_cut_first():
    assert list(k3_parts("")) == []
    assert [len(p) for p in k3_parts("a" * 60_000)] == [25_000, 25_000, 10_000]
    assert [len(p) for p in k3_parts("ab " * 20 + " " * 25_001 + "b" * 25_001)] == [60 + 24_999, 2 + 25_000, 1]
    assert [len(p) for p in k3_parts("word " * 170_000)] == [400_000, 400_000, 50_000]
    # The count of a run starts anew with each part of 400,000.
    assert [len(p) for p in k3_parts("b " * 195_000 + "a" * 35_000)] == [400_000, 25_000]
    text = "a" * 30_000 + "  b" * 150_000 + "\n" * 30_000
    assert "".join(k3_parts(text)) == text


def test_k3_cut_stops_merges(k3):
    ids = k3.encode("a" * 25_001)
    assert k3.decode(ids) == "a" * 25_001
    assert ids[-1] == ord("a") and len(ids) == 25_000 // 4 + 1


def test_k3_batch_equals_single(k3):
    texts = [SAMPLE, "", "in the thing"]
    assert [i.tolist() for i in k3.encode_batch(texts)] == [k3.encode(t).tolist() for t in texts]
    assert k3.decode(k3.encode(SAMPLE)) == SAMPLE


def test_rank_file_is_read_anew(tmp_path):
    singles = [bytes([b]) for b in range(256)]
    path = write_ranks(tmp_path / "x", singles)
    assert isinstance(load_tokenizer(path), K3Tokenizer)
    write_ranks(tmp_path / "x", [*singles, b"ab"])
    assert load_tokenizer(path).encode("ab").tolist() == [256]


def test_json_encodes_whole_plain_text(json_path):
    tokenizer = load_tokenizer(str(json_path))
    size = tokenizers.Tokenizer.from_file(str(json_path)).get_vocab_size()
    assert (tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id, tokenizer.pad_id) == (size, 0, None, None)
    assert tokenizer.specials == {0: "<|endoftext|>", 1: "<|other|>"} and tokenizer.stop_ids == (0,)
    text = SAMPLE + "<|endoftext|><|other|>"
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32 and len(ids) > 4 and ids.min() > 1 and ids.max() < size
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([0, *tokenizer.encode("the"), 1, 10**6]) == "the"
    batch = tokenizer.encode_batch([text, "", "thin"])
    assert [i.tolist() for i in batch] == [ids.tolist(), [], tokenizer.encode("thin").tolist()]


def test_json_roles_from_the_config_beside_it(json_path):
    config = json_path.with_name("tokenizer_config.json")
    config.write_text(
        json.dumps({"eos_token": "<|other|>", "pad_token": {"content": "<|endoftext|>"}, "bos_token": None})
    )
    tokenizer = load_tokenizer(str(json_path))
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.bos_id) == (1, 0, None)
    config.write_text(json.dumps({"eos_token": "<gone>"}))
    with pytest.raises(ValueError, match="eos_token is '<gone>', which tokenizer.json does not have"):
        load_tokenizer(str(json_path))


def test_what_cannot_be_loaded_is_named(tmp_path):
    for name, content, said in [
        ("t.json", b'{"a": 1}', r"t\.json: no tokenizer\.json that can be loaded"),
        ("u.json", b"\xff", r"u\.json: no tokenizer\.json that can be loaded"),
        ("sp.model", b"\n\x0e\n\x05<unk>\x15\x00", r"sp\.model:2: no tiktoken rank file.*SentencePiece"),
        ("gap", b"YQ== 0\nYg== 2\n", "ranks must be 0 to 1"),
        ("few", b"YQ== 0\nYg== 1\n", "254 of the 256 single bytes have no rank, the first is 0x00"),
        ("none", b"", "256 of the 256 single bytes"),
    ]:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=said):
            load_tokenizer(str(tmp_path / name))
    with pytest.raises(ValueError, match="data.tokenizer='bytes': no such file; use 'byte', a tokenizer.json"):
        load_tokenizer("bytes")
    with pytest.raises(ValueError, match="not a file"):
        load_tokenizer(str(tmp_path))
