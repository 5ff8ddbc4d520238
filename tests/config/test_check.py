"""Impossible configurations are refused with the knob, its value and what would be accepted."""

from dataclasses import replace
from pathlib import Path

import pytest

from k3train.config.check import RANGES, ConfigError, check, lookup, mesh_size, mesh_text
from k3train.config.load import load
from k3train.config.schema import Config
from k3train.config.values import KNOBS, flat_values, freeze
from k3train.model.k3 import blueprint
from k3train.parallel.rules import indivisible


def changed(**values) -> Config:
    """The default configuration with `section__name=value` changed."""
    flat = flat_values(Config()) | {key.replace("__", "."): value for key, value in values.items()}
    return freeze(flat, "test")


def refusal(num_devices=None, **values) -> str:
    with pytest.raises(ConfigError) as error:
        check(changed(**values), num_devices)
    return str(error.value)


def test_the_defaults_are_accepted_on_one_device():
    check(Config(), 1)


@pytest.mark.parametrize("path", sorted(Path(__file__).parents[2].glob("configs/*.py")), ids=lambda p: p.stem)
def test_every_config_of_the_repository_is_consistent(path):
    config, sources = load(path)
    check(config, mesh_size(config.mesh), trainable=False)
    assert sources.keys() == KNOBS.keys()


def test_every_number_has_a_range():
    numbers = {path for path, knob in KNOBS.items() if knob.kind in (int, float)}
    assert numbers == RANGES.keys()


@pytest.mark.parametrize("path", sorted(RANGES))
def test_out_of_range_is_refused(path):
    bad = KNOBS[path].kind(-7)
    message = refusal(**{path.replace(".", "__"): bad})
    assert message == f"{path}={bad}: must be {RANGES[path].text}"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kda_layers": (0, 1, 2, 4, 5)}, "kda_layers and model.mla_layers must name layers 0 to 7 once each; miss"),
        ({"mla_layers": (3, 6, 7)}, "named twice: 6"),
        ({"mla_layers": (3, 7, 8)}, "no such layer: 8"),
        ({"dense_layers": (0, 0)}, "dense_layers and model.moe_layers must name layers 0 to 7 once each; named"),
        ({"dense_layers": (-1, 0)}, "no such layer: -1"),
        ({"moe_layers": (2, 3, 4, 5, 6, 7)}, "missing: 1"),
        ({"num_layers": 9}, "missing: 8"),
        ({"num_experts_per_token": 17}, "model.num_experts_per_token=17: must be at most model.num_experts=16"),
        ({"pad_token_id": 256}, "model.pad_token_id=256: must be below model.vocab_size=256"),
        ({"kda_gate_lower_bound": 0.0}, "model.kda_gate_lower_bound=0.0: must be from -5 to below 0"),
        ({"kda_gate_lower_bound": -5.5}, "model.kda_gate_lower_bound=-5.5: must be from -5 to below 0"),
        ({"kda_a_log_length": 3}, "model.kda_a_log_length=3: must be 0 or at least model.kda_num_heads=4"),
        ({"kda_chunk_size": 48}, "model.kda_chunk_size=48: must be a power of two from 16 on"),
        ({"kda_gate": "softplus", "kda_gate_lower_bound": -4.0}, "model.kda_gate_lower_bound=-4.0: has no effect"),
        ({"activation": "swiglu", "situ_beta": 3.0}, "situ_beta=3.0: has no effect here, because model.activation"),
        ({"attn_res": "full", "attn_res_block_size": 2}, "model.attn_res_block_size=2: has no effect"),
    ],
)  # fmt: skip
def test_model(values, message):
    assert message in refusal(**{f"model__{name}": value for name, value in values.items()})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mesh__expert": 3}, "model.num_experts=16: must be a multiple of mesh.expert=3"),
        ({"mesh__tensor": 3}, "model.mla_num_heads=4: must be a multiple of mesh.tensor=3"),
        ({"mesh__tensor": 3}, "model.kda_num_heads=4: must be a multiple of mesh.tensor=3"),
        ({"mesh__tensor": 3}, "model.intermediate_size=512: must be a multiple of mesh.tensor=3"),
        ({"mesh__tensor": 3}, "model.moe_intermediate_size=64: must be a multiple of mesh.tensor=3"),
        ({"mesh__tensor": 3}, "model.vocab_size=256: must be a multiple of mesh.tensor=3"),
        ({"mesh__data": 3}, "model.hidden_size=128: must be a multiple of mesh.data=3"),
        ({"mesh__data": 32}, "model.mla_kv_lora_rank=48: must be a multiple of mesh.data=32"),
        ({"mesh__data": 2, "mesh__expert": 4, "data__micro_batches": 3}, "batch_size=32: must be a multiple of 24"),
        ({"mesh__pipeline": 2}, "mesh.pipeline=2: this axis is not usable yet, only 1 is accepted"),
        ({"mesh__context": 4}, "mesh.context=4: this axis is not usable yet, only 1 is accepted"),
        ({"vision__num_layers": 2}, "vision.num_layers=2: the vision tower can be counted but not trained yet"),
        ({"optim__final_lr": 1.0}, "optim.final_lr=1.0: must be at most optim.peak_lr=0.002"),
        ({"optim__matrices": "adamw", "optim__muon_heads": "whole"}, "optim.muon_heads=whole: has no effect here"),
        ({"optim__muon_coefficients": "quintic", "optim__muon_ns_steps": 6}, "optim.muon_ns_steps=6: optim.muon_coef"),
        ({"optim__balance": "none", "optim__balance_bins": 50}, "optim.balance_bins=50: has no effect"),
        ({"optim__balance": "sign", "optim__balance_ema": 0.5}, "optim.balance_ema=0.5: has no effect"),
        ({"optim__balance_sign_step": 0.1}, "optim.balance_sign_step=0.1: has no effect"),
        ({"data__eval_fraction": 0.0, "eval__every": 3}, "eval.every=3: has no effect"),
        ({"data__source": "text"}, "data.path='': data.source=text needs a file"),
        ({"data__path": "books"}, "data.path=books: has no effect here, because data.source=stdlib"),
        ({"data__source": "text", "data__path": "x", "data__text_field": "body"}, "text_field=body: has no effect"),
        ({"data__source": "chat"}, "data.path='': data.source=chat needs a file"),
        ({"data__source": "stdlib_chat", "data__eval_path": "x"}, "data.eval_path=x: has no effect here, because data"),
        ({"data__chat_mode": "instruct"}, "data.chat_mode=instruct: has no effect here, because data.source=stdlib"),
        ({"data__on_long": "cut"}, "data.on_long=cut: has no effect here, because data.source=stdlib holds no conv"),
        (
            {"data__source": "chat", "data__path": "x", "data__eval_path": "y", "data__eval_fraction": 0.1},
            "data.eval_fraction=0.1: has no effect here, because data.eval_path names what is held out",
        ),
    ],
)  # fmt: skip
def test_mesh_and_data(values, message):
    assert message in refusal(**values)


def test_the_mesh_must_use_every_device():
    message = refusal(num_devices=6, mesh__data=2, mesh__expert=4)
    assert message.startswith("mesh data 2 x expert 4 needs 8 devices, there are 6")
    check(changed(mesh__data=2, mesh__expert=4), 8)


def test_a_plain_dense_model_needs_no_experts_that_divide():
    check(changed(model__dense_layers=tuple(range(8)), model__moe_layers=(), mesh__expert=32, model__num_experts=5))


def test_every_mistake_is_listed_at_once():
    assert len(refusal(num_steps=0, seed=-1, log__every=0).splitlines()) == 3


def test_counting_allows_what_cannot_be_trained_yet():
    config = changed(vision__num_layers=2, mesh__pipeline=2)
    check(config, trainable=False)
    with pytest.raises(ConfigError):
        check(config)


def test_mesh_in_words():
    mesh = Config().mesh
    assert (mesh_text(mesh), mesh_size(mesh)) == ("one device", 1)
    assert mesh_text(replace(mesh, data=2, tensor=3)) == "data 2 x tensor 3"
    assert lookup(Config(), "model.num_layers") == 8


@pytest.mark.parametrize("name", ["tiny", "k3", "kimi_linear_48b"])
def test_no_sharding_rule_is_forgotten(name):
    config = load(name)[0]
    infos = blueprint(config.model).infos
    for axis in ("data", "expert", "tensor"):
        for size in (2, 3, 5, 7, 48, 256):
            sizes = {"data": 1, "expert": 1, "tensor": 1, axis: size}
            on_mesh = replace(config, mesh=replace(config.mesh, **sizes))
            on_mesh = replace(on_mesh, data=replace(config.data, batch_size=size, micro_batches=1))
            try:
                check(on_mesh, trainable=False)
                refused = False
            except ConfigError:
                refused = True
            assert refused == bool(indivisible(infos, sizes)), (axis, size)
