from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.ops.quantile import exact_bias, expert_loads, histogram, load_metrics, margins, quantile_bias, sign_bias
from k3train.ops.routing import route
from tests.tolerances import assert_close

DATA = Path(__file__).parents[1] / "data" / "qb"
BINS = 1000


def golden_logits(golden, batch=0):
    return jnp.asarray(golden[f"x{batch}"] @ golden["router_w"].T + golden["router_offset"])


def margins_of(routes, valid=None):
    valid = jnp.ones(routes.cutoff_P.shape, bool) if valid is None else valid
    return margins(routes.scores_PE, routes.cutoff_P, valid)


@jax.jit
def count(logits_PE, bias_E):
    """Margins, loads and histogram of one step with k = 16."""
    routes = route(logits_PE, bias_E, num_selected=16)
    valid_P = jnp.ones(logits_PE.shape[0], bool)
    found = margins_of(routes)
    loads = expert_loads(routes.ids_PK, valid_P, num_experts=logits_PE.shape[1])
    return found, loads, histogram(found, bias_E, num_bins=BINS)


def test_figure_of_the_report():
    golden = np.load(DATA / "figure5.npz")
    scores = jnp.asarray(golden["s"], jnp.float32)
    logits, bias = jnp.log(scores) - jnp.log1p(-scores), jnp.asarray(golden["b0"], jnp.float32)
    valid = jnp.ones(8, bool)
    before = route(logits, bias, num_selected=1)
    np.testing.assert_array_equal(expert_loads(before.ids_PK, valid, num_experts=4), golden["loads_before"])
    exact = exact_bias(margins_of(before), bias, num_selected=1)
    assert_close(exact, golden["b1"], "router bias")
    after = route(logits, exact, num_selected=1)
    np.testing.assert_array_equal(expert_loads(after.ids_PK, valid, num_experts=4), golden["loads_after"])
    counts = histogram(margins_of(before), bias, num_bins=BINS)
    assert_close(quantile_bias(counts, bias, num_selected=1), golden["hist1000__b1"], "router bias")


@pytest.mark.parametrize("name", ["large_m4096", "large_m4480"])
def test_golden_updates(name):
    """q = 73.14 and q = 80; exact and histogram, five updates on one batch, each from the golden bias before it."""
    golden = np.load(DATA / f"{name}.npz")
    logits = golden_logits(golden)
    for method in ("desc_floor", "hist1000"):
        bias = jnp.zeros(896)
        for t in range(5):
            found, loads, counts = count(logits, bias)
            wanted_loads = golden[f"fixed_batch__{method}__loads"][t]
            assert np.abs(np.asarray(loads) - wanted_loads).max() <= (3 if t else 0)
            assert (counts.sum(-1) == len(logits)).all()
            wanted = golden[f"fixed_batch__{method}__b"][t]
            if method == "desc_floor":
                exact = exact_bias(found, bias, num_selected=16)
                assert_close(exact, wanted, "router bias", f"{name} update {t + 1}")
            else:
                _assert_histogram_bias(quantile_bias(counts, bias, num_selected=16), wanted, counts, bias)
            bias = jnp.asarray(wanted, jnp.float32)


def _assert_histogram_bias(got, wanted, counts, bias):
    """Equal to 1e-6 but for experts of which a margin lies within rounding of a bin border; those stay in their bin."""
    error = np.abs(np.asarray(got, np.float64) - wanted)
    width = float(bias.max() - bias.min() + 2.0) / counts.shape[1]
    assert (error > 1e-6).mean() < 0.02, np.sort(error)[-30:]
    assert error.max() < width


def test_counts_equal_the_golden_counts():
    golden = np.load(DATA / "large_m4096.npz")
    counts = count(golden_logits(golden), jnp.zeros(896))[2]
    wanted = golden["hist1000__counts_iter0"].astype(np.int64)
    moved = np.abs(np.asarray(counts, np.int64) - wanted).sum() / 2  # float32 against float64 at the bin borders
    assert moved < 1e-4 * wanted.sum()
    from_golden = quantile_bias(jnp.asarray(wanted, jnp.int32), jnp.zeros(896), num_selected=16)
    bhat = golden["hist1000__bhat_iter0"]
    assert_close(from_golden, bhat - bhat.mean(), "router bias")


def skewed(tokens=512, experts=64, seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(tokens, experts)) + rng.normal(size=experts)
    return jnp.asarray(logits, jnp.float32)


def test_counts_do_not_depend_on_the_split():
    logits = skewed()
    bias = jnp.asarray(np.random.default_rng(1).normal(size=64) * 0.05, jnp.float32)
    valid = jnp.arange(512) % 7 != 0

    def counts_of(part):
        routes = route(logits[part], bias, num_selected=4)
        return histogram(margins_of(routes, valid[part]), bias, num_bins=200)

    whole = counts_of(slice(0, 512))
    parts = sum(counts_of(slice(i, i + 64)) for i in range(0, 512, 64))
    np.testing.assert_array_equal(whole, parts)
    np.testing.assert_array_equal(whole.sum(-1), np.full(64, int(valid.sum())))


def test_bias_is_within_a_bin_of_the_order_statistic_and_centred():
    logits, bias = skewed(tokens=640), jnp.zeros(64)  # q = 40, an integer
    routes = route(logits, bias, num_selected=4)
    counts = histogram(margins_of(routes), bias, num_bins=BINS)
    got = quantile_bias(counts, bias, num_selected=4)
    # appendix D finds the ceil(q)-th largest margin, one before that of Algorithm 1
    bhat = np.sort(np.asarray(routes.cutoff_P[:, None] - routes.scores_PE), axis=0)[39]
    assert np.abs((np.asarray(got) + bhat.mean()) - bhat).max() < 2 * 2.0 / BINS
    assert abs(float(got.mean())) < 1e-6
    # a constant added to the bias moves margins and range alike; only rounding at the bin borders remains
    moved = histogram(margins_of(routes) + 0.25, bias + 0.25, num_bins=BINS)
    error = np.abs(quantile_bias(moved, bias + 0.25, num_selected=4) - got)
    assert np.median(error) < 1e-4 and error.max() < 2.0 / BINS


def test_repeated_updates_balance_a_skewed_router():
    logits, bias = skewed(tokens=4096, experts=64), jnp.zeros(64)
    valid = jnp.ones(4096, bool)

    @jax.jit
    def step(bias):
        routes = route(logits, bias, num_selected=4)
        counts = histogram(margins_of(routes), bias, num_bins=BINS)
        metrics = load_metrics(expert_loads(routes.ids_PK, valid, num_experts=64))
        return quantile_bias(counts, bias, num_selected=4), metrics["max_over_mean"]

    history = []
    for _ in range(8):
        bias, worst = step(bias)
        history.append(float(worst))
    assert history[0] > 5.0 and history[-1] < 1.1, history


def test_empty_step_and_full_choice_keep_the_bias():
    bias = jnp.asarray([0.3, -0.1, -0.2, 0.0])
    empty = jnp.zeros((4, 50), jnp.int32)
    np.testing.assert_array_equal(quantile_bias(empty, bias, num_selected=2), bias)
    np.testing.assert_array_equal(quantile_bias(empty.at[:, 3].set(9), bias, num_selected=4), bias)
    np.testing.assert_array_equal(exact_bias(jnp.full((7, 4), jnp.inf), bias, num_selected=2), bias)
    np.testing.assert_array_equal(exact_bias(jnp.ones((7, 4)), bias, num_selected=4), bias)
    np.testing.assert_array_equal(sign_bias(jnp.zeros(4, jnp.int32), bias, step=0.1), bias)


def test_padding_and_broken_tokens_are_not_counted():
    logits = skewed(tokens=32).at[5].set(jnp.nan).at[6, 3].set(jnp.nan)
    routes = route(logits, jnp.zeros(64), num_selected=4)
    valid = jnp.arange(32) < 20
    found = margins_of(routes, valid)
    counts = histogram(found, jnp.zeros(64), num_bins=50)
    np.testing.assert_array_equal(counts.sum(-1), np.full(64, 18))
    counted = found[np.asarray(valid) & ~np.isin(np.arange(32), [5, 6])]
    for got in (found, found.reshape(4, 8, 64)):  # q = 18 * 4 / 64, the second smallest
        assert_close(
            exact_bias(got, jnp.zeros(64), num_selected=4), exact_bias(counted, jnp.zeros(64), num_selected=4), "op"
        )
    loads = expert_loads(routes.ids_PK, valid, num_experts=64)
    assert int(loads.sum()) == 20 * 4


def test_stacks_over_layers():
    logits, bias = jnp.stack([skewed(seed=s) for s in range(3)]), jnp.zeros((3, 64))
    valid = jnp.ones((3, 512), bool)
    routes = jax.vmap(lambda x, b: route(x, b, num_selected=4))(logits, bias)
    found = margins_of(routes, valid)
    counts = jax.vmap(lambda *a: histogram(*a, num_bins=100))(found, bias)
    got = jax.vmap(lambda c, b: quantile_bias(c, b, num_selected=4))(counts, bias)
    for i in range(3):
        np.testing.assert_array_equal(counts[i], histogram(found[i], bias[i], num_bins=100))
        assert_close(got[i], quantile_bias(counts[i], bias[i], num_selected=4), "router bias")


def test_large_token_counts_do_not_overflow():
    """200 million tokens: tokens x K is past int32."""
    counts = jnp.zeros((32, 10), jnp.int32).at[:, 2].set(150_000_000).at[:, 7].set(50_000_000)
    got = quantile_bias(counts.at[0].set(counts[0, ::-1]), jnp.zeros(32), num_selected=16)
    # q is 100 million: two thirds through bin 2, or (row 0: 50 million in bin 2, 150 in bin 7) a third through bin 7
    bhat = np.full(32, -1.0 + (2 + 2 / 3) * 0.2)
    bhat[0] = -1.0 + (7 + 1 / 3) * 0.2
    assert_close(got, bhat - bhat.mean(), "router bias")


def test_load_metrics():
    metrics = load_metrics(jnp.asarray([[4, 2, 2, 0], [2, 2, 2, 2]]))
    np.testing.assert_allclose(metrics["max_over_mean"], [2.0, 1.0])
    np.testing.assert_allclose(metrics["max_violation"], [1.0, 0.0])
    np.testing.assert_allclose(metrics["min_over_mean"], [0.0, 1.0])


def test_sign_rule_against_the_golden_file():
    """Five updates on one batch, each from the golden bias before it."""
    golden, sign = np.load(DATA / "large_m4096.npz"), np.load(DATA / "sign_m4096.npz")
    logits, step = golden_logits(golden), float(sign["sign__gamma"])
    bias = jnp.zeros(896)
    for t in range(5):
        _, loads, _ = count(logits, bias)
        assert np.abs(np.asarray(loads) - sign["sign__fixed_batch__loads"][t]).max() <= (3 if t else 0)
        wanted = sign["sign__fixed_batch__b"][t]
        differs = np.abs(np.asarray(sign_bias(loads, bias, step=step)) - wanted) > 1e-6
        mean = np.abs(sign["sign__fixed_batch__loads"][t] - 4096 * 16 / 896)
        assert not (differs & (mean > 3)).any()  # but for loads within rounding of the mean
        bias = jnp.asarray(wanted, jnp.float32)
    worst = float(load_metrics(count(logits, bias)[1])["max_violation"])
    np.testing.assert_allclose(worst, sign["sign__fixed_batch__maxvio_201"][5], rtol=0.01)


def test_exact_bias_of_padded_tokens_is_that_of_the_others():
    """Also for a count that the experts do not divide: q = 100 * 4 / 64 = 6.25 takes the seventh."""
    routes = route(skewed(tokens=130), jnp.zeros(64), num_selected=4)
    valid = jnp.arange(130) % 13 < 10
    found = margins_of(routes, valid)
    bhat = np.sort(np.asarray(found)[np.asarray(valid)], axis=0)[6]
    assert_close(exact_bias(found, jnp.zeros(64), num_selected=4), bhat - bhat.mean(), "router bias")
