"""Drawing: greedy, temperature, nucleus, seeds, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.inference.sample import NONFINITE, Sampling, draw, nucleus

_draw = jax.jit(draw)


def drawn(logits, temperature=1.0, top_p=1.0, seed=0, count=0):
    scalars = np.uint32(seed), np.int32(count), np.float32(temperature), np.float32(top_p)
    return np.asarray(_draw(jnp.asarray(logits, jnp.float32), *scalars))


def rows(row, count=4096):
    return np.tile(np.asarray(row, np.float32), (count, 1))


def test_greedy_takes_the_first_of_the_likeliest():
    assert drawn([[0.0, 3.0, 3.0, 1.0], [5.0, 0.0, 0.0, 4.9]], temperature=0).tolist() == [1, 0]


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-8])
def test_a_tiny_temperature_is_greedy(temperature):
    assert set(drawn(rows([0.0, 1.0, 30000.0, -30000.0]), temperature)) == {2}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_softmax_at_the_temperature(temperature):
    logits = np.array([0.0, 1.0, 2.0, -1.0])
    wanted = np.exp(logits / temperature) / np.exp(logits / temperature).sum()
    found = np.bincount(drawn(rows(logits), temperature), minlength=4) / 4096
    assert np.abs(found - wanted).max() < 4 * np.sqrt(0.25 / 4096)


def nucleus_by_hand(probs, top_p):
    kept, total = set(), 0.0
    for token in sorted(range(len(probs)), key=lambda i: -probs[i]):
        if kept and total >= top_p:
            break
        kept.add(token)
        total += probs[token]
    return kept


@pytest.mark.parametrize("top_p", [1e-38, 0.3, 0.5, 0.72, 0.9, 0.999, 1.0])
def test_nucleus_is_the_smallest_set_that_reaches_top_p(top_p):
    logits = np.random.default_rng(3).normal(size=(8, 50)) * 2
    mask = np.asarray(nucleus(jnp.asarray(logits, jnp.float32), top_p))
    for row, kept in zip(logits, mask, strict=True):
        assert set(np.flatnonzero(kept)) == nucleus_by_hand(np.exp(row) / np.exp(row).sum(), top_p)


def test_nucleus_edges():
    assert nucleus(jnp.zeros((1, 5)), 0.1).all(), "equally likely tokens stay together"
    one = jnp.array([[0.0, 1000.0, 0.0]])
    assert np.asarray(nucleus(one, 0.999)).tolist() == [[False, True, False]]
    assert nucleus(one, 1.0).all(), "1 drops nothing, not even probabilities that are zero in float32"
    wide = jnp.asarray(np.random.default_rng(0).normal(size=(1, 20_000)), jnp.float32)
    assert nucleus(wide, 1.0).all()


def test_draws_stay_inside_the_nucleus():
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    assert set(drawn(rows(logits), top_p=0.6)) == {0, 1}
    assert set(drawn(rows(logits), top_p=0.4)) == {0}
    assert set(drawn(rows(logits), top_p=1e-40)) == {0}
    assert set(drawn(rows(logits))) == {0, 1, 2, 3}


def test_seed_row_and_count_make_the_draw():
    logits = rows(np.zeros(1000), 6)
    first = drawn(logits, seed=5)
    assert drawn(logits, seed=5).tolist() == first.tolist()
    assert len(set(first)) > 1, "rows draw for themselves"
    assert drawn(logits[:2], seed=5).tolist() == first[:2].tolist(), "whatever stands below"
    assert drawn(logits, seed=6).tolist() != first.tolist()
    assert drawn(logits, seed=5, count=1).tolist() != first.tolist()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_marked_and_its_neighbours_are_not(bad, temperature):
    logits = np.zeros((3, 7))
    logits[:, 2] = 100.0
    logits[1, 6] = bad
    assert drawn(logits, temperature).tolist() == [2, NONFINITE, 2]


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.01}, "top_p=1.01"),
        ({"top_p": float("nan")}, "top_p=nan"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**32}, f"seed={2**32}"),
    ],
)
def test_values_out_of_range_are_refused(values, words):
    with pytest.raises(ValueError, match=words):
        Sampling(**values)
