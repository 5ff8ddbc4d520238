import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.ops.routing import route
from tests.tolerances import assert_close


def naive(logits_PE, bias_E, k):
    """Token by token in float64: the k best of score + bias, lower index first among equals."""
    scores = 1.0 / (1.0 + np.exp(-np.asarray(logits_PE, np.float64)))
    biased = scores.astype(np.float32) + np.asarray(bias_E, np.float32)
    order = np.argsort(-biased, axis=-1, kind="stable")
    ids = order[:, :k]
    chosen = np.take_along_axis(scores, ids, 1)
    return ids, chosen / (chosen.sum(-1, keepdims=True) + 1e-20), np.sort(biased, -1)[:, ::-1]


def inputs(tokens=64, experts=896, seed=0):
    rng = np.random.default_rng(seed)
    logits, bias = rng.normal(size=(tokens, experts)), 0.1 * rng.normal(size=experts)
    return jnp.asarray(logits, jnp.float32), jnp.asarray(bias, jnp.float32)


@pytest.mark.parametrize(("experts", "k"), [(896, 16), (16, 4), (4, 1)])
def test_choice_weights_and_cutoff(experts, k):
    logits, bias = inputs(experts=experts)
    got = jax.jit(lambda x, b: route(x, b, num_selected=k))(logits, bias)
    ids, weights, ranked = naive(logits, bias, k)
    assert got.ids_PK.dtype == jnp.int32
    np.testing.assert_array_equal(np.sort(got.ids_PK, -1), np.sort(ids, -1))
    assert_close(np.sort(got.weights_PK, -1), np.sort(weights, -1), "op")
    assert_close(got.cutoff_P, ranked[:, k], "op")
    assert_close(got.weights_PK.sum(-1), np.ones(len(logits)), "op")


def test_winners_at_the_highest_indices():
    logits, _ = inputs(tokens=8)
    logits = logits.at[:, -16:].add(20.0)
    got = route(logits, jnp.zeros(896), num_selected=16)
    np.testing.assert_array_equal(np.sort(got.ids_PK, -1), np.tile(np.arange(880, 896), (8, 1)))


def test_equal_scores_go_to_the_lowest_index():
    got = route(jnp.zeros((3, 896)), jnp.zeros(896), num_selected=16)
    np.testing.assert_array_equal(got.ids_PK, np.tile(np.arange(16), (3, 1)))
    np.testing.assert_array_equal(got.cutoff_P, np.full(3, 0.5))


def test_every_expert_chosen():
    logits, bias = inputs(tokens=5, experts=6)
    got = route(logits, bias, num_selected=6)
    np.testing.assert_array_equal(np.sort(got.ids_PK, -1), np.tile(np.arange(6), (5, 1)))
    np.testing.assert_array_equal(got.cutoff_P, (got.scores_PE + bias).min(-1))


def test_bias_selects_and_does_nothing_else():
    logits, _ = inputs(tokens=16, experts=32)

    def weights(logits, bias):
        return jnp.sum(jnp.sin(jnp.arange(4.0)) * route(logits, bias, num_selected=4).weights_PK)

    bias = jnp.zeros(32).at[7].set(5.0)
    got = route(logits, bias, num_selected=4)
    assert (got.ids_PK == 7).any(-1).all()
    chosen = np.take_along_axis(np.asarray(got.scores_PE), np.asarray(got.ids_PK), 1)
    assert_close(got.weights_PK, chosen / chosen.sum(-1, keepdims=True), "op")
    np.testing.assert_array_equal(route(logits, bias + 0.25, num_selected=4).ids_PK, got.ids_PK)
    assert not np.asarray(jax.grad(weights, 1)(logits, bias)).any()
    # the gradient of the logits is that of the chosen scores alone
    ids = got.ids_PK

    def by_hand(logits):
        s = jnp.take_along_axis(jax.nn.sigmoid(logits), ids, 1)
        return jnp.sum(jnp.sin(jnp.arange(4.0)) * s / s.sum(-1, keepdims=True))

    assert_close(jax.grad(weights)(logits, bias), jax.grad(by_hand)(logits), "op gradient")


def test_scaling_and_no_renormalisation():
    logits, bias = inputs(tokens=4, experts=32)
    scaled = route(logits, bias, num_selected=4, scaling_factor=2.446)
    assert_close(scaled.weights_PK.sum(-1), np.full(4, 2.446), "op")
    plain = route(logits, bias, num_selected=4, renormalize=False)
    np.testing.assert_array_equal(plain.weights_PK, np.take_along_axis(plain.scores_PE, plain.ids_PK, 1))
    tiny = route(logits - 30.0, bias, num_selected=4)  # scores around 1e-13
    assert_close(tiny.weights_PK.sum(-1), np.ones(4), "op")


def test_a_token_with_nan_stays_alone():
    logits, bias = inputs(tokens=6)
    broken = logits.at[2].set(jnp.nan).at[4, 100].set(jnp.nan)
    got, clean = (route(x, bias, num_selected=16) for x in (broken, logits))
    for row in np.asarray(got.ids_PK):
        assert len(set(row)) == 16 and row.min() >= 0 and row.max() < 896
    others = np.asarray([0, 1, 3, 5])
    for a, b in zip(got, clean, strict=True):
        np.testing.assert_array_equal(np.asarray(a)[others], np.asarray(b)[others])
    assert np.isnan(got.weights_PK[2]).all() and np.isnan(got.weights_PK[4]).any()


def test_refusals():
    logits, bias = inputs(tokens=2, experts=8)
    with pytest.raises(ValueError, match="accepted: 1 to num_experts = 8"):
        route(logits, bias, num_selected=9)
    with pytest.raises(ValueError, match="float32"):
        route(logits.astype(jnp.bfloat16), bias, num_selected=2)
