"""Any mesh gives the single-device loss, router choices and gradients: packed rows, skewed router, everything on."""

from functools import cache

import jax
import numpy as np
import pytest

from k3train.core.tree import leaves, map_leaves
from k3train.model.k3 import blueprint
from k3train.model.moe import MoERun
from k3train.model.router import Margins
from k3train.parallel.expert import Sharing
from k3train.parallel.mesh import make_mesh, use_mesh
from k3train.parallel.rules import param_shardings, spec
from k3train.train.loss import token_loss
from tests.tolerances import assert_close
from tests.train import micro

BINS = 50


MODEL = blueprint(micro.MODEL, MoERun(Margins("histogram", BINS), sharing=Sharing("equal")))


@cache
def point():
    """(parameters, router bias) that everything is computed at, on the host."""
    params, bias = MODEL.init(3)
    # Queries at zero would hide the readers' gradients. At this point one ulp of the parameters moves the gradients by
    # about 2e-5, so the tolerance measures the mesh and not the conditioning of the network.

    def wake(p, info):
        return p + 0.1 if info.component == "attention residuals" else p

    params = map_leaves(wake, params, MODEL.infos)
    params["embed"]["table"] *= 5
    return jax.device_get((params, bias))


def run(sizes, *skews):
    """(loss, gradients, loads, histograms) of one batch on the mesh, for every skew of the router."""
    params, bias = point()
    mesh = make_mesh(sizes, jax.devices()[: int(np.prod(list(sizes.values()) or [1]))])
    params = jax.tree.map(jax.device_put, params, param_shardings(MODEL.infos, mesh))
    sharding = jax.sharding.NamedSharding(mesh, spec(("act_batch", "act_seq")))
    batch = {name: jax.device_put(rows, sharding) for name, rows in micro.batch().items()}

    def loss(params, bias, batch):
        sums, stats = token_loss(MODEL, params, bias, batch, collect=True)
        return sums.loss / sums.tokens, stats

    gradient, found = jax.jit(jax.value_and_grad(loss, has_aux=True)), []
    for skewed in skews:
        # the skew sends most tokens to three experts of one device
        skew = np.where(np.arange(micro.MODEL.num_experts) < 3, np.float32(0.4 if skewed else 0), np.float32(0))
        with use_mesh(mesh):
            (value, stats), grads = gradient(params, jax.tree.map(lambda b, skew=skew: b + skew, bias), batch)
        layers = [layer for stack in stats for segment in stack for layer in segment]
        routers = [layer.router for layer in layers if layer.router is not None]
        logits = [layer.max_logit for layer in layers if layer.max_logit is not None]
        found.append(jax.device_get((value, grads, routers, logits)))
    return found


@pytest.fixture(scope="module")
def one_device():
    return dict(zip((False, True), run({}, False, True), strict=True))


MESHES = [{"data": 8}, {"expert": 8}, {"data": 2, "expert": 4}, {"data": 2, "expert": 2, "tensor": 2}]


@pytest.mark.parametrize("sizes", MESHES, ids=lambda s: "x".join(map(str, s.values())) + "-" + "-".join(s))
def test_a_mesh_equals_one_device(sizes, one_device):
    skewed = sizes.get("expert", 1) > 1
    ((value, grads, routers, logits),) = run(sizes, skewed)
    expected, wanted, wanted_routers, wanted_logits = one_device[skewed]
    assert_close(value, expected, "mesh loss")
    for got, want in zip(routers, wanted_routers, strict=True):
        np.testing.assert_array_equal(got.load, want.load)
        # float32 margins within rounding of a bin border may fall into the neighbouring bin: few, and never further
        difference = got.histogram - want.histogram
        moved = np.abs(difference).sum() // 2
        assert moved <= 3 and np.abs(np.cumsum(difference, axis=-1)).sum() == moved
    assert_close(logits, wanted_logits, "op")
    wanted = dict(leaves(wanted))
    for path, grad in leaves(grads):
        assert_close(grad, wanted[path], "mesh gradient", path)
    tokens = (micro.batch()["segment_ids"] > 0).sum()
    assert all(router.load.sum(-1) == tokens * micro.MODEL.num_experts_per_token for router in wanted_routers)
