"""Operations per token against the fact sheet and against the compiler's count."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from k3train.audit.flops import per_token, source_reads
from k3train.config.load import load
from k3train.config.schema import Config, DataConfig, ModelConfig
from k3train.model.k3 import blueprint


def test_kimi_k3():
    config = load("k3")[0]
    found = per_token(config)
    assert found.weights == 2 * 104_189_612_640
    assert found.kda == pytest.approx(1.2e9, rel=0.01)
    assert found.attn_res == pytest.approx(43e6, rel=0.01)
    a_million = replace(config, data=replace(config.data, seq_len=2**20 - 1))
    assert per_token(a_million).mla == 1_474_560 * 2**20 / 2
    assert found.training == 3 * found.forward


def test_source_reads():
    model = load("k3")[0].model
    assert source_reads(model) == 1002
    assert source_reads(replace(model, attn_res="full")) == 17_578 - 1  # the first reader has one source: skipped
    assert source_reads(replace(model, attn_res="none")) == 0


def test_the_compiler_counts_the_same():
    # one chunk and unstacked layers, because the compiler counts a scanned body once; it also counts the masked half
    # of the attention, and the element-wise operations that the formula leaves out
    model = ModelConfig(
        num_layers=2, kda_layers=(0,), mla_layers=(1,), dense_layers=(0, 1), moe_layers=(), vocab_size=512,
        hidden_size=256, intermediate_size=1024,
    )  # fmt: skip
    tokens = jnp.ones((4, 64), jnp.int32)
    plan = blueprint(model)

    def forward(params, bias):
        return plan.module(params, bias).logits(tokens, tokens)[0]

    counted = jax.jit(forward).lower(plan.abstract_params, plan.abstract_bias).cost_analysis()["flops"] / tokens.size
    assert counted == pytest.approx(per_token(Config(model=model, data=DataConfig(seq_len=64))).forward, rel=0.10)
