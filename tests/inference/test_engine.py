"""Prefill in any chunking and decode are the full forward; generation is deterministic and compiles little."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.config.schema import ModelConfig
from k3train.inference.engine import Engine, NonFiniteLogits, bucket
from k3train.inference.sample import Sampling
from k3train.ops import kda_chunk
from k3train.parallel.mesh import make_mesh
from tests.inference.conftest import random_weights
from tests.tolerances import assert_close

GREEDY = Sampling(0.0)
#: Lengths of the rows that share a batch; the engine of the tests works in pieces of 16 and caches of 64 tokens.
LENGTHS = (64, 37, 16, 1)


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(1).integers(0, 256, (len(LENGTHS), 64)).astype(np.int32)


@pytest.fixture(scope="module")
def full(micro, tokens):
    """Logits of one forward pass over whole rows, as in training."""
    return micro.engine.logits(micro.weights, tokens, np.ones_like(tokens))


def feed(micro, tokens, cuts):
    """Prefill with every row cut at `cuts`; rows that are over wait. Logits at the last token of every row."""
    sequences = micro.engine.start(len(LENGTHS), 64)
    for first, last in zip((0, *cuts), (*cuts, 64), strict=True):
        pieces = [row[min(first, n) : min(last, n)] for row, n in zip(tokens, LENGTHS, strict=True)]
        sequences = micro.engine.extend(micro.weights, sequences, pieces)
    assert sequences.lengths.tolist() == list(LENGTHS)
    return micro.engine.next_logits(micro.weights, sequences)


@pytest.mark.parametrize("cuts", [(), (1,), (63,), (16, 32, 48), (3, 5, 22, 23, 55), (17, 34, 51)])
def test_prefill_in_any_chunking_is_the_full_forward(micro, tokens, full, cuts):
    got = feed(micro, tokens, cuts)
    for row, length in enumerate(LENGTHS):
        assert_close(got[row], full[row, length - 1], "decode", f"row of {length} tokens, cuts {cuts}")


def test_decode_step_by_step_is_the_full_forward(micro, tokens, full):
    """Token by token from the first on, and after a prefill whose rows have different lengths."""
    sequences, stepped = micro.engine.start(len(LENGTHS), 64), []
    for position in range(64):
        sequences = micro.engine.extend(micro.weights, sequences, tokens[:, position : position + 1])
        stepped.append(micro.engine.next_logits(micro.weights, sequences))
    assert_close(np.stack(stepped, 1), full, "decode")

    ahead = [40, 7, 1, 30]
    sequences = micro.engine.start(len(LENGTHS), 64)
    sequences = micro.engine.extend(micro.weights, sequences, [r[:n] for r, n in zip(tokens, ahead, strict=True)])
    for step in range(20):
        added = [row[n + step : n + step + 1] for row, n in zip(tokens, ahead, strict=True)]
        sequences = micro.engine.extend(micro.weights, sequences, added)
        wanted = np.stack([full[row, n + step] for row, n in enumerate(ahead)])
        assert_close(micro.engine.next_logits(micro.weights, sequences), wanted, "decode", f"step {step}")


def test_prefill_in_chunks_of_kda_is_the_recurrence(monkeypatch):
    """Heads this small are done token by token on a CPU; here pieces go through the chunked form, with a state to start
    from and padding at their end."""
    config = ModelConfig(
        vocab_size=64, hidden_size=32, num_layers=1, kda_layers=(0,), mla_layers=(), dense_layers=(0,), moe_layers=(),
        intermediate_size=32, kda_num_heads=2, kda_head_dim=16, kda_gate_rank=8, kda_chunk_size=16, attn_res="none",
    )  # fmt: skip
    recurrent, chunked = (Engine(config, make_mesh({}, jax.devices()[:1]), chunk=32) for _ in range(2))
    weights = random_weights(recurrent)
    row = np.random.default_rng(4).integers(0, 64, (1, 64)).astype(np.int32)
    wanted = recurrent.logits(weights, row, np.ones_like(row))
    monkeypatch.setattr(kda_chunk, "CPU_RECURRENCE_STATE", 0)
    for cuts in ((32,), (5, 26, 50)):
        sequences = chunked.start(1, 64)
        for first, last in zip((0, *cuts), (*cuts, 64), strict=True):
            sequences = chunked.extend(weights, sequences, [row[0, first:last]])
        assert_close(chunked.next_logits(weights, sequences), wanted[:, -1], "decode", f"cuts {cuts}")


def test_the_first_logits_of_a_full_forward_do_not_depend_on_what_follows(micro, tokens, full):
    """Rows and lengths that fill no bucket, padding in a row, two documents in a row."""
    short = micro.engine.logits(micro.weights, tokens[:3, :41], np.ones((3, 41), np.int32))
    assert short.shape == (3, 41, 264)
    assert_close(short, full[:3, :41], "same model")
    rows, segment_ids = np.zeros((4, 60), np.int32), np.zeros((4, 60), np.int32)
    rows[2, :20], rows[2, 25:60] = tokens[0, :20], tokens[1, :35]
    segment_ids[2, :20], segment_ids[2, 25:60] = 1, 2
    packed = micro.engine.logits(micro.weights, rows, segment_ids)[2]
    assert_close(packed[:20], full[0, :20], "same model")
    assert_close(packed[25:60], full[1, :35], "same model")


def test_a_row_that_is_fed_nothing_does_not_move(micro, tokens):
    """Stopped rows are fed padding: caches and hidden state stay as they are, to the last bit."""
    sequences = micro.engine.start(4, 64)
    sequences = micro.engine.extend(micro.weights, sequences, [row[:9] for row in tokens])
    before = jax.tree.map(np.array, sequences.state)  # the arrays themselves are consumed
    sequences = micro.engine.extend(micro.weights, sequences, [[], tokens[1, 9:12], [], tokens[3, 9:10]])
    after = sequences.state
    moved = jax.tree.map(lambda a, b: np.flatnonzero(np.any(a != b, axis=(0, *range(2, a.ndim)))), before, after)
    for rows in jax.tree.leaves(moved.cache.layers):
        assert rows.tolist() == [1, 3]
    assert np.flatnonzero(np.any(before.hidden != after.hidden, axis=1)).tolist() == [1, 3]
    assert after.cache.length.tolist() == [9, 12, 9, 10] == sequences.lengths.tolist()


def greedy_by_full_forward(micro, prompt, count):
    ids = list(prompt)
    for _ in range(count):
        row = np.zeros((4, 64), np.int32)  # causal: what stands behind does not matter
        row[:, : len(ids)] = ids
        ids.append(int(micro.engine.logits(micro.weights, row, np.ones_like(row))[0, len(ids) - 1].argmax()))
    return ids[len(prompt) :]


def test_greedy_generation_is_the_argmax_of_full_forwards(micro, tokens):
    """Also where the last token fills the cache to its last place."""
    prompts = [tokens[0, :52], tokens[1, :3]]
    got = micro.engine.generate(micro.weights, [*prompts, [5], [6, 7]], 12, GREEDY)
    assert got[:2] == [greedy_by_full_forward(micro, prompt, 12) for prompt in prompts]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(1.0, 0.9, seed=3)], ids=["greedy", "drawn"])
def test_generation_is_deterministic_and_a_row_knows_no_neighbours(micro, tokens, sampling):
    def generate(*prompts):
        return micro.engine.generate(micro.weights, prompts, 12, sampling)

    a, b, c = tokens[0, :20], tokens[1, :33], tokens[2, :2]
    first = generate(a, b, c)
    assert [len(row) for row in first] == [12, 12, 12]
    assert generate(a, b, c) == first
    assert generate(a, c, a)[0] == first[0]
    assert generate(c, b, a, a)[1] == first[1]


def test_seeds_and_rows_differ(micro, tokens):
    prompts = [tokens[0, :20]] * 3
    one, two = (micro.engine.generate(micro.weights, prompts, 12, Sampling(1.0, seed=seed)) for seed in (1, 2))
    assert one != two
    assert len(set(map(tuple, one))) == 3, "rows of one prompt draw for themselves"


def test_stop_tokens_end_a_row_and_not_its_neighbours(micro, tokens):
    prompts = [tokens[0, :20], tokens[1, :33], tokens[2, :2]]
    free = micro.engine.generate(micro.weights, prompts, 12, Sampling(1.0, seed=9))
    stops = [free[0][4], free[1][0]]
    got = micro.engine.generate(micro.weights, prompts, 12, Sampling(1.0, seed=9), stops)
    for row, whole in zip(got, free, strict=True):
        end = next((i for i, token in enumerate(whole) if token in stops), 12)
        assert row == whole[:end]
    assert got[1] == [] and len(got[0]) <= 4
    everything = range(264)
    assert micro.engine.generate(micro.weights, prompts, 12, GREEDY, everything) == [[], [], []]


def test_generation_changes_neither_weights_nor_bias(micro, tokens):
    before = jax.tree.map(np.array, micro.weights)
    micro.engine.generate(micro.weights, [tokens[0, :20]] * 3, 12, Sampling(1.0))
    jax.tree.map(np.testing.assert_array_equal, before, micro.weights)


def spoiled(micro, token):
    """Weights whose embedding of one token is not a number."""
    table = micro.weights.params["embed"]["table"].at[token].set(jnp.nan)
    return micro.weights._replace(params={**micro.weights.params, "embed": {"table": table}})


def test_logits_that_are_not_finite_are_refused_by_row_and_position(micro, tokens):
    prompts = [tokens[0, :20] % 200, tokens[1, :33] % 200, [201, 202, 203]]
    with pytest.raises(NonFiniteLogits, match="row 2 at position 3 "):
        micro.engine.generate(spoiled(micro, 202), prompts, 12, GREEDY)
    clean = micro.engine.generate(micro.weights, prompts, 12, GREEDY)
    met = [(step, row) for step in range(11) for row in range(3) if clean[row][step] >= 204]
    step, row = met[0]  # the first token that no prompt holds; drawing it is fine, the next one is not
    with pytest.raises(NonFiniteLogits, match=f"row {row} at position {len(prompts[row]) + step + 1} "):
        micro.engine.generate(spoiled(micro, clean[row][step]), prompts, 12, GREEDY)


def test_on_a_training_mesh_it_is_the_same(micro, tokens):
    """Three prompts on 2 x 2 x 2: rows are padded to the mesh, weights stay sharded."""
    prompts = [tokens[0, :20], tokens[1, :33], tokens[2, :2]]
    engine = Engine(micro.config, make_mesh({"data": 2, "expert": 2, "tensor": 2}), chunk=32)
    weights = micro.on(engine)
    sequences = engine.extend(weights, engine.start(3, 64), prompts)
    alone = micro.engine.extend(micro.weights, micro.engine.start(3, 64), prompts)
    wanted = micro.engine.next_logits(micro.weights, alone)
    assert_close(engine.next_logits(weights, sequences), wanted, "decode")
    for sampling in (GREEDY, Sampling(1.0, 0.95, seed=4)):
        wanted = micro.engine.generate(micro.weights, prompts, 4, sampling)
        assert engine.generate(weights, prompts, 4, sampling) == wanted


def test_the_number_of_compiled_programs_is_bounded():
    """Many lengths, row counts and settings: buckets of each are compiled, once."""
    config = ModelConfig(
        vocab_size=50, hidden_size=8, num_layers=1, kda_layers=(), mla_layers=(0,), dense_layers=(0,), moe_layers=(),
        intermediate_size=8, mla_num_heads=1, mla_q_lora_rank=0, mla_kv_lora_rank=8, mla_qk_nope_head_dim=8,
        mla_qk_rope_head_dim=0, mla_v_head_dim=8, attn_res="none",
    )  # fmt: skip
    engine = Engine(config, make_mesh({}, jax.devices()[:1]), chunk=32)
    weights = jax.tree.map(lambda x: np.full(x.shape, 0.1, x.dtype), engine.abstract_weights())
    for length in (*range(1, 60, 4), 100, 124):
        prompt = np.arange(length) % 50
        for rows in (3, 4):
            engine.generate(weights, [prompt] * rows, 4, Sampling(length / 50, 1 / length, length), [length % 50])
            engine.logits(weights, np.tile(prompt, (rows, 1)).astype(np.int32), np.ones((rows, length), np.int32))
    assert engine.num_programs == len(set(engine.programs))
    compiled = {kind: {tuple(shape) for k, *shape in engine.programs if k == kind} for kind, *_ in engine.programs}
    lengths, capacities = (1, 16, 32), (64, 128)
    assert compiled.pop("extend") <= {(4, n, c) for n in lengths for c in capacities}
    assert compiled == {
        "logits": {(4, n) for n in (16, 32, 64, 128)},
        "start": {(4, c) for c in capacities},
        "decode": {(4, c) for c in capacities},
    }


def test_buckets():
    assert [bucket(n) for n in (0, 1, 2, 3, 4, 5, 513)] == [1, 1, 2, 4, 4, 8, 1024]
    assert [bucket(n, 6) for n in (1, 6, 7, 13)] == [6, 6, 12, 24]
