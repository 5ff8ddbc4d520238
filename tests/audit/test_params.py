"""Parameter counts to the last digit, and their bytes per device."""

import math
from dataclasses import replace

import jax
import pytest

from k3train.audit.params import bytes_per_device, count, local_size, report, table
from k3train.config.load import load
from k3train.core.tree import leaves
from k3train.model.k3 import blueprint
from k3train.optim.build import build
from k3train.parallel.mesh import make_mesh
from k3train.parallel.rules import param_shardings


def config(name, *overrides):
    return load(name, overrides)[0]


def test_kimi_k3_as_released():
    counts = count(config("k3"))
    assert counts.stored == 2_779_931_837_184
    assert counts.total == 2_779_484_476_000
    assert counts.activated == 104_189_612_640
    assert counts.routed == 2_722_740_830_208
    assert counts.activated - counts.always_on == 48_620_371_968
    assert counts.beside == {"vision tower": 401_214_464, "projector": 46_144_512, "A_log padding": 2208}
    assert counts.components["kda"] == 30_618_086_496
    assert counts.components["mla"] == 5_572_706_304
    assert counts.components["dense mlp"] == 726_663_168
    assert counts.components["layer norms"] == 1_333_248
    assert counts.components["embedding"] == counts.components["output head"] == 1_174_405_120
    assert counts.activated - counts.components["output head"] == 103_015_207_520


def test_kimi_linear_48b_as_released():
    counts = count(config("kimi_linear_48b"))
    assert counts.stored == counts.total == 49_122_681_728
    assert counts.activated == 3_106_972_544
    assert counts.beside == {}


def test_the_report_names_its_convention():
    found = report(config("k3"))
    assert found["parameters"]["stored"] == 2_779_931_837_184
    assert found["parameters"]["activated"] == 104_189_612_640
    assert sum(found["components"].values()) == found["parameters"]["total"]
    assert "output head counted, the embedding look-up not counted" in found["convention"]


def test_the_table_holds_every_component_and_the_sums():
    counts = count(config("tiny"))
    lines = table(counts).splitlines()
    for name, number in counts.components.items():
        row = next(line for line in lines if line.startswith(name))
        assert f"{number:,}" in row.split()
    assert [f"{counts.total:,}", f"{counts.activated:,}"] == next(x for x in lines if "text model" in x).split()[2:]


@pytest.mark.parametrize("latent", ["0", "64"])
def test_switches_change_the_activated_experts_only_by_top_k(latent):
    few, many = (
        count(config("tiny", f"--config.model.moe_latent_size={latent}", f"--config.model.num_experts_per_token={k}"))
        for k in (1, 4)
    )
    assert few.total == many.total
    assert many.activated - many.always_on == 4 * (few.activated - few.always_on)
    assert many.always_on == few.always_on


def test_local_sizes_are_those_of_the_shardings():
    cfg = config("tiny", "--config.mesh.data=2", "--config.mesh.expert=2", "--config.mesh.tensor=2")
    sizes = {"data": 2, "expert": 2, "tensor": 2}
    infos = blueprint(cfg.model).infos
    shardings = dict(leaves(param_shardings(infos, make_mesh(sizes))))
    for path, info in leaves(infos):
        assert local_size(info, cfg.mesh) == math.prod(shardings[path].shard_shape(info.shape)), path


def test_bytes_are_those_of_the_optimizer():
    cfg = config("tiny", "--config.mesh.data=1", "--config.mesh.expert=1")
    plan = blueprint(cfg.model)
    held = bytes_per_device(cfg)
    assert held["parameters"] == held["gradients"] == sum(4 * math.prod(info.shape) for _, info in leaves(plan.infos))
    state = jax.eval_shape(build(cfg.optim, plan.infos, cfg.num_steps).init, plan.abstract_params)
    shapes = {info.shape for _, info in leaves(plan.infos)}
    moments = sum(x.size * 4 for x in jax.tree.leaves(state) if x.shape in shapes)
    assert held["optimizer"] == moments


def test_more_devices_hold_less():
    one = bytes_per_device(config("tiny", "--config.mesh.data=1", "--config.mesh.expert=1"))
    eight = bytes_per_device(config("tiny"))
    assert one["parameters"] / 8 < eight["parameters"] < one["parameters"] / 2
    doubled = replace(config("tiny").mesh, data=4)
    assert bytes_per_device(replace(config("tiny"), mesh=doubled))["parameters"] < eight["parameters"]
