"""Training with routed experts quantised in the loop: masters in full precision, one rounding for all who see them."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from k3train.config.schema import QuantConfig
from k3train.core.tree import leaves
from k3train.model.k3 import blueprint
from k3train.model.moe import MoERun
from k3train.model.quantise import input_rounding, rounded_params
from k3train.parallel.mesh import make_mesh
from k3train.train.loss import token_loss
from k3train.train.step import Program
from tests.tolerances import assert_close
from tests.train import micro

QUANT = QuantConfig(experts="mxfp4_mxfp8", saturated_grad="zero")


def program(sizes=None, quant=QUANT, **changes):
    """Widths of whole blocks, also where `data` splits them in two; layers recomputed in the backward pass."""
    config = micro.config(mesh=sizes or {}, **changes)
    model = replace(micro.TWO_LAYERS, moe_latent_size=64, moe_intermediate_size=32)
    config = replace(config, model=model, quant=quant)
    return Program(config, make_mesh(sizes or {}, jax.devices()[: int(np.prod(list((sizes or {}).values()) or [1]))]))


@pytest.fixture(scope="module")
def whole():
    return program()


@pytest.fixture(scope="module")
def one_step(whole):
    """(state before, state after, metrics) of one step on one device."""
    before = jax.device_get(whole.init())
    return before, *jax.device_get(whole.train_step(whole.init(), whole.put_batch(micro.batch())))


def test_training_and_evaluation_see_the_same_rounded_model(whole, one_step):
    before, _, metrics = one_step
    held_out = jax.device_get(whole.eval_step(before.params, before.bias, whole.put_batch(micro.batch())))
    # an activation that another order of additions moves by an ulp may be rounded the other way
    assert_close(held_out["loss_sum"] / held_out["tokens"], metrics["loss"], "same model")

    # by hand: rounded experts in an ordinary model whose layers round their experts' inputs
    config = whole.config
    model = blueprint(config.model, MoERun(rounding=input_rounding(QUANT)))
    params = rounded_params(before.params, model.infos, QUANT)

    @jax.jit
    def losses(params, masters):
        rounded = token_loss(model, params, before.bias, micro.batch(), collect=False)[0]
        plain = token_loss(blueprint(config.model), masters, before.bias, micro.batch(), collect=False)[0]
        return rounded.loss / rounded.tokens, plain.loss / plain.tokens

    rounded, plain = losses(params, before.params)
    assert_close(metrics["loss"], rounded, "same model")
    assert abs(plain / metrics["loss"] - 1) > 5e-4


def test_masters_and_moments_stay_in_full_precision(whole, one_step):
    before, after, metrics = one_step
    assert all(x.dtype in (np.float32, np.int32) for x in jax.tree.leaves(after))
    assert np.isfinite(metrics["loss"]) and metrics["nonfinite_steps"] == 0
    rounded = dict(leaves(rounded_params(after.params, whole.blueprint.infos, QUANT)))
    for (path, new), (_, old), (_, info) in zip(
        leaves(after.params), leaves(before.params), leaves(whole.blueprint.infos), strict=True
    ):
        if info.quantised:  # all weights moved (but for an ulp), and not onto the grid
            assert (new != old).mean() > 0.99 and (new != rounded[path]).mean() > 0.9, path


def test_a_learning_rate_of_zero_moves_no_bit_on_a_mesh_with_accumulation(one_step):
    before, _, wanted = one_step
    parts = program({"data": 2, "expert": 4}, micro_batches=2, peak_lr=0.0, final_lr=0.0)
    state, metrics = jax.device_get(parts.train_step(parts.init(), parts.put_batch(micro.batch())))
    for (path, new), (_, old) in zip(leaves(state.params), leaves(before.params), strict=True):
        assert new.tobytes() == old.tobytes(), path
    assert_close(metrics["loss"], wanted["loss"], "same model")
    assert_close(metrics["grad_norm"], wanted["grad_norm"], "mesh gradient")
    assert metrics["router/dropped_fraction"] == 0
