"""Bytes of weights and of decode states: the fact sheet's numbers, and the arrays themselves."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from k3train.audit.memory import CONTEXTS, report, sequence_state, text, weight_bytes
from k3train.audit.params import count
from k3train.config.load import load
from k3train.config.schema import Config, ModelConfig
from k3train.model.k3 import init_cache


def test_weights_of_kimi_k3():
    """docs/k3.md section 1.7."""
    found = weight_bytes(load("k3")[0])
    assert found["mxfp4"] == 1_560_860_324_864
    assert found["bfloat16"] == pytest.approx(5.56e12, rel=1e-3)
    experts = 2_722_740_830_208
    assert found["bfloat16"] - 2 * experts == 114_359_769_088 + 44_489_728
    assert found["mxfp4"] - 1_446_456_066_048 == 114_359_769_088 + 44_489_728
    assert found["float32"] == 4 * 2_779_931_837_184


def test_weights_of_kimi_linear():
    config = load("kimi_linear_48b")[0]
    small = 20 * (32 + 4096 * (3 * 4 + 1) + 128) + 26 * 256  # A_log, convolutions, dt_bias, o_norm; router bias
    assert weight_bytes(config)["bfloat16"] == 2 * 49_122_681_728 + 2 * small


def test_experts_that_do_not_come_in_blocks_cannot_be_packed():
    config = load("tiny", ["--config.model.moe_latent_size=48"])[0]
    assert weight_bytes(config)["mxfp4"] is None and "mxfp4 not possible" in text(config)
    assert weight_bytes(load("tiny")[0])["mxfp4"] < weight_bytes(load("tiny")[0])["bfloat16"]


def test_decode_state_of_kimi_k3():
    """docs/k3.md section 1.8."""
    state = sequence_state(load("k3")[0].model)
    assert state.cache_per_token == 27_648
    assert state.all_mla_per_token == 107_136
    assert state.kda_state == 434_110_464
    assert state.conv_tails == 15_261_696
    assert state.fixed == 449_372_160
    assert state.total(2**20) == 28_991_029_248 + 449_372_160
    assert CONTEXTS == (8 * 1024, 256 * 1024, 1024 * 1024)


@pytest.mark.parametrize("name", ["k3", "kimi_linear_48b", "tiny"])
def test_the_formulas_are_the_bytes_of_the_cache(name):
    """Of the arrays that the engine makes, for any context; also where every layer is MLA."""
    model = load(name)[0].model
    all_mla = replace(model, kda_layers=(), mla_layers=tuple(range(model.num_layers)))
    state = sequence_state(model)

    def made(config, context):
        arrays = jax.tree.leaves(jax.eval_shape(lambda: init_cache(config, 1, context)).layers)
        return sum(int(np.prod(x.shape)) * x.dtype.itemsize for x in arrays)

    for context in CONTEXTS:
        assert state.total(context) == made(model, context)
        assert state.all_mla_per_token * context == made(all_mla, context)


def test_the_report_holds_what_the_text_does():
    config = Config(model=ModelConfig())
    found, shown = report(config), text(config)
    assert found["weight_bytes"]["float32"] == 4 * count(config).stored
    decode = found["decode"]
    for name, value in decode.items():
        if isinstance(value, int):
            assert f"{value:,}" in shown, name
    for row, line in zip(decode["contexts"], shown.splitlines()[-3:], strict=True):
        assert [f"{row[key]:,}" for key in ("tokens", "bytes", "all_mla_bytes")] == line.split()[:3]
        assert float(line.split()[3].replace(",", "")) == pytest.approx(row["flops_per_token"] / 1e9, rel=1e-3)
