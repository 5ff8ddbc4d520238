"""What is rounded in the forward pass: routed experts and nothing else, to the numbers that an export holds."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from k3train.config.check import ConfigError, check
from k3train.config.load import load
from k3train.config.schema import QuantConfig
from k3train.core.tree import leaves
from k3train.model.k3 import blueprint
from k3train.model.quantise import described, input_rounding, rounded_params, straddling, weight_rounding
from k3train.ops.mx import E2M1, E4M3, Rounding, decode_mxfp4, encode_mxfp4
from k3train.parallel.mesh import make_mesh, use_mesh
from k3train.parallel.rules import param_shardings

CONFIG = load("tiny_sft")[0]
INFOS = blueprint(CONFIG.model).infos


def test_none_leaves_everything_alone():
    params = {"w": object()}
    assert rounded_params(params, {"w": None}, QuantConfig()) is params
    assert weight_rounding(QuantConfig()) is input_rounding(QuantConfig()) is None
    assert described(INFOS, QuantConfig()) == ["quantised: nothing"]


def test_each_kind_says_what_is_rounded_how():
    quant = QuantConfig(experts="mxfp4", weight_scale="floor", saturated_grad="zero")
    assert weight_rounding(quant) == Rounding(E2M1, "floor", "zero") and input_rounding(quant) is None
    quant = QuantConfig(experts="mxfp4_mxfp8", input_scale="even")
    assert weight_rounding(quant) == Rounding(E2M1, "even") and input_rounding(quant) == Rounding(E4M3, "even")


@pytest.mark.parametrize("rule", ["even", "floor"])
def test_routed_experts_become_what_an_export_holds(rule):
    """Blocks run along the input axis, whichever place it has; all other parameters are the same arrays."""
    params, _ = blueprint(CONFIG.model).init(0)
    found = dict(leaves(rounded_params(params, INFOS, QuantConfig(experts="mxfp4", weight_scale=rule))))
    infos, moved = dict(leaves(INFOS)), 0
    for path, before in leaves(params):
        if infos[path].component != "routed experts":
            assert found[path] is before, path
            continue
        moved += 1
        wanted = decode_mxfp4(*encode_mxfp4(np.ascontiguousarray(np.swapaxes(before, -1, -2)), rule))
        np.testing.assert_array_equal(found[path], np.swapaxes(wanted, -1, -2), path)
        assert (np.asarray(found[path]) != np.asarray(before)).mean() > 0.9
    assert moved == sum(info.component == "routed experts" for info in infos.values()) > 0


def test_the_resolved_list_names_every_quantised_parameter_and_the_rest():
    first, *stacks, last = described(INFOS, CONFIG.quant)
    experts = [path for path, info in leaves(INFOS) if info.component == "routed experts"]
    named = [f"{line.split(':')[0].strip()}/{name}" for line in stacks for name in ("w1", "w2", "w3") if name in line]
    assert named == experts
    assert all(line.count("along expert_in") == 2 and line.count("along expert_mlp") == 1 for line in stacks)
    assert "MXFP4 (E2M1, scale rule even)" in first and "MXFP8 (E4M3, scale rule floor)" in first
    for component in ("router", "shared experts", "latent projections", "kda", "mla", "embedding", "output head"):
        assert component in last
    assert "routed experts" not in last
    assert "with as they are" in described(INFOS, replace(CONFIG.quant, experts="mxfp4"))[0]


def test_weights_are_rounded_where_they_lie():
    """On a mesh that splits experts and blocks' axis, no device needs anything of another."""
    mesh = make_mesh({"data": 2, "expert": 4})
    infos = {path: info for path, info in leaves(INFOS) if info.quantised}
    shardings = param_shardings(infos, mesh)
    draw = np.random.default_rng(0)
    params = {path: draw.standard_normal(info.shape, np.float32) for path, info in infos.items()}
    placed = jax.tree.map(jax.device_put, params, shardings)
    with use_mesh(mesh):
        program = (
            jax.jit(lambda p: rounded_params(p, infos, CONFIG.quant), out_shardings=shardings).lower(placed).compile()
        )
    text = program.as_text()
    assert not any(name in text for name in ("all-gather", "all-to-all", "all-reduce", "collective-permute"))
    for path, weights in program(placed).items():
        np.testing.assert_array_equal(weights, rounded_params(params, infos, CONFIG.quant)[path])


@pytest.mark.parametrize("axis", ["data", "expert", "tensor"])
@pytest.mark.parametrize("latent", [64, 0])
def test_blocks_that_a_mesh_would_cut_are_refused_before_anything_is_compiled(axis, latent):
    model = replace(CONFIG.model, moe_latent_size=latent, moe_latent_norm=bool(latent))
    for size in (1, 2, 4, 8):
        sizes = {"data": 1, "expert": 1, "tensor": 1, axis: size}
        config = replace(CONFIG, model=model, mesh=replace(CONFIG.mesh, **sizes))
        refusals = ""
        try:
            check(config)
        except ConfigError as error:
            refusals = str(error)
        problems = straddling(blueprint(model).infos, config.quant, sizes)
        assert ("cuts it into blocks of 32" in refusals) == bool(problems), (axis, size, refusals, problems)
        assert bool(problems) == (axis != "expert" and size > {"data": 2 if latent else 4, "tensor": 2}[axis])
        assert not straddling(blueprint(model).infos, QuantConfig(), sizes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"moe_intermediate_size": 48},
            "model.moe_intermediate_size=48: quant.experts=mxfp4_mxfp8 cuts it into blocks",
        ),
        ({"moe_latent_size": 80}, "of mesh.data=2 parts; must be a multiple of 64"),
        ({"dense_layers": tuple(range(6)), "moe_layers": ()}, "model.moe_layers=\\(\\) has no routed experts"),
    ],
)
def test_models_that_cannot_be_quantised(change, message):
    config = replace(CONFIG, model=replace(CONFIG.model, **change))
    with pytest.raises(ConfigError, match=message):
        check(config)
    check(replace(config, quant=QuantConfig()))


def test_a_rounding_that_nothing_uses_is_refused():
    for knobs in ({"weight_scale": "floor"}, {"experts": "mxfp4", "input_scale": "even"}):
        with pytest.raises(ConfigError, match="has no effect here, because quant.experts="):
            check(replace(CONFIG, quant=QuantConfig(**knobs)))


def test_a_deep_model_is_listed_by_its_stacks():
    config = load("k3")[0]
    stacks = described(blueprint(config.model).infos, QuantConfig(experts="mxfp4_mxfp8"))[1:-1]
    assert len(stacks) < 20
    layers = sum(int(line.split("[")[1].split(",")[0]) for line in stacks)
    assert layers == len(config.model.moe_layers)
