import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from k3train.ops.mx import E2M1, E4M3, Rounding
from k3train.ops.routing import route
from k3train.ops.situ import situ_glu
from k3train.parallel.expert import PLAIN, route_tokens, routed_experts
from k3train.parallel.mesh import make_mesh, use_mesh
from k3train.parallel.rules import spec
from tests.tolerances import assert_close

MESHES = [
    {"data": 8},
    {"expert": 8},
    {"data": 2, "expert": 4},
    {"data": 2, "expert": 2, "tensor": 2},
]
NAMES = (
    ("act_batch", "act_seq", None),
    ("act_batch", "act_seq", None),
    ("experts", "expert_in", "expert_mlp"),
    ("experts", "expert_in", "expert_mlp"),
    ("experts", "expert_mlp", "expert_in"),
)


def make(experts=16, chosen=4, rows=8, seq=6, width=16, inner=8, skew=0.0):
    keys = jax.random.split(jax.random.key(0), 6)
    x_BSL = jax.random.normal(keys[0], (rows, seq, width))
    offset_E = skew * jnp.arange(experts, dtype=jnp.float32)
    routes = route(jax.random.normal(keys[1], (rows, seq, experts)) + offset_E, jnp.zeros(experts), num_selected=chosen)
    w1, w3 = (jax.random.normal(k, (experts, width, inner)) / width**0.5 for k in keys[2:4])
    w2 = jax.random.normal(keys[4], (experts, inner, width)) / inner**0.5
    return (x_BSL, routes.weights_PK, w1, w3, w2), routes.ids_PK, jax.random.normal(keys[5], x_BSL.shape)


def layer(arrays, ids_BSK, cotangent, sharing=PLAIN):
    def function(x, weights, w1, w3, w2):
        # a second pass through the same experts inside a rematerialised scan, as in a stack of layers
        def step(x, _):
            return x + routed_experts(x, ids_BSK, weights, w1, w3, w2, activation=situ_glu, sharing=sharing), None

        return jax.lax.scan(jax.checkpoint(step), x, None, length=2)[0]

    y, pull = jax.vjp(function, *arrays)
    return y, *pull(cotangent)


def on_mesh(sizes, arrays, ids_BSK, cotangent):
    mesh = make_mesh(sizes)
    with use_mesh(mesh):
        placed = tuple(
            jax.device_put(a, NamedSharding(mesh, spec(names))) for a, names in zip(arrays, NAMES, strict=True)
        )
        return jax.jit(layer)(placed, ids_BSK, cotangent)


def assert_same(got, wanted):
    for what, a, b in zip(("y", "dx", "dweights", "dw1", "dw3", "dw2"), got, wanted, strict=True):
        assert_close(a, b, "mesh op" if what == "y" else "mesh op gradient", what)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("skew", [0.0, 3.0])
def test_equals_one_device(sizes, skew):
    inputs = make(skew=skew)
    assert_same(on_mesh(sizes, *inputs), jax.jit(layer)(*inputs))


def test_released_router_width():
    inputs = make(experts=896, chosen=16, rows=8, seq=4, width=8, inner=4, skew=0.01)
    assert int(inputs[1].max()) == 895
    assert_same(on_mesh({"data": 2, "expert": 4}, *inputs), jax.jit(layer)(*inputs))


def test_rows_that_the_mesh_does_not_divide():
    """A lone prompt on eight devices."""
    inputs = make(rows=1, seq=5)
    arrays, ids, cotangent = inputs
    wanted = jax.jit(layer)(*inputs)
    with use_mesh(make_mesh({"data": 2, "expert": 4})):
        assert_same(jax.jit(layer)(arrays, ids, cotangent), wanted)


@pytest.mark.parametrize("rows", [8, 3])
def test_routing_is_the_same_and_stays_local(rows):
    logits = jax.random.normal(jax.random.key(0), (rows, 5, 32))
    bias = 0.1 * jax.random.normal(jax.random.key(1), (32,))

    def both(logits, bias):
        routes = route_tokens(logits, bias, num_selected=4, scaling_factor=2.0)
        return jnp.sum(jnp.sin(jnp.arange(4)) * routes.weights_PK), routes

    def run(logits, bias):
        return jax.value_and_grad(both, argnums=(0, 1), has_aux=True)(logits, bias)

    (_, wanted), wanted_grads = jax.jit(run)(logits, bias)
    mesh = make_mesh({"data": 2, "expert": 2, "tensor": 2})
    with use_mesh(mesh):
        if rows == 8:
            logits = jax.device_put(logits, NamedSharding(mesh, spec(("act_batch", "act_seq", None))))
        compiled = jax.jit(run).lower(logits, bias).compile()
        (_, got), got_grads = compiled(logits, bias)
    jax.tree.map(np.testing.assert_array_equal, got, wanted)
    for a, b in zip(got_grads, wanted_grads, strict=True):
        assert_close(a, b, "mesh op gradient")
    if rows == 8:
        assert "all-gather" not in compiled.as_text()


def plainly(rounding, activation):
    """Every expert on every token, rounded one by one: nothing of the code under test but the rounding."""

    def function(x_BSL, weights_BSK, w1_ELF, w3_ELF, w2_EFL, ids_BSK):
        x_BSL = rounding(x_BSL)
        gate, up = (jnp.einsum("BSL,ELF->BSEF", x_BSL, w) for w in (w1_ELF, w3_ELF))
        y_BSEL = jnp.einsum("BSEF,EFL->BSEL", rounding(activation(gate, up)), w2_EFL)
        combine_BSE = jnp.sum(jax.nn.one_hot(ids_BSK, len(w1_ELF)) * weights_BSK[..., None], axis=2)
        return jnp.einsum("BSEL,BSE->BSL", y_BSEL, combine_BSE)

    return function


@pytest.mark.parametrize("saturated", ["pass", "zero"])
def test_rounded_inputs(saturated):
    """Tokens and activated inputs in MXFP8, on one device and on a mesh: values and straight-through gradients."""
    rounding = Rounding(E4M3, "floor", saturated)
    (x, weights, w1, w3, w2), ids, cotangent = make(width=64, inner=64)
    w1, w3, w2 = (Rounding(E2M1)(w, axis=1) for w in (w1, w3, w2))
    arrays = (x, weights, w1, w3, w2)

    def ours(*arrays):
        x, weights, w1, w3, w2 = arrays
        return routed_experts(x, ids, weights, w1, w3, w2, activation=situ_glu, rounding=rounding)

    def pulled(function):
        y, pull = jax.vjp(function, *arrays)
        return y, *pull(cotangent)

    reference = plainly(rounding, situ_glu)
    wanted = jax.jit(lambda: pulled(lambda *a: reference(*a, ids)))()
    unrounded = jax.jit(lambda: pulled(lambda *a: plainly(lambda z: z, situ_glu)(*a, ids)))()
    assert np.abs(unrounded[0] - wanted[0]).max() > 1e-2
    assert_same(jax.jit(lambda: pulled(ours))(), wanted)
    with use_mesh(make_mesh({"data": 2, "expert": 2, "tensor": 2})):
        assert_same(jax.jit(lambda: pulled(ours))(), wanted)
