"""Batches: same order whoever reads, exact position, every document once an epoch, every held-out row once."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest

from k3train.config.schema import DataConfig
from k3train.data.loader import baselines, make_eval_loader, make_train_loader, read_corpora
from k3train.data.pack import ROW_DTYPES, build_corpus


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """40 short documents, about 2,000 bytes, rows of 16 in batches of 4."""
    folder = tmp_path_factory.mktemp("documents")
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(f"<{i}>" + f"{i:02}é" * (1 + 7 * i % 31))
    return DataConfig(
        source="text", path=str(folder), seq_len=16, batch_size=4, eval_fraction=0.2, eval_batches=0, shuffle=True
    )


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


def take(loader, count):
    return [next(loader) for _ in range(count)]


def joined(batches):
    return {k: np.concatenate([b[k] for b in batches]) for k in batches[0]}


def test_batch_layout(config):
    batch = next(make_train_loader(config, seed=0))
    assert {k: (v.shape, v.dtype) for k, v in batch.items()} == {
        k: ((4, 16), np.dtype(d)) for k, d in ROW_DTYPES.items()
    }


def test_same_seed_same_batches_other_seed_other_batches(config):
    first, again, other = (take(make_train_loader(config, seed=s), 30) for s in (3, 3, 4))
    assert all(same(a, b) for a, b in zip(first, again, strict=True))
    assert not any(same(a, b) for a, b in zip(first, other, strict=True))
    loader = make_train_loader(config, seed=3)
    assert same(loader[17], first[17]) and loader.next_batch == 0


@pytest.mark.parametrize("stop", [1, 5, 60])
def test_resume_equals_uninterrupted(config, stop):
    whole = take(make_train_loader(config, seed=1), stop + 12)
    loader = make_train_loader(config, seed=1)
    before = take(loader, stop)
    state = json.loads(json.dumps(loader.get_state()))
    loader = make_train_loader(config, seed=1)
    loader.set_state(state)
    assert loader.get_state() == state
    after = take(loader, 12)
    assert all(same(a, b) for a, b in zip(whole, before + after, strict=True))


def test_every_document_once_per_epoch_in_a_new_order(config):
    loader = make_train_loader(config, seed=0)
    rows, corpus = loader.rows, loader.corpora.train
    assert rows.rows_per_epoch % config.batch_size, "an epoch should end inside a batch here"
    stream = joined(take(loader, 3 * rows.rows_per_epoch // config.batch_size + 1))
    orders = []
    for epoch in range(3):
        part = {k: v[epoch * rows.rows_per_epoch : (epoch + 1) * rows.rows_per_epoch] for k, v in stream.items()}
        real = part["segment_ids"] > 0
        assert np.array_equal(np.sort(part["tokens"][real]), np.sort(corpus.tokens))
        sources = [rows.sources(epoch * rows.rows_per_epoch + r) for r in range(rows.rows_per_epoch)]
        pieces = sorted((name, first, count) for row in sources for name, first, count in row)
        covered = {name: 0 for name in corpus.names}
        for name, first, count in pieces:
            assert covered[name] == first
            covered[name] += count
        assert list(covered.values()) == np.diff(corpus.offsets).tolist()
        orders.append(str(sources))
    assert len(set(orders)) == 3
    assert loader.epoch == pytest.approx(3, abs=0.1)


@pytest.mark.parametrize("processes", [2, 4])
def test_process_shares_make_the_same_global_batch(config, processes):
    corpora = read_corpora(config)
    one = take(make_train_loader(config, 0, corpora=corpora), 40)
    loaders = [make_train_loader(config, 0, i, processes, corpora=corpora) for i in range(processes)]
    for expected in one:
        assert same(joined([next(loader) for loader in loaders]), expected)
    assert len({json.dumps(loader.get_state()) for loader in loaders}) == 1
    shares = [list(make_eval_loader(config, i, processes, corpora=corpora)) for i in range(processes)]
    for whole, *parts in zip(make_eval_loader(config, corpora=corpora), *shares, strict=True):
        assert same(joined(parts), whole)


def test_resume_with_another_number_of_processes(config):
    whole = take(make_train_loader(config, seed=0), 20)
    loader = make_train_loader(config, 0, 1, 2)
    take(loader, 9)
    later = [make_train_loader(config, 0, i, 4) for i in range(4)]
    for part in later:
        part.set_state(loader.get_state())
    for expected in whole[9:]:
        assert same(joined([next(part) for part in later]), expected)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seq_len": 8}, "seq_len was 16, is 8"),
        ({"batch_size": 8}, "batch_size was 4, is 8"),
        ({"shuffle": False}, "shuffle was True, is False"),
        ({"eval_fraction": 0.5}, "documents was .*content was"),
    ],
)
def test_a_position_in_other_data_is_refused(config, change, said):
    state = make_train_loader(config, seed=0).get_state()
    with pytest.raises(ValueError, match=f"saved for other data: .*{said}"):
        make_train_loader(replace(config, **change), seed=0).set_state(state)
    with pytest.raises(ValueError, match="seed was 0, is 1"):
        make_train_loader(config, seed=1).set_state(state)


def test_edited_text_of_the_same_length_is_noticed(config, tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text("x" * 50)
    here = replace(config, path=str(tmp_path))
    state = make_train_loader(here, seed=0).get_state()
    for name in ("a", "b", "c"):
        (tmp_path / name).write_text("x" * 49 + "y")
    with pytest.raises(ValueError, match="content was '"):
        make_train_loader(here, seed=0).set_state(state)


@pytest.mark.parametrize("batch_size", [1, 4, 1000])
def test_every_held_out_token_once_for_any_batch_size(config, batch_size):
    loader = make_eval_loader(replace(config, batch_size=batch_size))
    heldout = loader.corpora.heldout
    assert len(list(loader)) == len(loader) == math.ceil(loader.rows.rows_per_epoch / batch_size)
    batch = joined(list(loader))
    real = batch["segment_ids"] > 0
    assert np.array_equal(np.sort(batch["tokens"][real]), np.sort(heldout.tokens))
    assert batch["loss_mask"].sum() == len(heldout.tokens) - len(heldout)
    padding = {k: v[~real] for k, v in batch.items()}
    assert np.all(padding.pop("tokens") == loader.tokenizer.pad_id)
    assert not any(v.any() for v in padding.values())


def test_eval_can_be_limited_and_does_not_depend_on_the_run(config):
    limited = make_eval_loader(replace(config, eval_batches=2, shuffle=False))
    everything = make_eval_loader(config)
    assert len(limited) == 2 < len(everything)
    assert all(same(a, b) for a, b in zip(limited, everything, strict=False))
    assert all(same(a, b) for a, b in zip(everything, everything, strict=True))


def test_split_is_by_whole_documents_and_disjoint(config):
    corpora = read_corpora(config)
    assert corpora.heldout is not None
    train, heldout = set(corpora.train.names), set(corpora.heldout.names)
    assert not train & heldout and len(train | heldout) == 40 and heldout


def test_nothing_held_out(config):
    everything = replace(config, eval_fraction=0.0)
    assert len(make_train_loader(everything, seed=0).corpora.train) == 40
    with pytest.raises(ValueError, match="holds nothing out"):
        make_eval_loader(everything)


def test_unshuffled_data_comes_in_order(config):
    loader = make_train_loader(replace(config, shuffle=False), seed=0)
    tokens = joined(take(loader, 5))["tokens"].ravel()
    assert np.array_equal(tokens, loader.corpora.train.tokens[: len(tokens)])


def test_shares_must_divide_the_batch(config):
    with pytest.raises(ValueError, match=r"data.batch_size=4: expected a positive multiple of 3 process\(es\)"):
        make_train_loader(config, 0, 0, 3)
    with pytest.raises(ValueError, match="process_index=2: expected 0 to 1"):
        make_train_loader(config, 0, 2, 2)


def test_skipped_records_are_counted(tmp_path):
    good = [json.dumps({"text": f"document {i}"}) for i in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join([good[0], "{broken", *good[1:], "[]"]))
    stop = DataConfig(source="jsonl", path=str(tmp_path / "a.jsonl"))
    with pytest.raises(ValueError, match=r"a\.jsonl:2: no valid JSON"):
        read_corpora(stop)
    corpora = read_corpora(replace(stop, on_bad_line="skip"))
    assert len(corpora.train) + len(corpora.heldout or ()) == 20
    assert len(corpora.notes) == 1 and corpora.notes[0].startswith("skipped 2 of 22 records; first: ")
    assert "a.jsonl:2" in corpora.notes[0]
    (tmp_path / "b.jsonl").write_text("{broken\n[]\n")
    with pytest.raises(ValueError, match=r"no usable document; first fault: .*b\.jsonl:1"):
        read_corpora(DataConfig(source="jsonl", path=str(tmp_path / "b.jsonl"), on_bad_line="skip"))


def test_baselines_count_pairs_inside_documents():
    # a -> b always, b -> c always; c ends each document, so nothing is predicted after it.
    corpus = build_corpus(["x", "y"], [np.array([0, 1, 2]), np.array([0, 1, 2])], eos_id=None)
    found = baselines(corpus, 3)
    assert found == {"unigram": pytest.approx(math.log(2)), "bigram": pytest.approx(0, abs=1e-12)}
    assert baselines(corpus, 2000) == {}
    assert baselines(build_corpus(["x"], [np.array([1])], eos_id=None), 3) == {}


def test_baselines_of_random_tokens(monkeypatch):
    monkeypatch.setattr("k3train.data.loader._COUNT_BLOCK", 1000)
    tokens = np.random.default_rng(0).integers(0, 4, 20_001)
    corpus = build_corpus(["x", "y"], [tokens[:7000], tokens[7000:]], eos_id=None)
    found = baselines(corpus, 4)
    pairs = np.zeros((4, 4))
    for part in (tokens[:7000], tokens[7000:]):
        np.add.at(pairs, (part[:-1], part[1:]), 1)
    p = pairs / pairs.sum()
    expected = -(p * np.log(p / p.sum(axis=1, keepdims=True))).sum()
    assert found["bigram"] == pytest.approx(expected, abs=1e-12)
    assert found["unigram"] == pytest.approx(math.log(4), abs=1e-3)


def test_standard_library_baselines():
    corpora = read_corpora(DataConfig())
    found = baselines(corpora.train, corpora.tokenizer.vocab_size)
    assert 3.1 < found["unigram"] < 3.4 and 2.3 < found["bigram"] < 2.6
    assert corpora.heldout is not None and len(corpora.heldout) >= 5
