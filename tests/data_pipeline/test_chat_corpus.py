"""Chat files to batches: whole conversations in rows, only answers trained, everything left out counted."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from k3train.config.load import load
from k3train.config.schema import DataConfig
from k3train.data.loader import baselines, make_eval_loader, make_train_loader, read_corpora
from k3train.data.pack import WholeRows

ROOT = Path(__file__).parents[2]


def chat(question, answer, **more):
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **more}]
    return {"messages": turns}


@pytest.fixture
def config(tmp_path):
    """40 conversations of 99 to 129 tokens in instruct mode; rows of 256 in batches of 4."""
    lines = [json.dumps(chat(f"What is {i}?", f"It is {i}" + "!" * (7 * i % 31))) for i in range(40)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines[:25]) + "\n")
    (tmp_path / "b.jsonl").write_text("\n".join(lines[25:]))
    return DataConfig(
        source="chat", path=str(tmp_path), chat_mode="instruct", seq_len=256, batch_size=4, eval_fraction=0.2
    )


def write(tmp_path, *records, **more):
    path = tmp_path / "data.jsonl"
    path.write_text("".join(record if isinstance(record, str) else json.dumps(record) + "\n" for record in records))
    style = {"chat_mode": "instruct", "eval_fraction": 0.0, "seq_len": 256, **more}
    return DataConfig(source="chat", path=str(path), **style)


def test_rows_hold_whole_conversations_and_train_answers_only(config):
    loader = make_train_loader(config, seed=0)
    corpus, rows, decode = loader.corpora.train, loader.rows, loader.tokenizer.decode
    assert isinstance(rows, WholeRows)
    seen = []
    for number in range(rows.rows_per_epoch):
        row, sources = rows[number], rows.sources(number)
        for segment, (name, first, count) in enumerate(sources, start=1):
            here = row["segment_ids"] == segment
            document = corpus.names.index(name)
            assert first == 0 and row["tokens"][here].tolist() == corpus.document(document).tolist()
            assert row["positions"][here].tolist() == list(range(count))
            trained = row["targets"][here & (row["loss_mask"] > 0)]
            begin = list(corpus.document(document)).index(258) + 1  # after the user's message
            body = corpus.document(document)[begin + len('<message role="assistant">') :]
            assert trained.tolist() == body.tolist() and trained[-1] == 258
            assert decode(trained).startswith("responseIt is ")
            seen.append(name)
        padding = row["segment_ids"] == 0
        assert not row["loss_mask"][padding].any() and np.all(row["tokens"][padding] == loader.tokenizer.pad_id)
        assert not row["targets"][row["loss_mask"] == 0].any()
    assert sorted(seen) == sorted(corpus.names)


def test_epochs_hosts_and_resume(config):
    """The order of rows changes by epoch; shares of hosts make the batch; a saved position continues it."""
    corpora = read_corpora(config)
    whole = make_train_loader(config, 1, corpora=corpora)
    count = whole.rows.rows_per_epoch
    orders = [[whole.rows.sources(epoch * count + n) for n in range(count)] for epoch in range(2)]
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    batches = [next(whole) for _ in range(12)]
    halves = [make_train_loader(config, 1, i, 2, corpora=corpora) for i in range(2)]
    for batch in batches[:5]:
        parts = [next(half) for half in halves]
        assert all(np.array_equal(np.concatenate([p[k] for p in parts]), batch[k]) for k in batch)
    later = make_train_loader(config, 1, corpora=corpora)
    later.set_state(json.loads(json.dumps(halves[0].get_state())))
    for batch in batches[5:]:
        got = next(later)
        assert all(np.array_equal(got[k], batch[k]) for k in batch)


def test_another_mask_is_other_data(tmp_path):
    """The same tokens with other loss are other data for a saved position."""
    two = {"messages": chat("Hi", "Yes")["messages"] + chat("Hi", "No")["messages"]}
    config = write(tmp_path, two, two, batch_size=1)
    state = make_train_loader(config, seed=0).get_state()
    with pytest.raises(ValueError, match="saved for other data: content was [^;]*$"):
        make_train_loader(replace(config, chat_loss="last"), seed=0).set_state(state)


def test_every_held_out_conversation_once(config):
    loader = make_eval_loader(replace(config, eval_batches=0))
    heldout = loader.corpora.heldout
    assert heldout is not None and heldout.trained is not None
    assert sum(batch["loss_mask"].sum() for batch in loader) == heldout.trained.sum() > 0


def test_held_out_files_of_their_own(config, tmp_path):
    path = str(tmp_path / "b.jsonl")
    corpora = read_corpora(replace(config, path=str(tmp_path / "a.jsonl"), eval_path=path, eval_fraction=0.02))
    assert corpora.heldout is not None
    assert (len(corpora.train), len(corpora.heldout)) == (25, 15)
    assert [note.startswith("held out: ") for note in corpora.notes] == [False, True]
    with pytest.raises(ValueError, match="data.eval_path='nowhere': no such file"):
        read_corpora(replace(config, eval_path="nowhere"))


def test_baselines_count_trained_targets_only(tmp_path):
    corpora = read_corpora(write(tmp_path, chat("ababab", "x"), chat("cdcdcd", "x")))
    found = baselines(corpora.train, 264)
    assert found["bigram"] < 1 and found == baselines(read_corpora(write(tmp_path, chat("z", "x"))).train, 264)


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        ("{broken\n", "no valid JSON"),
        ("[]\n", "expected a JSON object, found an array"),
        ('{"messages": [], "messages": []}\n', "an object has the name 'messages' twice"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"messages\[0\] has the role 'robot'"),
        (chat("Hi", "a\ud800"), "half a surrogate pair after 'a'"),
    ],
)
def test_a_bad_record_is_named_by_file_line_and_reason(tmp_path, bad, said):
    config = write(tmp_path, chat("Hi", "Yes"), "\n", bad, chat("Hi", "No"))
    with pytest.raises(ValueError, match=rf"{config.path}:3: .*{said}"):
        read_corpora(config)
    corpora = read_corpora(replace(config, on_bad_line="skip"))
    assert len(corpora.train) == 2 and corpora.train.names == ("data.jsonl:1", "data.jsonl:4")
    assert corpora.notes[-1].startswith("skipped 1 of 3 records; first: ") and "data.jsonl:3" in corpora.notes[-1]


def test_a_conversation_longer_than_a_row(tmp_path):
    long = chat("Hi", "x" * 300)
    config = write(tmp_path, chat("Hi", "Yes"), long, chat("x" * 300, "Yes"))
    with pytest.raises(
        ValueError, match=r"data.jsonl:2: 389 tokens, but a row has 256 \(data.seq_len\).*=skip"
    ) as stop:
        read_corpora(config)
    assert config.path in str(stop.value)

    skipped = read_corpora(replace(config, on_long="skip"))
    assert skipped.train.names == ("data.jsonl:1",)
    assert skipped.notes[0] == (
        f"conversations longer than a row of 256 tokens, left out: 2, 779 tokens (first: {config.path}:2)"
    )

    cut = read_corpora(replace(config, on_long="cut"))
    assert cut.train.names == ("data.jsonl:1", "data.jsonl:2")  # of the third, nothing that is trained fits
    assert len(cut.train.document(1)) == 256
    assert cut.notes[0] == f"conversations cut to a row of 256 tokens: 2, 267 tokens (first: {config.path}:2)"
    assert cut.notes[1] == f"conversations without a token to train, left out: 1 (first: {config.path}:3)"
    row = make_train_loader(replace(config, on_long="cut", shuffle=False), 0, corpora=cut).rows[1]
    assert row["loss_mask"].sum() == 256 - (33 + 26)  # all but the user's message and the opening tag


def test_what_is_left_out_or_changed_is_counted(tmp_path):
    call = {"function": {"name": "f", "arguments": "{x"}}
    config = write(
        tmp_path,
        {"messages": [{"role": "user", "content": "Hi"}], "id": 1},
        {**chat("Hi", "Yes", tool_calls=[call, call], reasoning_content="because"), "id": 2, "source": "x"},
    )
    notes = read_corpora(config).notes
    assert notes[0] == f"conversations without a token to train, left out: 1 (first: {config.path}:1)"
    assert notes[1].startswith("tool calls whose arguments are no JSON, shown as they are, without loss: 2 (")
    assert f"(first: {config.path}:2: messages[1].tool_calls[0]: arguments are no JSON: Expecting" in notes[1]
    assert notes[2].startswith("assistant turns whose reasoning instruct mode leaves out: 1 (first: ")
    assert notes[3] == "fields of the records that are passed over: id (2), source (1)"
    assert notes[4].endswith("%)") and len(notes) == 5
    only = write(tmp_path, {"messages": [{"role": "user", "content": "Hi"}]})
    with pytest.raises(ValueError, match="no usable document; conversations without a token to train, left out: 1"):
        read_corpora(only)


def test_special_token_text_of_a_user_stays_text(tmp_path):
    corpora = read_corpora(write(tmp_path, chat("<|end_of_msg|><eos>", "Yes")))
    ids = corpora.train.document(0)
    assert np.flatnonzero(ids == 258).size == 2 and not np.any(ids == 256)
    assert "<|end_of_msg|><eos>" in corpora.tokenizer.decode(ids)


def test_a_tokenizer_without_control_tokens_is_refused(tmp_path):
    import tokenizers

    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "t.json"))
    with pytest.raises(ValueError, match=r"data.tokenizer=t.json has no special token <\|open\|>"):
        read_corpora(write(tmp_path, chat("Hi", "Yes"), tokenizer=str(tmp_path / "t.json")))


def test_the_standard_library_asks_and_answers(tmp_path):
    """configs/tiny_sft.py: fits its rows, shows every channel; the script writes the same conversations."""
    config = load(str(ROOT / "configs" / "tiny_sft.py"))[0].data
    corpora = read_corpora(config)
    assert corpora.heldout is not None and corpora.train.trained is not None
    assert len(corpora.train) > 3000 and 100 < len(corpora.heldout) < 500
    assert 0.3 < corpora.train.trained.mean() < 0.6
    loader = make_train_loader(config, 0, corpora=corpora)
    assert len(corpora.train.tokens) > 0.9 * loader.rows.rows_per_epoch * config.seq_len

    def text(name):
        return corpora.tokenizer.decode(corpora.train.document(corpora.train.names.index(name)))

    every = [text(name) for name in corpora.train.names]
    assert all(any(part in t for t in every) for part in ("`textwrap.", 'call tool="look_up"', "A method of the modul"))
    script = [sys.executable, ROOT / "scripts" / "prepare_data.py", tmp_path]
    subprocess.run(script, check=True, cwd=ROOT, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    for file, side in (("train", corpora.train), ("heldout", corpora.heldout)):
        records = [json.loads(line) for line in (tmp_path / f"{file}.jsonl").open(encoding="utf-8")]
        assert tuple(record["id"] for record in records) == side.names
        found = read_corpora(write(tmp_path, records[0], chat_mode="thinking", chat_effort="none", seq_len=1024))
        assert found.train.tokens.tolist() == side.document(0).tolist()
