"""The assignment of docs/k3.md section 3.2 at K3's size, and the ablations that the config can choose."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from k3train.config.load import load
from k3train.config.schema import ModelConfig, OptimConfig
from k3train.core.param import AdamW, Clip, Joint, Muon, ParamInfo
from k3train.core.tree import leaves, map_leaves
from k3train.model.k3 import blueprint
from k3train.ops.newton_schulz import QUINTIC, SIMPLE, newton_schulz
from k3train.optim import build, groups, joint
from k3train.parallel.mesh import make_mesh, use_mesh
from k3train.parallel.rules import param_shardings
from tests.tolerances import assert_close

#: Section 3.2 line by line: name of ours -> (rows, columns of one matrix as in x out; matrices a layer; tag).
#: Layers of one kind hold the same names, so a name stands for all of its layers.
K3_MUON = {
    "mixer/qkv": (7168, 128, 96 * 3, "[report 2.5]"),
    "mixer/q_b": (1536, 192, 96, "[report 2.5]"),
    "mixer/k_b": (512, 128, 96, "[suggestion]"),
    "mixer/v_b": (512, 128, 96, "[suggestion]"),
    "mixer/q_a": (7168, 1536, 1, "[lineage guess]"),
    "mixer/kv_a": (7168, 576, 1, "[lineage guess]"),
    "mixer/o": (12288, 7168, 1, "[lineage guess]"),
    "mixer/g": (7168, 12288, 1, "[lineage guess]"),
    "mixer/f_a": (7168, 128, 1, "[lineage guess]"),
    "mixer/f_b": (128, 12288, 1, "[lineage guess]"),
    "mixer/beta": (7168, 96, 1, "[lineage guess]"),
    "channel/w1": (3584, 3072, 896, "[lineage guess]"),
    "channel/w3": (3584, 3072, 896, "[lineage guess]"),
    "channel/w2": (3072, 3584, 896, "[lineage guess]"),
    "channel/shared/gate": (7168, 6144, 1, "[lineage guess]"),
    "channel/shared/up": (7168, 6144, 1, "[lineage guess]"),
    "channel/shared/down": (6144, 7168, 1, "[lineage guess]"),
    "channel/down": (7168, 3584, 1, "[lineage guess]"),
    "channel/up": (3584, 7168, 1, "[lineage guess]"),
    "channel/router/weight": (7168, 896, 1, "[lineage guess]"),
    "channel/gate": (7168, 33792, 1, "[lineage guess]"),  # the dense layer; its `up` and `down` below
}
DENSE = {"channel/up": (7168, 33792, 1, "[lineage guess]"), "channel/down": (33792, 7168, 1, "[lineage guess]")}
K3_ADAMW = {
    "embed/table": (0.1, "[Moonlight]"),
    "head/matrix": (0.1, "[Moonlight]"),
    **{f"{where}/gain": (0.0, "[Moonlight]") for where in ("mixer_norm", "channel_norm", "channel/norm")},
    **{f"{where}/gain": (0.0, "[Moonlight]") for where in ("mixer/q_a_norm", "mixer/kv_a_norm")},
    "norm/gain": (0.0, "[Moonlight]"),
    **{f"mixer/{name}": (0.0, "[Moonlight][torchtitan]") for name in ("o_norm", "a_log", "dt_bias", "conv")},
    **{
        f"{where}/{name}": (0.0, "[Moonlight][torchtitan]")
        for where in ("mixer_reader", "channel_reader", "output_reader")
        for name in ("gain", "query")
    },
}


def below_layer(path):
    """The name below the stack of layers."""
    return path.split("/", 5)[5] if path.startswith("backbone/runs") else path


def blocks(infos):
    """By path: (rows, columns, matrices in all) of the Muon leaves."""
    views = dict(leaves(groups.matrix_views(infos)))
    found = {}
    for path, info in leaves(infos):
        if views[path] is not None:
            rows, cols = views[path].sizes(info.shape)
            found[path] = rows, cols, int(np.prod(info.shape)) // (rows * cols)
    return found


def test_k3_follows_the_fact_sheet_line_by_line():
    config = load("k3")[0]
    plan = blueprint(config.model)
    rows = groups.table(config.optim, plan.infos, plan.abstract_bias)
    matrices, infos = blocks(plan.infos), dict(leaves(plan.infos))
    seen = set()
    for row in rows:
        name = below_layer(row.path)
        seen.add(name)
        if name == "channel/router/bias":
            assert (row.route, row.scale, row.decay) == ("none, optim.balance=quantile", 0, 0)
            assert row.source == "[report 2.3.3]"
        elif row.route == "none":  # the reader of layer 0
            assert name in ("mixer_reader/gain", "mixer_reader/query") and row.source.startswith("[official code]")
        elif row.route == "AdamW":
            decay, tag = K3_ADAMW[name]
            assert (row.scale, row.decay) == (1.0, decay) and row.source.startswith(f"{tag} "), row
        else:
            dense = infos[row.path].component == "dense mlp"
            wanted_rows, wanted_cols, count, tag = DENSE.get(name, K3_MUON[name]) if dense else K3_MUON[name]
            assert matrices[row.path] == (wanted_rows, wanted_cols, row.shape[0] * count), row
            assert row.scale == pytest.approx(0.2 * max(wanted_rows, wanted_cols) ** 0.5)
            assert row.decay == 0.1 and row.source.startswith(f"{tag} "), row
    assert seen == {*K3_MUON, *K3_ADAMW, "channel/router/bias"}
    clipped = {below_layer(path) for path, clip in leaves(groups.clip_views(plan.infos)) if clip}
    assert clipped == {"mixer/q_b", "mixer/k_b"}  # MLA only


def ablated(**changes):
    """(effective metadata by name below the layer, lines of the table by the same) of the default model."""
    config, plan = replace(OptimConfig(), **changes), blueprint(ModelConfig())
    infos = {below_layer(path): info for path, info in leaves(groups.assigned(config, plan.infos))}
    return infos, {below_layer(row.path): row for row in groups.table(config, plan.infos, plan.abstract_bias)}


def test_whole_matrix_muon():
    _, before = ablated()
    infos, after = ablated(muon_heads="whole")
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"mixer/qkv", "mixer/q_b", "mixer/k_b", "mixer/v_b"}
    for name in changed:
        assert after[name].source == "[ablation] optim.muon_heads=whole"
        assert infos[name].route.cols == ("heads", "head_dim")
    assert after["mixer/qkv"].route == "Muon embed x heads*head_dim per layers, qkv"  # q, k and v stay three matrices
    assert after["mixer/q_b"].scale == pytest.approx(0.2 * (4 * 48) ** 0.5)


def test_adamw_everywhere():
    infos, after = ablated(matrices="adamw")
    _, before = ablated()
    for name, row in after.items():
        if before[name].route.startswith("Muon"):
            assert (row.route, row.decay, row.source) == ("AdamW", 0.1, "[ablation] optim.matrices=adamw")
        else:
            assert row == before[name]
    assert not any(isinstance(info.route, Muon) for info in infos.values())
    assert infos["mixer/q_b"].clip is not None  # QK-clip works with any optimizer


@pytest.mark.parametrize("heads", ["apart", "whole"])
def test_joint_key_and_value_blocks_in_the_table(heads):
    _, before = ablated(muon_heads=heads)
    _, after = ablated(muon_heads=heads, muon_kv_b="joint")
    assert {name for name in before if before[name] != after[name]} == {"mixer/k_b", "mixer/v_b"}
    for name in ("mixer/k_b", "mixer/v_b"):
        row = after[name]
        assert " of kv_b per " in row.route and "optim.muon_kv_b=joint" in row.source
        size = max(48, 64 if heads == "apart" else 4 * 64)  # rank 48; 32 + 32 channels a head, four heads
        assert row.scale == pytest.approx(0.2 * size**0.5)


def test_coefficients_of_the_iteration():
    assert build.coefficients(OptimConfig()) == SIMPLE
    assert build.coefficients(OptimConfig(muon_ns_steps=3)) == SIMPLE[:3]
    assert build.coefficients(OptimConfig(muon_coefficients="quintic")) == QUINTIC


# ---- the update of the ablations


def kv(name, width, clip=None):
    route = Muon(("rank_in",), ("head_dim",), "[suggestion]", Joint("kv_b", "head_dim"))
    return ParamInfo((3, 16, 4, width), ("layers", "rank_in", "heads", "head_dim"), route, name, clip)


INFOS = {
    "0": {
        "k_b": kv("k", 6, Clip("head_dim", ((6, 0.5),))),
        "v_b": kv("v", 10),
        "gain": ParamInfo((3, 16), ("layers", "norm"), AdamW(False, "[Moonlight]"), "gain"),
    },
    "o": ParamInfo((4, 6, 16), ("heads", "head_dim", "embed"), Muon(("heads", "head_dim"), ("embed",), "[x]"), "o"),
}  # fmt: skip
LOGITS = {"0": {"k_b": jnp.full((3, 4), 30.0).at[1, 2].set(400.0), "v_b": None, "gain": None}, "o": None}


def values(seed):
    rng = np.random.default_rng(seed)
    return map_leaves(lambda info: jnp.asarray(rng.normal(size=info.shape), jnp.float32), INFOS)


def one_step(config, logits=None):
    tx = build.build(config, INFOS, 10)
    params = values(0)
    return jax.jit(lambda g, p: tx.update(g, tx.init(p), p, max_logits=logits))(values(1), params)


@pytest.mark.parametrize("heads", ["apart", "whole"])
@pytest.mark.parametrize("kv_b", ["apart", "joint"])
def test_updates_are_those_of_the_chosen_matrices(heads, kv_b):
    config = OptimConfig(
        peak_lr=0.5, final_lr=0.05, warmup_fraction=0.0, weight_decay=0.0, muon_nesterov=False,
        muon_heads=heads, muon_kv_b=kv_b, muon_coefficients="quintic",
    )  # fmt: skip
    updates, _ = one_step(config)
    k, v = (np.asarray(values(1)["0"][name]) for name in ("k_b", "v_b"))
    parts = [np.concatenate([k, v], -1)] if kv_b == "joint" else [k, v]
    wanted = []
    for part in parts:  # [layers, rank, heads, channels]
        flat = part.reshape(3, 16, 1, -1) if heads == "whole" else part
        matrices = np.moveaxis(flat, 2, 1)
        done = newton_schulz(jnp.asarray(matrices), coefficients=QUINTIC) * 0.2 * max(matrices.shape[-2:]) ** 0.5
        wanted.append(np.moveaxis(np.asarray(done), 1, 2).reshape(part.shape))
    wanted = np.concatenate(wanted, -1)
    assert_close(updates["0"]["k_b"], -0.5 * wanted[..., :6], "op")
    assert_close(updates["0"]["v_b"], -0.5 * wanted[..., 6:], "op")


def test_adamw_moves_matrices_when_asked_to():
    config = OptimConfig(matrices="adamw", peak_lr=0.5, final_lr=0.05, warmup_fraction=0.0, weight_decay=0.1)
    updates, state = one_step(config)
    for path, got in leaves(updates):  # a first step of Adam is the sign
        decay = 0.0 if path.endswith("gain") else 0.1
        grad, weight = dict(leaves(values(1)))[path], dict(leaves(values(0)))[path]
        assert_close(got, -0.5 * (grad / (jnp.abs(grad) + 1e-8) + decay * weight), "op", path)
    moments = sum(x.size for x in jax.tree.leaves(state) if x.ndim)
    assert moments == 2 * sum(x.size for _, x in leaves(values(0)))


def test_clip_of_joined_leaves_scales_keys_only():
    """The same as apart: content keys by sqrt(gamma), values not at all, one head counted for half (no query here)."""
    base = OptimConfig(peak_lr=1e-9, final_lr=1e-9, weight_decay=0.0)
    for kv_b in ("apart", "joint"):
        updates, _ = one_step(replace(base, muon_kv_b=kv_b), LOGITS)
        new = jax.tree.map(jnp.add, values(0), updates)
        ratio = np.asarray(new["0"]["k_b"] / values(0)["0"]["k_b"]).mean(axis=(1, 3))
        expected = np.ones((3, 4))
        expected[1, 2] = 0.5
        assert_close(ratio, expected, "op", kv_b)
        assert_close(new["0"]["v_b"], values(0)["0"]["v_b"], "op", kv_b)


def test_joined_leaves_on_a_mesh():
    config = OptimConfig(muon_kv_b="joint", peak_lr=0.5, final_lr=0.05, warmup_fraction=0.0)
    wanted, _ = one_step(config, LOGITS)
    mesh = make_mesh({"data": 2, "expert": 2, "tensor": 2})
    tx = build.build(config, INFOS, 10)
    shardings = param_shardings(INFOS, mesh)
    abstract = jax.eval_shape(tx.init, values(0))
    places = build.state_shardings(config, INFOS, abstract, shardings, NamedSharding(mesh, PartitionSpec()))
    with use_mesh(mesh):
        params, grads = (jax.device_put(values(seed), shardings) for seed in (0, 1))
        state = jax.jit(tx.init, out_shardings=places)(params)
        update = jax.jit(lambda g, s, p: tx.update(g, s, p, max_logits=LOGITS), out_shardings=(shardings, places))
        got, state = update(grads, state, params)
    for path, each in leaves(got):
        assert_close(each, dict(leaves(wanted))[path], "mesh update", path)
    momentum = state[0][1].momentum["0"]
    assert momentum["kv_b"].sharding.spec == PartitionSpec(None, "data", "tensor", None) and "k_b" not in momentum


def test_parts_of_one_matrix_must_lie_along_one_axis():
    along_heads = Muon(("rank_in",), ("head_dim",), "[x]", Joint("kv_b", "heads"))
    with pytest.raises(AssertionError, match="different axes"):
        joint.merged_infos({**INFOS["0"], "v_b": replace(kv("v", 10), route=along_heads)})
