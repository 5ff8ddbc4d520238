"""Bounds of the plan (report App. E) for any loads, and that dealing pairs out meets it exactly."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3train.ops.expert_plan import deal, pairs_of_ranks, plan_ranks

SIZES = [(896, ranks) for ranks in (2, 7, 8, 32, 64)] + [(8, 4), (4, 4), (6, 1)]


@partial(jax.jit, static_argnums=1)
def planned(load_E, num_ranks):
    plan = plan_ranks(load_E, num_ranks)
    return plan, pairs_of_ranks(load_E, plan)


@jax.jit
def dealt(ids_RN, counts_RE, allotted_ER):
    return jax.vmap(deal, in_axes=(0, None, None, 0))(ids_RN, counts_RE, allotted_ER, jnp.arange(len(ids_RN)))


@st.composite
def loads(draw):
    """Even, skewed and sparse loads; some experts or whole ranks get nothing, some nearly everything."""
    experts, ranks = draw(st.sampled_from(SIZES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    load_E = rng.poisson(draw(st.sampled_from([0.1, 3.0, 500.0])), experts)
    load_E = load_E * np.round(np.exp(draw(st.sampled_from([0.0, 1.0, 4.0])) * rng.standard_normal(experts)))
    load_E[rng.random(experts) < draw(st.sampled_from([0.0, 0.5, 0.95]))] = 0
    if draw(st.booleans()):
        load_E.reshape(ranks, -1)[rng.integers(ranks)] = draw(st.sampled_from([0, 5000]))
    return np.minimum(load_E, 1e6).astype(np.int32), ranks  # their sum is an int32 too


def check(load_E, ranks):
    plan, allotted_ER = jax.tree.map(np.asarray, planned(load_E, ranks))
    total, per_rank = load_E.sum(), len(load_E) // ranks
    assert (allotted_ER >= 0).all()
    np.testing.assert_array_equal(allotted_ER.sum(axis=1), load_E)
    shares = total // ranks + (np.arange(ranks) < total % ranks)
    np.testing.assert_array_equal(allotted_ER.sum(axis=0), shares)
    home_E = np.arange(len(load_E)) // per_rank
    for rank in range(ranks):
        foreign = np.flatnonzero((allotted_ER[:, rank] > 0) & (home_E != rank))
        assert len(foreign) <= per_rank
        assert set(home_E[foreign]) <= {plan.donor_R[rank]}
    return allotted_ER


@given(loads())
@settings(max_examples=120, deadline=None)
def test_balance_and_bound(case):
    check(*case)


@pytest.mark.parametrize(("experts", "ranks", "needed"), [(8, 4, 2), (896, 32, 28)])
def test_tight_case(experts, ranks, needed):
    """A rank whose experts get nothing, the rest even: no plan needs fewer foreign experts (docs/k3.md section 9)."""
    load_E = np.full(experts, 32 * ranks, np.int32)
    load_E[: experts // ranks] = 0
    allotted_ER = check(load_E, ranks)
    assert (allotted_ER[experts // ranks :, 0] > 0).sum() == needed == -(-experts * (ranks - 1) // ranks**2)


def test_even_loads_move_nothing():
    plan, _ = planned(np.full(896, 7, np.int32), 64)
    np.testing.assert_array_equal(plan.donor_R, np.arange(64))
    assert not plan.moved_RJ.any()


def test_few_experts_are_moved():
    """The donor's largest experts go first: one of 40 pairs rather than four of 10."""
    plan, _ = planned(np.array([10, 10, 40, 20, 0, 0, 0, 0], np.int32), 2)
    np.testing.assert_array_equal(plan.moved_RJ, [[0, 0, 0, 0], [0, 0, 40, 0]])


@pytest.mark.parametrize(("experts", "ranks", "pairs"), [(8, 4, 40), (896, 32, 256), (6, 1, 7)])
@pytest.mark.parametrize("padding", [0.0, 0.3])
def test_dealing_meets_the_plan(experts, ranks, pairs, padding):
    rng = np.random.default_rng(0)
    ids_RN = np.minimum(rng.integers(0, experts, (ranks, pairs)), rng.integers(0, experts, (ranks, pairs)))
    ids_RN[rng.random(ids_RN.shape) < padding] = experts
    counts_RE = np.stack([np.bincount(ids, minlength=experts + 1)[:experts] for ids in ids_RN]).astype(np.int32)
    allotted_ER = check(counts_RE.sum(axis=0), ranks)
    rank_RN = dealt(ids_RN, counts_RE, allotted_ER)
    dealt_ER = np.zeros((experts + 1, ranks + 1), int)
    np.add.at(dealt_ER, (ids_RN, np.asarray(rank_RN)), 1)
    np.testing.assert_array_equal(dealt_ER[:experts, :ranks], allotted_ER)
    assert dealt_ER[experts, :ranks].sum() == dealt_ER[:experts, ranks].sum() == 0


def test_dealing_spreads_over_sources():
    """One expert with all the pairs of eight ranks: every rank's share comes from every rank."""
    ranks, pairs = 8, 64
    counts_RE = np.zeros((ranks, ranks), np.int32)
    counts_RE[:, 3] = pairs
    allotted_ER = check(counts_RE.sum(axis=0), ranks)
    rank_RN = np.asarray(dealt(np.full((ranks, pairs), 3, np.int32), counts_RE, allotted_ER))
    sent_RR = (rank_RN[..., None] == np.arange(ranks)).sum(axis=1)
    np.testing.assert_array_equal(sent_RR, pairs // ranks)
