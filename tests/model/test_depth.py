"""The whole stack: attention residuals against a literal list of sources, causality, packing, padding."""

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.config.schema import ModelConfig
from k3train.core.tree import Blueprint, leaves
from k3train.model.block import Layer
from k3train.model.k3 import blueprint
from k3train.model.layout import kinds, layout, slots
from k3train.model.moe import PLAIN_RUN
from tests.model.golden_models import compiled, layer_arrays
from tests.tolerances import assert_close

#: Ten layers in blocks of three: a first block, two equal ones (scanned), a last one of one layer; two KDA layers in a
#: row are scanned too.
BLOCKS = ModelConfig(
    vocab_size=64,
    hidden_size=16,
    num_layers=10,
    kda_layers=(0, 1, 3, 4, 6, 7, 9),
    mla_layers=(2, 5, 8),
    dense_layers=(0,),
    moe_layers=tuple(range(1, 10)),
    intermediate_size=24,
    kda_num_heads=2,
    kda_head_dim=8,
    kda_gate_rank=8,
    kda_chunk_size=16,
    mla_num_heads=2,
    mla_q_lora_rank=8,
    mla_kv_lora_rank=8,
    mla_qk_nope_head_dim=8,
    mla_qk_rope_head_dim=4,
    mla_v_head_dim=8,
    attn_res_block_size=3,
    num_experts=8,
    num_experts_per_token=2,
    num_shared_experts=1,
    moe_intermediate_size=8,
    moe_latent_size=8,
    init_fan_in=True,
)
FULL = replace(
    BLOCKS,
    num_layers=3,
    kda_layers=(0, 1),
    mla_layers=(2,),
    moe_layers=(1, 2),
    attn_res="full",
    attn_res_block_size=ModelConfig.attn_res_block_size,
)
LENGTH = 24


@cache
def arrays(config):
    """Random parameters and bias; queries too, which start at zero and would hide what they weigh."""
    draw = np.random.default_rng(2)

    def filled(tree):
        for path, x in leaves(tree):
            gain = path.endswith(("gain", "o_norm"))
            yield path, jnp.asarray(draw.normal(float(gain), 0.3, x.shape), jnp.float32)

    plan = blueprint(config)
    return tuple(with_leaves(tree, dict(filled(tree))) for tree in (plan.abstract_params, plan.abstract_bias))


def with_leaves(tree, values, prefix=""):
    """The tree with these leaves, by path; other leaves stay."""
    return {
        key: with_leaves(value, values, f"{prefix}{key}/")
        if isinstance(value, dict)
        else values.get(f"{prefix}{key}", value)
        for key, value in tree.items()
    }


def without_queries(params):
    return with_leaves(params, {path: 0 * x for path, x in leaves(params) if path.endswith("query")})


@cache
def forward(config):
    """Compiled: (hidden, logits) of one row of `LENGTH` tokens."""

    def run(params, bias, tokens, segment_ids):
        module = blueprint(config).module(params, bias)
        hidden = module.hidden(tokens, segment_ids).hidden
        return hidden, module.head(hidden)

    row = jnp.zeros((1, LENGTH), jnp.int32)
    return compiled(run, *arrays(config), row, row)


TOKENS = np.random.default_rng(0).permutation(64)[:LENGTH].astype(np.int32)[None]
ONES = np.ones_like(TOKENS)


def read(gain, query, sources, eps):
    """docs/k3.md section 2.4, source by source."""
    scores = []
    for v in sources:
        key = v / jnp.sqrt(jnp.mean(v * v, axis=-1, keepdims=True) + eps)
        scores.append(jnp.sum(key * (gain * query), axis=-1))
    top = jnp.exp(jnp.stack(scores) - jnp.max(jnp.stack(scores), axis=0))
    share = top / jnp.sum(top, axis=0)
    return sum(p[..., None] * v for p, v in zip(share, sources, strict=True))


@cache
def sublayer(config, kind, which):
    """Compiled: output of one sublayer from the parameters of its layer and its input."""
    parts = Blueprint(lambda make: Layer(make.stacked(1), config, kind, PLAIN_RUN))
    segment_ids = jnp.asarray(ONES)

    def run(params, bias, h):
        layer: Any = parts.module(params, bias)
        if which == "channel":
            x = layer.channel_norm(h)
            return layer.channel(x, segment_ids, collect=False)[0] if kind.channel == "moe" else layer.channel(x)
        return layer.mixer(layer.mixer_norm(h), segment_ids, *([None] * (1 if kind.mixer == "kda" else 2)))[0]

    params, bias = arrays(config)
    slot = slots(config)[kinds(config).index(kind)]
    h = params["embed"]["table"][TOKENS]
    return compiled(run, layer_arrays(params, slot), layer_arrays(bias, slot), h)


def by_the_list(config, params, bias, *, block):
    """Hidden states before the final norm; a list of finished blocks of `block` sublayers, no layer stacked.

    The order of the released code: read, then push the finished block, then start the new one with the output.
    """
    eps = config.rms_norm_eps
    blocks, prefix, done = [], params["embed"]["table"][TOKENS], 0
    for kind, slot in zip(kinds(config), slots(config), strict=True):
        here, here_bias = layer_arrays(params, slot), layer_arrays(bias, slot)
        for which in ("mixer", "channel"):
            reader = here[f"{which}_reader"]
            sources = [*blocks, *([] if prefix is None else [prefix])]
            h = read(reader["gain"], reader["query"], sources, eps) if blocks else prefix
            if done % block == 0:
                blocks, prefix = [*blocks, prefix], None
            out = sublayer(config, kind, which)(here, here_bias, h)
            prefix, done = out if prefix is None else prefix + out, done + 1
    reader = params["output_reader"]
    return read(reader["gain"], reader["query"], [*blocks, prefix], eps)


def final_norm(config, params, x):
    scale = jnp.sqrt(jnp.mean(x * x, axis=-1, keepdims=True) + config.rms_norm_eps)
    return x / scale * params["norm"]["gain"]


@pytest.mark.parametrize(
    ("config", "sublayers"), [(BLOCKS, 6), (FULL, 1)], ids=["blocks of three layers", "full: blocks of one sublayer"]
)
def test_the_stack_is_the_literal_list_of_sources(config, sublayers):
    """Also: scanned layers and blocks give what single layers give."""
    params, bias = arrays(config)
    wanted = final_norm(config, params, by_the_list(config, params, bias, block=sublayers))
    hidden, _ = forward(config)(params, bias, TOKENS, ONES)
    assert_close(hidden, wanted, "same model")


def test_both_kinds_of_scan_are_in_the_stack_above():
    runs = layout(BLOCKS)
    assert [run.repeats for run in runs] == [1, 2, 1]
    assert max(segment.repeats for segment in runs[1].segments) == 2


def test_fresh_queries_average(monkeypatch):
    """With the zero queries of a fresh model every reader returns the plain mean of its sources."""
    params, bias = arrays(FULL)
    params = without_queries(params)
    monkeypatch.setitem(globals(), "read", lambda gain, query, sources, eps: sum(sources) / len(sources))
    wanted = final_norm(FULL, params, by_the_list(FULL, params, bias, block=1))
    hidden, _ = forward(FULL)(params, bias, TOKENS, ONES)
    assert_close(hidden, wanted, "same model")
    fresh = [x for path, x in leaves(blueprint(BLOCKS).init(0)[0]) if path.endswith("query")]
    assert fresh and not any(np.any(x) for x in fresh)


def test_the_future_cannot_be_seen():
    """Gradient of one position's logits with respect to every token's own row of the table (no token occurs twice)."""
    params, bias = arrays(FULL)
    at = 17  # inside the second chunk of 16

    def probe(table, params):
        module = blueprint(FULL).module(params | {"embed": {"table": table}}, bias)
        return jnp.sum(jnp.sin(module.logits(jnp.asarray(TOKENS), jnp.asarray(ONES))[0][0, at]))

    grad = compiled(jax.grad(probe), params["embed"]["table"], params)(params["embed"]["table"], params)
    size = np.abs(np.asarray(grad)[TOKENS[0]]).max(axis=1)
    assert np.all(size[: at + 1] > 0)
    assert np.all(size[at + 1 :] == 0)


def test_packed_documents_are_documents_alone():
    params, bias = arrays(BLOCKS)
    cuts = [0, 9, 10, 20]
    segment_ids = np.zeros_like(TOKENS)
    for number, (start, stop) in enumerate(zip(cuts, cuts[1:], strict=False)):
        segment_ids[:, start:stop] = number + 1
    _, packed = forward(BLOCKS)(params, bias, TOKENS, segment_ids)
    for start, stop in zip(cuts, cuts[1:], strict=False):
        alone, real = np.zeros_like(TOKENS), np.zeros_like(TOKENS)
        alone[:, : stop - start], real[:, : stop - start] = TOKENS[:, start:stop], 1
        _, logits = forward(BLOCKS)(params, bias, alone, real)
        assert_close(packed[:, start:stop], logits[:, : stop - start], "same model", f"document at {start}")


def test_padding_does_nothing():
    params, bias = arrays(BLOCKS)
    segment_ids = np.where(np.arange(LENGTH) < 19, 1, 0)[None].astype(np.int32)
    other = np.where(segment_ids > 0, TOKENS, 63 - TOKENS).astype(np.int32)
    _, one = forward(BLOCKS)(params, bias, TOKENS, segment_ids)
    _, two = forward(BLOCKS)(params, bias, other, segment_ids)
    np.testing.assert_array_equal(one[:, :19], two[:, :19])
    _, alone = forward(BLOCKS)(params, bias, TOKENS, ONES)
    assert_close(one[:, :19], alone[:, :19], "same model")
