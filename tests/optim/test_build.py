"""From parameter metadata to the optimizer of a run: routes, table, decay, state and its shardings."""

import dataclasses
import doctest
import importlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from k3train.config.schema import OptimConfig
from k3train.core.param import AdamW, Clip, Frozen, Muon, ParamInfo
from k3train.core.tree import leaves, map_leaves
from k3train.optim import ClipView, MatrixView, build, groups
from k3train.parallel.mesh import make_mesh, use_mesh
from k3train.parallel.rules import param_shardings
from tests.tolerances import assert_close

PER_HEAD, WHOLE, SMALL = "[report 2.5]", "[lineage guess]", "[Moonlight]"


def info(axes, shape, route, clip=None):
    return ParamInfo(shape, tuple(axes.split()), route, "part", clip)


HEADS = Muon(("rank_in",), ("head_dim",), PER_HEAD)
INFOS = {
    "embed": info("vocab embed", (24, 16), AdamW(True, SMALL)),
    "layers": {
        "0": {
            "q": info("layers rank_in heads head_dim", (3, 16, 4, 6), HEADS, Clip("head_dim", ((4, 0.5), (2, 1.0)))),
            "k": info("layers rank_in heads head_dim", (3, 16, 4, 6), HEADS, Clip("head_dim", ((6, 0.5),))),
            "o": info("layers heads head_dim embed", (3, 4, 6, 16), Muon(("heads", "head_dim"), ("embed",), WHOLE)),
            "w1": info(
                "layers experts expert_in expert_mlp", (3, 4, 8, 12), Muon(("expert_in",), ("expert_mlp",), WHOLE)
            ),
            "w2": info(
                "layers experts expert_mlp expert_in", (3, 4, 12, 8), Muon(("expert_mlp",), ("expert_in",), WHOLE)
            ),
            "gain": info("layers norm", (3, 16), AdamW(False, SMALL)),
            "reader": info("layers norm", (3, 16), Frozen("unused")),
        }
    },
}
CONFIG = OptimConfig(peak_lr=0.5, final_lr=0.05, warmup_fraction=0.2, weight_decay=0.1)
MODULES = ("k3train.optim.muon", "k3train.optim.qk_clip")


def parameters():
    rng = np.random.default_rng(0)
    return map_leaves(lambda each: jnp.asarray(rng.normal(size=each.shape), jnp.float32), INFOS)


def max_logits(value):
    tree = map_leaves(lambda _: None, INFOS)
    tree["layers"]["0"] |= {"q": value, "k": value}
    return tree


def test_views_come_from_metadata():
    views, clips = groups.matrix_views(INFOS), groups.clip_views(INFOS)
    assert views["embed"] is None and views["layers"]["0"]["gain"] is None
    assert views["layers"]["0"]["q"] == MatrixView((1,), (3,))
    assert views["layers"]["0"]["o"] == MatrixView((1, 2), (3,))
    assert views["layers"]["0"]["w2"] == MatrixView((2,), (3,))
    assert clips["layers"]["0"]["q"] == ClipView(2, 3, ((4, 0.5), (2, 1.0)))
    assert [path for path, clip in leaves(clips) if clip is not None] == ["layers/0/k", "layers/0/q"]


def test_table_has_every_parameter():
    rows = {row.path: row for row in groups.table(CONFIG, INFOS)}
    assert list(rows) == [path for path, _ in leaves(INFOS)]
    q, o = rows["layers/0/q"], rows["layers/0/o"]
    assert (q.route, q.decay, q.source) == ("Muon rank_in x head_dim per layers, heads", 0.1, PER_HEAD)
    assert (o.route, o.decay, o.source) == ("Muon heads*head_dim x embed per layers", 0.1, WHOLE)
    np.testing.assert_allclose([q.scale, o.scale], [0.2 * 16**0.5, 0.2 * 24**0.5])  # of the head, of the whole matrix
    assert (rows["embed"].route, rows["embed"].scale, rows["embed"].decay) == ("AdamW", 1.0, 0.1)
    assert (rows["layers/0/gain"].route, rows["layers/0/gain"].decay) == ("AdamW", 0.0)
    assert (rows["layers/0/reader"].route, rows["layers/0/reader"].scale) == ("none", 0.0)
    text = groups.format_table(list(rows.values())).splitlines()
    assert len(text) == 1 + len(rows) and text[0].split() == ["parameter", "shape", "route", "scale", "decay", "source"]
    assert all(row.path in line and row.route in line for row, line in zip(rows.values(), text[1:], strict=True))


@pytest.mark.parametrize("bad", [dataclasses.replace(INFOS["embed"], route=None), None, "muon"])
def test_unlabelled_parameters_are_refused(bad):
    with pytest.raises(ValueError, match="without an optimizer route: layers/1/x"):
        build.build(CONFIG, {**INFOS, "layers": {"1": {"x": bad}}}, 10)


def test_zero_gradients_shrink_matrices_by_lr_times_decay():
    tx = build.build(CONFIG, INFOS, 10)
    params = parameters()
    state = tx.init(params)
    zero = jax.tree.map(jnp.zeros_like, params)
    step_once = jax.jit(tx.update)
    for step, lr in enumerate([0.25, 0.5]):
        updates, state = step_once(zero, state, params)
        assert build.learning_rate(CONFIG, 10, state) == np.float32(lr) == build.schedule(CONFIG, 10)(step)
        for path, got in leaves(updates):
            still = path in ("layers/0/gain", "layers/0/reader")
            weight = dict(leaves(params))[path]
            wanted = np.zeros(weight.shape) if still else np.float32(-lr) * (np.float32(0.1) * weight)
            np.testing.assert_array_equal(got, wanted, err_msg=path)
    assert build.num_clipped(state) == 0


def test_state_has_moments_of_its_route_only():
    params = parameters()
    state = build.build(CONFIG, INFOS, 10).init(params)
    sizes = {path: each.size for path, each in leaves(params)}
    muon = sum(sizes[f"layers/0/{name}"] for name in ("q", "k", "o", "w1", "w2"))
    adam = sizes["embed"] + sizes["layers/0/gain"]
    arrays = jax.tree.leaves(state)
    assert sum(x.size for x in arrays if x.ndim) == muon + 2 * adam
    assert {x.dtype for x in arrays if x.ndim} == {jnp.dtype("float32")}


def test_sharded_step_equals_one_device_and_keeps_shardings():
    """All routes, QK-clip and spreading over devices together; state placed as `state_shardings` says."""
    tx = build.build(CONFIG, INFOS, 10)
    params = parameters()
    logits = max_logits(jnp.full((3, 4), 40.0).at[1, 2].set(250.0).at[2, 3].set(101.0))

    def two_steps(params, state):
        for _ in range(2):
            updates, state = tx.update(jax.tree.map(jnp.sin, params), state, params, max_logits=logits)
            params = optax.apply_updates(params, updates)
        return params, state

    wanted, wanted_state = jax.jit(two_steps)(params, tx.init(params))
    assert build.num_clipped(wanted_state) == 2

    mesh = make_mesh({"data": 2, "expert": 2, "tensor": 2})
    everywhere = NamedSharding(mesh, PartitionSpec())
    shardings = param_shardings(INFOS, mesh)
    state_shardings = build.state_shardings(CONFIG, INFOS, jax.eval_shape(tx.init, params), shardings, everywhere)
    with use_mesh(mesh):
        run = jax.jit(two_steps, out_shardings=(shardings, state_shardings))
        got, state = run(jax.device_put(params, shardings), jax.device_put(tx.init(params), state_shardings))
    for path, each in leaves(got):
        assert_close(each, dict(leaves(wanted))[path], "mesh update", path)
    momentum = state[0][1].momentum["layers"]["0"]
    assert momentum["w1"].sharding.spec == PartitionSpec(None, "expert", "data", "tensor")
    assert momentum["gain"] is None
    for got_leaf, wanted_leaf in zip(jax.tree.leaves(state), jax.tree.leaves(wanted_state), strict=True):
        assert got_leaf.ndim or got_leaf.sharding.is_fully_replicated
        assert_close(got_leaf, wanted_leaf, "mesh update")
    assert build.num_clipped(state) == 2


@pytest.mark.parametrize(("layers", "experts"), [((8, 6), 2), ((3, 2), 8)], ids=["onto layers", "onto experts"])
def test_muon_step_moves_matrices_instead_of_copying_them(layers, experts):
    """With enough layers or experts the compiled step has one all-to-all there and one back, and no more."""
    into, out = Muon(("expert_in",), ("expert_mlp",), WHOLE), Muon(("expert_mlp",), ("expert_in",), WHOLE)
    deep = {
        "up": info("layers experts expert_in expert_mlp", (layers[0], experts, 8, 16), into),
        "down": info("layers experts expert_mlp expert_in", (layers[1], experts, 16, 8), out),
    }
    tx = build.build(CONFIG, deep, 10)
    mesh = make_mesh({"data": 2, "expert": 2, "tensor": 2})
    shardings = param_shardings(deep, mesh)
    params = map_leaves(lambda each, s: jax.ShapeDtypeStruct(each.shape, jnp.float32, sharding=s), deep, shardings)
    with use_mesh(mesh):
        state = jax.eval_shape(tx.init, params)
        places = build.state_shardings(CONFIG, deep, state, shardings, NamedSharding(mesh, PartitionSpec()))
        step = jax.jit(tx.update, in_shardings=(shardings, places, shardings), out_shardings=(shardings, places))
        text = step.lower(params, state, params).compile().as_text()
    assert text.count(" all-to-all(") == 2  # over data and tensor at once
    for other in ("all-gather", "all-reduce", "collective-permute", "reduce-scatter"):
        assert f" {other}(" not in text, other


def test_clip_off():
    tx = build.build(dataclasses.replace(CONFIG, qk_clip_threshold=0.0), INFOS, 10)
    params = parameters()
    logits = max_logits(jnp.full((3, 4), 1e6))
    state = tx.init(params)

    def both(params):
        free, _ = tx.update(params, state, params)
        return free, *tx.update(params, state, params, max_logits=logits)

    free, got, after = jax.jit(both)(params)
    jax.tree.map(np.testing.assert_array_equal, got, free)
    assert build.num_clipped(after) == 0


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples_run(module):
    result = doctest.testmod(importlib.import_module(module))
    assert result.attempted > 5 and result.failed == 0
