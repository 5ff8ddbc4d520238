"""The training step: accumulation changes nothing but memory, bad steps never happened, the bias balances."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.core.tree import leaves
from k3train.parallel.mesh import make_mesh
from k3train.train.step import Program
from tests.tolerances import assert_close
from tests.train import micro


def program(sizes=None, **changes):
    sizes = sizes or {}
    config = micro.config(mesh=sizes, **changes)
    return Program(config, make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values()) or [1]))]))


@pytest.fixture(scope="module")
def whole():
    return program()


@pytest.fixture(scope="module")
def one_step(whole):
    """State and metrics after one step on one device, whole batch at once."""
    return jax.device_get(whole.train_step(whole.init(), whole.put_batch(micro.batch())))


def test_accumulation_on_a_mesh_changes_nothing(one_step):
    parts = program({"data": 2, "expert": 4}, micro_batches=2)
    state, metrics = jax.device_get(parts.train_step(parts.init(), parts.put_batch(micro.batch())))
    wanted_state, wanted = one_step
    assert_close(metrics["loss"], wanted["loss"], "mesh loss")
    assert_close(metrics["grad_norm"], wanted["grad_norm"], "op")
    for name in ("tokens", "router/max_over_mean_load", "router/dropped_fraction", "learning_rate"):
        assert metrics[name] == wanted[name], name
    assert metrics["router/dropped_fraction"] == 0
    for (path, got), (_, want) in zip(leaves(state.bias), leaves(wanted_state.bias), strict=True):
        np.testing.assert_array_equal(got, want, err_msg=path)


def test_a_non_finite_step_is_as_if_it_had_not_happened(whole):
    before = jax.device_get(whole.init())
    spoiled = whole.init()
    embedding = spoiled.params["embed"]["table"]
    spoiled.params["embed"]["table"] = embedding.at[micro.batch()["tokens"][0, 0]].set(jnp.nan)
    kept = jax.device_get(spoiled)
    state, metrics = jax.device_get(whole.train_step(spoiled, whole.put_batch(micro.batch())))
    for part in ("params", "opt_state", "bias"):
        jax.tree.map(np.testing.assert_array_equal, getattr(state, part), getattr(kept, part))
    assert (state.step, state.nonfinite, state.nonfinite_streak) == (before.step + 1, 1, 1)
    assert metrics["nonfinite_steps"] == 1 and not np.isfinite(metrics["loss"])


@pytest.mark.parametrize("weight", [np.nan, 3e38], ids=["nan", "overflow"])
def test_a_skipped_step_leaves_no_trace_in_those_after_it(whole, weight):
    """Bad, good, bad, bad, good ends where good, good does, to the last bit: weights, moments, schedule, bias."""
    good = [whole.put_batch(micro.batch(seed)) for seed in (0, 1)]
    rows = micro.batch(2)
    bad = whole.put_batch(rows | {"loss_mask": np.where(rows["loss_mask"] > 0, weight, 0).astype(np.float32)})
    wanted, state = whole.init(), whole.init()
    expected = []
    for batch in good:
        wanted, metrics = whole.train_step(wanted, batch)
        expected.append(jax.device_get(metrics))
    seen, streaks, clipped = [], [], []
    for batch in (bad, good[0], bad, bad, good[1]):
        state, metrics = whole.train_step(state, batch)
        seen.append(jax.device_get(metrics))
        streaks.append(int(metrics["nonfinite_streak"]))
        clipped.append(int(metrics["qk_clip/num_clipped"]))
    assert streaks == [1, 0, 1, 2, 0] and clipped[0] == clipped[2] == 0
    for part in ("params", "opt_state", "bias"):
        jax.tree.map(np.testing.assert_array_equal, getattr(state, part), getattr(wanted, part))
    assert (state.step, state.nonfinite, wanted.step, wanted.nonfinite) == (5, 3, 2, 0)
    for got, want in zip((seen[1], seen[4]), expected, strict=True):
        assert got["loss"] == want["loss"] and got["learning_rate"] == want["learning_rate"]
    assert seen[0]["learning_rate"] == expected[0]["learning_rate"]  # of the update that was not made


def test_the_router_bias_balances_one_batch(whole):
    state, batch = whole.init(), whole.put_batch(micro.batch(1))
    loads = []
    for _ in range(4):
        params = jax.tree.map(jnp.copy, state.params)
        state, metrics = whole.train_step(state, batch)
        state = state._replace(params=params)  # only the bias moves
        loads.append(float(metrics["router/max_over_mean_load"]))
    assert loads[0] > 1.3 and max(loads[2:]) < 1.15, loads
    for path, bias in leaves(jax.device_get(state.bias)):
        assert bias.dtype == np.float32 and abs(bias.mean(-1)).max() < 1e-6, path


def test_evaluation_and_abstract_state(whole, one_step):
    state = whole.init()
    held_out = jax.device_get(whole.eval_step(state.params, state.bias, whole.put_batch(micro.batch())))
    assert_close(held_out["loss_sum"] / held_out["tokens"], one_step[1]["loss"], "mesh loss")
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), whole.abstract_state)
    assert shapes == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert all(x.dtype in (np.float32, np.int32) for x in jax.tree.leaves(state))
