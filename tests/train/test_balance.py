"""Balancing in the step: the same bias however the batch is computed, and nothing but training steps moves it."""

from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.config.schema import ModelConfig, OptimConfig
from k3train.core.tree import leaves, map_leaves
from k3train.model.block import LayerStats
from k3train.model.k3 import blueprint
from k3train.model.layout import layout, slots
from k3train.model.moe import MoERun
from k3train.model.router import RouterStats
from k3train.ops import quantile
from k3train.parallel.mesh import make_mesh
from k3train.train import balance
from k3train.train.layer_stats import metrics
from k3train.train.loss import token_loss
from k3train.train.step import Program
from tests.tolerances import assert_close
from tests.train import micro

#: Two MoE layers and nothing else that takes long to compile.
MODEL = replace(
    micro.MODEL, num_layers=2, kda_layers=(), mla_layers=(0, 1), dense_layers=(), moe_layers=(0, 1), attn_res="none",
    moe_latent_size=0, num_shared_experts=0, remat="none",
)  # fmt: skip


def program(mesh=None, remat="none", micro_batches=1, **optim):
    mesh = mesh or {}
    config = micro.config(mesh=mesh, micro_batches=micro_batches, matrices="adamw", **optim)
    config = replace(config, model=replace(MODEL, remat=remat))
    return Program(config, make_mesh(mesh, jax.devices()[: int(np.prod(list(mesh.values()) or [1]))]))


def skewed(run):
    """A fresh state whose routers prefer a few experts."""
    state = run.init()
    tilt = jnp.linspace(0.1, -0.1, MODEL.num_experts)
    return state._replace(bias=map_leaves(lambda b: b + tilt, state.bias))


def after(run, batch, steps=2):
    """(biases, metrics) after that many steps on one batch."""
    state, found = skewed(run), {}
    for _ in range(steps):
        state, found = run.train_step(state, run.put_batch(batch))
    (_, bias), *others = leaves(jax.device_get(state.bias))
    assert not others
    return bias, jax.device_get(found)


@pytest.fixture(scope="module")
def plain():
    return program()


@pytest.fixture(scope="module")
def wanted(plain):
    return after(plain, micro.batch())


def test_the_fixture_moves_the_bias(plain, wanted):
    (_, start), *_ = leaves(jax.device_get(skewed(plain).bias))
    bias, found = wanted
    assert bias.shape == (2, 16) and np.abs(bias - start).max() > 0.02
    tokens = (micro.batch()["segment_ids"] > 0).sum()
    assert found["expert_loads"].shape == (2, 16)
    np.testing.assert_array_equal(found["expert_loads"].sum(-1), [tokens * 4] * 2)


def test_how_a_batch_is_computed_does_not_matter(wanted):
    """Every token counts once: not again when recomputed, nor on each device that holds it, nor per micro-batch."""
    other = program({"data": 2, "tensor": 2}, remat="sublayer", micro_batches=2)
    bias, found = after(other, micro.batch())
    np.testing.assert_array_equal(found["expert_loads"], wanted[1]["expert_loads"])
    assert_close(bias, wanted[0], "router bias")


def test_what_padding_holds_does_not_matter(plain, wanted):
    batch = micro.batch()
    padding = batch["segment_ids"] == 0
    assert padding.sum() > 50
    other = batch | {"tokens": np.where(padding, 1, batch["tokens"]).astype(np.int32)}
    bias, found = after(plain, other)
    np.testing.assert_array_equal(bias, wanted[0])
    np.testing.assert_array_equal(found["expert_loads"], wanted[1]["expert_loads"])


def test_evaluation_does_not_matter(plain, wanted):
    state, batch = skewed(plain), plain.put_batch(micro.batch())
    for _ in range(2):
        before = jax.device_get(state.bias)
        plain.eval_step(state.params, state.bias, plain.put_batch(micro.batch(5)))
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.bias), before)
        state, _ = plain.train_step(state, batch)
    (_, bias), *_ = leaves(jax.device_get(state.bias))
    np.testing.assert_array_equal(bias, wanted[0])


def test_the_exact_estimator_pools_every_margin(plain):
    """Of micro-batches and devices: the mesh finds what one device finds from the margins of the whole batch."""
    pooled = program({"data": 2, "tensor": 2}, micro_batches=2, balance="quantile_exact")
    bias, _ = after(pooled, micro.batch(), steps=1)
    state = skewed(plain)
    known = blueprint(MODEL, MoERun(balance.margins(pooled.config.optim)))

    @jax.jit
    def whole(params, start, batch):
        _, stats = token_loss(known, params, start, batch, collect=True)
        return balance.balanced(pooled.config.optim, start, stats, MODEL.num_experts_per_token)

    exact = np.asarray(_bias(whole(state.params, state.bias, plain.put_batch(micro.batch()))))
    assert_close(bias, exact, "router bias")
    histogram, _ = after(plain, micro.batch(), steps=1)
    assert 0 < np.abs(exact - histogram).max() < 2 * 2.2 / 200  # appendix D is one order statistic off
    assert np.abs(exact.mean(-1)).max() < 1e-6


# ---- the rules themselves, on statistics made up here

BIAS = {"backbone": {"runs": {"0": {"0": {"0": {"channel": {"router": {"bias": jnp.asarray([[0.3, -0.1, -0.2]])}}}}}}}}
MARGINS = quantile.margins(
    jnp.asarray(np.random.default_rng(0).uniform(size=(1, 90, 3)), jnp.float32),
    jnp.full((1, 90), 0.5),
    jnp.ones((1, 90), bool),
)


def moved(**optim):
    """Bias after one update of [60, 30, 0] tokens."""
    config = micro.config(**optim).optim
    counts = jax.vmap(lambda m, b: quantile.histogram(m, b, num_bins=200))(MARGINS, _bias(BIAS))
    stats = [[[LayerStats(RouterStats(jnp.asarray([[60, 30, 0]]), counts, MARGINS), None)]]]
    return np.asarray(_bias(balance.balanced(config, BIAS, stats, num_selected=1)))


def _bias(tree):
    ((_, bias),) = leaves(tree)
    return bias


def test_rules():
    start = np.asarray(_bias(BIAS))
    np.testing.assert_array_equal(moved(balance="none"), start)
    assert_close(moved(balance="sign", balance_sign_step=0.5), start + [[-0.5, 0.0, 0.5]], "op")
    exact = quantile.exact_bias(MARGINS[0], start[0], num_selected=1)[None]
    assert_close(moved(balance="quantile_exact"), exact, "op")
    assert np.abs(moved() - exact).max() < 2 * 2.5 / 200
    for rule in ("quantile", "quantile_exact"):
        assert_close(moved(balance=rule, balance_ema=0.75), 0.75 * start + 0.25 * moved(balance=rule), "op")


def test_routers_keep_only_what_the_rule_needs():
    kinds = {rule: balance.margins(micro.config(balance=rule).optim).kind for rule in balance_rules()}
    assert kinds == {"quantile": "histogram", "quantile_exact": "all", "sign": "none", "none": "none"}


def balance_rules():
    (field,) = (f for f in fields(OptimConfig) if f.name == "balance")
    return field.metadata["choices"]


def test_loads_are_in_the_order_of_the_layers():
    """Six layers, five of them MoE, in stacks that repeat a period: the rows of the metric are the layers in order."""
    config = ModelConfig(
        num_layers=6, kda_layers=(0, 1, 2, 4), mla_layers=(3, 5), dense_layers=(0,), moe_layers=(1, 2, 3, 4, 5),
        attn_res_block_size=2, num_experts=4, num_experts_per_token=1,
    )  # fmt: skip
    places = slots(config)
    stats = [[[None for _ in segment.period] for segment in run.segments] for run in layout(config)]
    for r, run in enumerate(layout(config)):
        for s, segment in enumerate(run.segments):
            for p, kind in enumerate(segment.period):
                layers = sorted((place.index, layer) for layer, place in enumerate(places) if place[:3] == (r, s, p))
                load = jnp.asarray([[layer, 0, 0, 0] for _, layer in layers], jnp.int32)
                stats[r][s][p] = LayerStats(RouterStats(load) if kind.channel == "moe" else None, None)
    found = metrics(config, stats, jnp.int32(3))
    np.testing.assert_array_equal(found["expert_loads"][:, 0], [1, 2, 3, 4, 5])
    assert found["router/max_over_mean_load"] == 4 and found["router/min_over_mean_load"] == 0
    assert found["router/dropped_fraction"] == 0  # 15 assignments: five layers of three tokens
    assert "mla/max_logit" not in found
