"""Muon transforms: golden trajectories, batches of matrices, shardings, and use in other people's chains."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from k3train.optim import MatrixView, muon, per_head, per_head_muon, scale_by_muon
from k3train.parallel.mesh import make_mesh, use_mesh
from tests.tolerances import assert_close

DATA = Path(__file__).parents[1] / "data/muon"
PLAIN = MatrixView((0,), (1,))


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def trajectory(tx, start, grads):
    """[steps, ...] parameters after each step."""

    def step(carry, grad):
        params, state = carry
        updates, state = tx.update({"w": grad}, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params["w"]

    params = {"w": jnp.asarray(start)}
    return jax.jit(lambda g: jax.lax.scan(step, (params, tx.init(params)), g)[1])(jnp.asarray(grads))


@pytest.mark.parametrize("shape", ["tall", "wide", "square"])
def test_trajectory_matches_golden(shape):
    golden = np.load(DATA / f"traj_{shape}.npz", allow_pickle=False)
    wanted = {
        (nesterov, f"f64 nesterov={nesterov}"): golden[f"f64__nesterov{int(nesterov)}__match_rms_adamw__params"]
        for nesterov in (False, True)
    }
    wanted[False, "optax"] = golden["optax__nesterov0__match_rms_adamw__params"]  # the same definition without Nesterov
    for (nesterov, name), params in wanted.items():
        got = trajectory(muon(0.02, {"w": PLAIN}, nesterov=nesterov), golden["w0"], golden["grads"])
        start = golden["w0"].astype(np.float64)
        assert_close(np.asarray(got, np.float64) - start, params - start, "update", f"{shape} {name}")


def test_per_head_trajectory_matches_golden():
    golden = np.load(DATA / "per_head.npz", allow_pickle=False)
    tx = per_head_muon(0.02, {"w": MatrixView((0,), (1, 2))}, {"w": 1})
    got = trajectory(tx, golden["traj__w0"], golden["traj__grads"])
    start = golden["traj__w0"].astype(np.float64)
    assert_close(np.asarray(got, np.float64) - start, golden["traj__nesterov1__params"] - start, "update")


def test_scale_is_of_the_head_block():
    """d_model 96, 6 heads of 16: the block is 96 x 16, and for a wide projection the whole matrix differs."""
    golden = np.load(DATA / "per_head.npz", allow_pickle=False)
    tx = scale_by_muon({"w": MatrixView((0,), (2,))})
    grads = {"w": jnp.asarray(golden["q__momentum"])}
    got, _ = tx.update(grads, tx.init(grads))
    assert_close(got["w"], golden["q__update_ns5_simple"], "op")  # the first Nesterov direction is that of g

    wide = {"w": normal(0, 8, 6, 4)}
    for view, sides in ((MatrixView((0,), (2,)), (8, 4)), (MatrixView((0,), (1, 2)), (8, 24))):
        tx = scale_by_muon({"w": view}, coefficients=((1.5, -0.5, 0.0),) * 30)  # converges: all singular values 1
        got, _ = jax.jit(tx.update)(wide, tx.init(wide))
        rms = float(jnp.sqrt(jnp.mean(got["w"] ** 2)))
        wanted = 0.2 * np.sqrt(max(sides)) * np.sqrt(min(sides) / np.prod(sides))  # 0.2 by construction
        np.testing.assert_allclose(rms, wanted, rtol=1e-5)


def test_stacked_layers_and_experts_equal_separate_leaves():
    """Layers, experts and heads of one leaf step like leaves of their own, whatever their batch."""
    stacked = {"q": normal(1, 2, 16, 3, 6), "w": normal(2, 2, 3, 8, 12)}
    views = {"q": MatrixView((1,), (3,)), "w": MatrixView((3,), (2,))}
    separate = {
        **{f"q{n}{h}": stacked["q"][n, :, h] for n in range(2) for h in range(3)},
        **{f"w{n}{e}": stacked["w"][n, e] for n in range(2) for e in range(3)},
    }
    separate_views = {name: PLAIN if name[0] == "q" else MatrixView((1,), (0,)) for name in separate}

    def step(grads, views):
        tx = muon(0.1, views)

        return jax.jit(lambda grads: tx.update(grads, tx.init(grads), grads)[0])(grads)

    got, wanted = step(stacked, views), step(separate, separate_views)
    for name, update in wanted.items():
        n, i = int(name[1]), int(name[2])
        assert_close(got["q"][n, :, i] if name[0] == "q" else got["w"][n, i], update, "op", name)


def test_several_axes_make_one_matrix():
    grads = {"o": normal(2, 2, 4, 3, 10)}  # layers, heads, head_dim, embed
    flat = {"o": grads["o"].reshape(2, 12, 10)}
    update = lambda view, grads: scale_by_muon({"o": view}).update(grads, scale_by_muon({"o": view}).init(grads))[0]  # noqa: E731
    got = update(MatrixView((1, 2), (3,)), grads)["o"]
    assert_close(got.reshape(2, 12, 10), update(MatrixView((1,), (2,)), flat)["o"], "op")


SHARDED = {
    "q": ((4, 16, 8, 6), MatrixView((1,), (3,)), (None, "data", "tensor", None)),
    "o": ((4, 8, 6, 16), MatrixView((1, 2), (3,)), (None, "tensor", None, "data")),
    "up": ((4, 4, 16, 12), MatrixView((2,), (3,)), (None, "expert", "data", "tensor")),
    "down": ((3, 4, 12, 16), MatrixView((2,), (3,)), (None, "expert", "tensor", "data")),
    "whole": ((16, 24), PLAIN, ("data", "tensor")),
    "few": ((3, 16, 24), MatrixView((1,), (2,)), (None, ("data", "expert"), "tensor")),
    "square": ((5, 16, 16), MatrixView((1,), (2,)), (None, "tensor", "data")),
    "table": ((24, 16), None, ("tensor", "data")),
}


@functools.cache
def sharded_case():
    """(parameters, a function of a transform to its update, the update on one device)."""
    params = {name: normal(3, *shape) for name, (shape, _, _) in SHARDED.items()}

    def step(tx):
        return lambda params: tx.update(jax.tree.map(jnp.sin, params), tx.init(params), params)[0]

    return params, step, jax.jit(step(muon(0.1, {name: case[1] for name, case in SHARDED.items()})))(params)


@pytest.mark.parametrize(
    ("sizes", "spread"),
    [
        ({"data": 8}, True),
        ({"data": 2, "expert": 2, "tensor": 2}, True),
        ({"data": 2, "expert": 2, "tensor": 2}, False),
    ],
    ids=["fsdp", "2x2x2", "2x2x2 left to the compiler"],
)
def test_sharded_equals_unsharded(sizes, spread):
    """FSDP, heads and inner widths over tensor, experts; the compiler left alone, or told to spread the matrices."""
    params, step, wanted = sharded_case()
    mesh = make_mesh(sizes)
    specs = {name: PartitionSpec(*axes) for name, (_, _, axes) in SHARDED.items()}
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    tx = muon(0.1, {name: view for name, (_, view, _) in SHARDED.items()}, specs=specs if spread else None)
    with use_mesh(mesh):
        run = jax.jit(step(tx), in_shardings=(shardings,), out_shardings=shardings)
        got = run(jax.device_put(params, shardings))
    for name, update in got.items():
        assert update.sharding == shardings[name]
        assert_close(update, wanted[name], "mesh update", f"{name} on {sizes}")


def test_zero_gradients_only_decay():
    params = {"w": normal(4, 2, 6, 4), "gain": jnp.ones(6), "table": jnp.ones((5, 4))}
    views = {"w": MatrixView((1,), (2,)), "gain": None, "table": None}
    tx = muon(0.5, views, weight_decay=0.1, decay={"w": True, "gain": False, "table": True})
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    np.testing.assert_array_equal(updates["w"], np.float32(-0.5) * (np.float32(0.1) * params["w"]))
    np.testing.assert_array_equal(updates["table"], np.full((5, 4), np.float32(-0.5) * np.float32(0.1)))
    np.testing.assert_array_equal(updates["gain"], np.zeros(6))
    # by default matrices decay and nothing else does
    tx = muon(0.5, views)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    assert (updates["w"] != 0).all() and (updates["table"] == 0).all() and (updates["gain"] == 0).all()


def test_unused_expert_next_to_a_used_one():
    grads = {"w": normal(5, 4, 6, 8).at[1].set(0)}
    tx = scale_by_muon({"w": MatrixView((1,), (2,))})
    updates, _ = tx.update(grads, tx.init(grads))
    assert (updates["w"][1] == 0).all()
    assert jnp.isfinite(updates["w"]).all() and (jnp.abs(updates["w"]).sum((1, 2)) > 0).sum() == 3


def test_frozen_leaves_have_no_state_and_do_not_move():
    params = {"w": jnp.ones((3, 4)), "still": jnp.ones(4)}
    tx = muon(0.1, {"w": PLAIN, "still": None}, frozen={"w": False, "still": True})
    state = tx.init(params)
    assert not [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (4,)]
    updates, _ = tx.update({"w": params["w"], "still": jnp.full(4, jnp.nan)}, state, params)
    np.testing.assert_array_equal(updates["still"], np.zeros(4))


def test_adamw_for_leaves_without_view():
    params = {"w": jnp.ones((3, 4)), "b": jnp.asarray([1.0, -2.0, 3.0])}
    grads = {"w": jnp.ones((3, 4)), "b": jnp.asarray([0.1, 0.2, -0.3])}
    mine = muon(0.1, {"w": PLAIN, "b": None}, weight_decay=0.2, decay={"w": True, "b": True})
    other = optax.adamw(0.1, b1=0.9, b2=0.95, eps=1e-8, weight_decay=0.2)
    state, other_state = mine.init(params), other.init(params["b"])
    for _ in range(3):
        updates, state = mine.update(grads, state, params)
        wanted, other_state = other.update(grads["b"], other_state, params["b"])
        np.testing.assert_array_equal(updates["b"], wanted)


def test_low_precision_gradients_keep_float32_state():
    params = {"w": jnp.ones((4, 6), jnp.bfloat16), "b": jnp.ones(6, jnp.bfloat16)}
    tx = muon(0.1, {"w": PLAIN, "b": None})
    grads = jax.tree.map(lambda p: normal(6, *p.shape).astype(jnp.bfloat16), params)
    state = tx.init(params)
    for _ in range(2):
        updates, state = tx.update(grads, state, params)
    assert state[1].momentum["w"].dtype == jnp.float32
    assert state[2].inner_state.mu["b"].dtype == jnp.float32
    exact = np.asarray(grads["w"], np.float32)
    np.testing.assert_array_equal(state[1].momentum["w"], np.float32(0.95) * exact + exact)


def test_inside_partition_and_masked():
    """An outer transform hides leaves; the views still belong to the whole tree."""
    params = {"w": normal(7, 4, 6), "b": jnp.ones(6)}
    views = {"w": PLAIN, "b": None}
    grads = jax.tree.map(jnp.cos, params)
    alone = muon(0.1, views)
    wanted = alone.update(grads, alone.init(params), params)[0]["w"]
    split = optax.partition({"muon": muon(0.1, views), "sgd": optax.sgd(1.0)}, {"w": "muon", "b": "sgd"})
    got = split.update(grads, split.init(params), params)[0]
    np.testing.assert_array_equal(got["w"], wanted)
    np.testing.assert_array_equal(got["b"], -grads["b"])


def test_with_flax_nnx():
    model = nnx.Linear(4, 8, rngs=nnx.Rngs(0))
    before = model.kernel[...], model.bias[...]
    tx = muon(0.1, lambda params: jax.tree.map(lambda p: PLAIN if p.ndim == 2 else None, params), weight_decay=0.0)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.update(model, nnx.grad(lambda model: model(jnp.ones((2, 4))).sum())(model))
    moved = before[0] - model.kernel[...]  # gradient of rank one: singular value 1 becomes about 0.7
    assert_close(moved, jnp.full((4, 8), moved[0, 0]), "op")
    assert 0.1 * 0.2 * 8**0.5 * 0.6 < float(jnp.linalg.norm(moved)) < 0.1 * 0.2 * 8**0.5 * 1.2
    assert_close(before[1] - model.bias[...], jnp.full(8, 0.1), "op")


def test_views_from_a_function_and_per_head():
    params = {"q": jnp.ones((8, 2, 4)), "o": jnp.ones((2, 4, 8)), "b": jnp.ones(8)}
    whole = {"q": MatrixView((0,), (1, 2)), "o": MatrixView((0, 1), (2,)), "b": None}
    split = per_head(whole, {"q": 1, "o": None, "b": None})
    assert split == {"q": MatrixView((0,), (2,)), "o": MatrixView((0, 1), (2,)), "b": None}
    grads = jax.tree.map(lambda p: normal(8, *p.shape), params)
    results = [tx.update(grads, tx.init(params), params)[0] for tx in (muon(0.1, whole), muon(0.1, lambda _: whole))]
    jax.tree.map(np.testing.assert_array_equal, *results)


@pytest.mark.parametrize("view", [MatrixView((0,), (2,)), MatrixView((0,), (0,)), MatrixView((), (1,))])
def test_views_that_do_not_fit_are_refused(view):
    with pytest.raises(ValueError, match=r"does not fit a leaf of shape \(3, 4\)"):
        scale_by_muon({"w": view}).init({"w": jnp.ones((3, 4))})
