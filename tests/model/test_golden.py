"""The assembled model against independent implementations, float32: tests/data/README.md says whose."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.checkpoint.hf_names import entries, trim_a_log
from k3train.core.tree import leaves
from k3train.model.k3 import blueprint, init_cache
from k3train.ops.cross_entropy import cross_entropy_sum
from tests.model.golden_models import compiled, every_layer, imported, io
from tests.tolerances import assert_close

MODELS = {"kimi_linear_tiny": "kimi_linear", "k3_tiny": "k3"}  # and the layout of the release
LENGTH, PREFILL = 96, 50


@cache
def trained(name):
    """Compiled: ((loss, logits), gradients) of a batch of two rows of 96 tokens."""
    model = imported(name)
    # chunks of 16 compile in half the time and put more borders into a row; single layers and the prefill take 64
    plan = blueprint(replace(model.config, kda_chunk_size=16))

    def loss(params, bias, batch):  # the steps of train/loss.py, and the logits of the same forward pass
        module = plan.module(params, bias)
        hidden = module.hidden(batch["tokens"], batch["segment_ids"]).hidden
        mask = batch["loss_mask"]
        total = cross_entropy_sum(hidden, module.head.matrix[...], batch["targets"], mask)
        return total / mask.sum(), module.head(hidden)

    whole = jnp.zeros((2, LENGTH), jnp.int32)
    batch = {"tokens": whole, "segment_ids": whole, "targets": whole, "loss_mask": whole.astype(jnp.float32)}
    run = compiled(jax.value_and_grad(loss, has_aux=True), model.params, model.bias, batch)
    return lambda batch: run(model.params, model.bias, batch)


def decoded(model, tokens):
    """Logits of a prefill of the first tokens at once, then of every further token alone."""
    plan = blueprint(model.config)

    def prefill(params, bias, tokens):
        cache = init_cache(model.config, 2, tokens.shape[1] + 20)
        return plan.module(params, bias).logits(tokens, jnp.ones_like(tokens), cache=cache)

    def step(params, bias, cache, token):
        return plan.module(params, bias).logits(token, jnp.ones_like(token), cache=cache)

    args = model.params, model.bias
    logits, cache = compiled(prefill, *args, tokens[:, :PREFILL])(*args, tokens[:, :PREFILL])
    found, one = [logits], compiled(step, *args, cache, tokens[:, :1])
    for at in range(PREFILL, tokens.shape[1]):
        logits, cache = one(*args, cache, tokens[:, at : at + 1])
        found.append(logits)
    return jnp.concatenate(found, axis=1)


def padded(array, value=0):
    """Rows filled up on the right."""
    return jnp.pad(jnp.asarray(array), ((0, 0), (0, LENGTH - array.shape[1])), constant_values=value)


@pytest.fixture(scope="module", params=list(MODELS))
def golden(request):
    """(name, golden arrays, loss, logits, gradients of ours)."""
    wanted = io(request.param)
    tokens = wanted["input_ids"]
    ones = np.ones_like(tokens)
    batch = {
        "tokens": padded(tokens, imported(request.param).config.pad_token_id),
        "segment_ids": padded(ones),
        "targets": padded(tokens[:, 1:]),
        "loss_mask": padded(ones[:, 1:].astype(np.float32)),
    }
    (loss, logits), grads = trained(request.param)(batch)
    return request.param, wanted, loss, logits[:, : tokens.shape[1]], grads


def test_logits_and_loss(golden):
    name, wanted, loss, logits, _ = golden
    assert_close(logits, wanted["logits"], f"{MODELS[name]} logits")
    assert_close(loss, wanted["loss"], "golden loss")


@pytest.mark.parametrize("name", list(MODELS))
def test_prefill_and_decode_give_the_same_logits(name):
    """A prompt of 50 tokens at once, then 20 tokens one by one, against the logits of the whole rows."""
    wanted = io(name)
    logits = decoded(imported(name), jnp.asarray(wanted["input_ids"]))
    assert_close(logits, wanted["logits"], f"{MODELS[name]} logits")


def test_every_listed_gradient(golden):
    name, wanted, _, _, grads = golden
    assert compare_gradients(name, wanted, grads) == {"kimi_linear_tiny": 61, "k3_tiny": 150}[name]


def compare_gradients(name, wanted, grads):
    """Checks every golden gradient, in the names and layout of the release; returns how many."""
    flat, found = dict(leaves(grads)), 0
    for entry in entries(imported(name).config, MODELS[name]):
        for expert, released in enumerate(entry.names()):
            key = f"grad/{released.removeprefix('language_model.')}"
            if key not in wanted:
                continue
            parts = [np.asarray(flat[path][entry.where(i, expert)]) for i, path in enumerate(entry.paths)]
            got = entry.to_released(parts)
            if entry.rule.form == "a_log":
                got = trim_a_log(got, wanted[key].size).reshape(wanted[key].shape)
            assert_close(got, wanted[key], "model gradient", released)
            found += 1
    assert found == sum(key.startswith("grad/") for key in wanted)
    return found


@pytest.mark.parametrize("name", list(MODELS))
def test_inside_of_every_layer(name):
    """In order, so that the first layer that is off is the one reported."""
    wanted, model = io(name), imported(name)
    layers, depth = every_layer(model, wanted["input_ids"])
    at = wanted["positions_row0"]
    moe = {layer: i for i, layer in enumerate(wanted["router_layers"])}
    assert set(moe) == set(model.config.moe_layers)
    for number, seen in enumerate(layers):
        for part in ("attn_in", "attn_out", "mlp_in", "mlp_out", "layer_out"):
            if f"{part}_row0" in wanted:
                got = getattr(seen, part)[0, at]
                assert_close(got, wanted[f"{part}_row0"][number], "layer tensor", f"layer {number} {part}")
        if number in moe:
            np.testing.assert_array_equal(seen.router_topk_idx, wanted["router_topk_idx"][moe[number]])
            assert_close(
                seen.router_topk_weight, wanted["router_topk_weight"][moe[number]], "layer tensor", f"router {number}"
            )
    if "final_in_row0" in wanted:
        module = blueprint(model.config).module(model.params, model.bias)
        assert_close(module.output_reader(depth)[0, at], wanted["final_in_row0"], "layer tensor", "output reader")


def test_packed_rows_are_documents_alone():
    """Three documents in one row: logits of each document run alone, loss and gradients of the packed batch."""
    wanted = io("k3_tiny_packed")
    tokens, segment_ids, labels = (jnp.asarray(wanted[k]) for k in ("input_ids", "segment_ids", "labels"))
    mask = (labels >= 0).astype(jnp.float32)
    assert int(mask.sum()) == wanted["num_targets"]
    batch = {"tokens": tokens, "segment_ids": segment_ids, "targets": jnp.maximum(labels, 0), "loss_mask": mask}
    (loss, logits), grads = trained("k3_tiny")(batch)
    real = wanted["segment_ids"] > 0
    assert_close(np.asarray(logits)[real], wanted["logits"][real], "k3 logits")
    assert_close(loss, wanted["loss"], "golden loss")
    assert compare_gradients("k3_tiny", wanted, grads) == 8
