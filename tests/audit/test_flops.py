"""Operations per token against the fact sheet and against the compiler's count."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from k3train.audit.flops import decode, per_token, source_reads
from k3train.config.load import load
from k3train.config.schema import Config, DataConfig, ModelConfig
from k3train.model.k3 import blueprint, init_cache
from k3train.ops import grouped_matmul


def test_kimi_k3():
    config = load("k3")[0]
    found = per_token(config)
    assert found.weights == 2 * 104_189_612_640
    assert found.kda == pytest.approx(1.2e9, rel=0.01)
    assert found.attn_res == pytest.approx(43e6, rel=0.01)
    a_million = replace(config, data=replace(config.data, seq_len=2**20 - 1))
    assert per_token(a_million).mla == 1_474_560 * 2**20 / 2
    assert found.training == 3 * found.forward


def test_a_decoded_token_of_kimi_k3():
    """docs/k3.md section 1.8; attention to the latents themselves costs more operations than to expanded keys."""
    config = load("k3")[0]
    assert decode(config, 0).kda == pytest.approx(0.76e9, rel=0.01)
    last = decode(config, 2**20 - 1)
    assert last.weights == 2 * 104_189_612_640
    assert last.mla == 2 * 96 * (576 + 576) * 24 * 2**20
    expanded = 1_474_560 * 2**20
    assert expanded == pytest.approx(1.55e12, rel=0.01) and 3 < last.mla / expanded < 4


def test_source_reads():
    model = load("k3")[0].model
    assert source_reads(model) == 1002
    assert source_reads(replace(model, attn_res="full")) == 17_578 - 1  # the first reader has one source: skipped
    assert source_reads(replace(model, attn_res="none")) == 0


#: Two different layers each, because the compiler counts a scanned body once.
WIDE = {
    "vocab_size": 512, "hidden_size": 512, "intermediate_size": 2048, "num_layers": 2, "kda_layers": (0,),
    "mla_layers": (1,), "dense_layers": (0, 1), "moe_layers": (), "kda_num_heads": 8, "kda_head_dim": 128,
    "mla_qk_nope_head_dim": 128, "mla_v_head_dim": 128, "mla_qk_rope_head_dim": 64,
}  # fmt: skip
EXPERTS = {
    "dense_layers": (0,), "moe_layers": (1,), "num_experts": 8, "num_experts_per_token": 4, "moe_latent_size": 256,
    "moe_intermediate_size": 256,
}  # fmt: skip
MLA_ALONE = {"kda_layers": (), "mla_layers": (0, 1), "mla_num_heads": 8}
MODELS = {
    "KDA and MLA": (WIDE, 64),
    "routed experts": (WIDE | EXPERTS, 64),
    "long rows": (WIDE | MLA_ALONE, 512),
    "plain residuals": (WIDE | {"attn_res": "none", "moe_latent_size": 0}, 64),
}


def counted(function, *arguments):
    return jax.jit(function).lower(*arguments).cost_analysis()["flops"]


@pytest.mark.parametrize("name", MODELS)
def test_the_compiler_counts_the_same(monkeypatch, name):
    """Forward, and forward with backward, within 5 %; element-wise operations are in its count, not in the formula."""
    switches, length = MODELS[name]
    monkeypatch.setattr(grouped_matmul, "_tiling", lambda pairs, experts, _: (pairs // experts, experts))  # one step
    model = ModelConfig(**switches)
    tokens = jnp.ones((1, length), jnp.int32)
    plan = blueprint(model)

    def forward(params, bias):
        return plan.module(params, bias).logits(tokens, tokens)[0]

    def training(params, bias):
        return jax.grad(lambda params: jnp.sum(forward(params, bias)))(params)

    formula = per_token(Config(model=model, data=DataConfig(seq_len=length)))
    masked = formula.mla * (2 * length / (length + 1) - 1)  # it counts the masked half of the attention as well
    weights = plan.abstract_params, plan.abstract_bias
    assert counted(forward, *weights) / length == pytest.approx(formula.forward + masked, rel=0.05)
    if not model.moe_layers:  # the experts' backward pass computes gate and up again
        assert counted(training, *weights) / length == pytest.approx(formula.training + 3 * masked, rel=0.05)


def test_the_compiler_counts_the_same_for_a_decode_step():
    model, context = ModelConfig(**WIDE), 2048
    plan = blueprint(model)
    token = jnp.ones((1, 1), jnp.int32)

    def step(params, bias, cache):
        return plan.module(params, bias).logits(token, token, cache=cache)

    cache = jax.eval_shape(lambda: init_cache(model, 1, context))
    formula = decode(Config(model=model), context - 1)
    assert formula.mla > 0.05 * formula.forward
    assert counted(step, plan.abstract_params, plan.abstract_bias, cache) == pytest.approx(formula.forward, rel=0.05)
