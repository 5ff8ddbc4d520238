from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.ops.grouped_matmul import IMPLEMENTATIONS, _tiling, expert_mlp, grouped_matmul, plan_groups
from k3train.ops.situ import situ_glu
from tests.tolerances import assert_close


def loop(x_PL, weights_PK, ids_PK, w1_ELF, w3_ELF, w2_EFL):
    """Every expert on every token, masked to the tokens that chose it."""
    out_PL = jnp.zeros((x_PL.shape[0], w2_EFL.shape[2]))
    for e in range(w1_ELF.shape[0]):
        weight_P = jnp.sum(jnp.where(ids_PK == e, weights_PK, 0), axis=1)
        out_PL += weight_P[:, None] * (situ_glu(x_PL @ w1_ELF[e], x_PL @ w3_ELF[e]) @ w2_EFL[e])
    return out_PL


def make(ids_PK, experts, width=6, inner=5, seed=0):
    ids_PK = jnp.asarray(ids_PK, jnp.int32)
    keys = jax.random.split(jax.random.key(seed), 6)
    x_PL = jax.random.normal(keys[0], (ids_PK.shape[0], width))
    weights_PK = jax.random.uniform(keys[1], ids_PK.shape)
    w1, w3 = (jax.random.normal(k, (experts, width, inner)) for k in keys[2:4])
    w2 = jax.random.normal(keys[4], (experts, inner, width))
    return (x_PL, weights_PK, w1, w3, w2), ids_PK, jax.random.normal(keys[5], x_PL.shape)


def value_and_grads(function, arrays, cotangent):
    y, pull = jax.vjp(function, *arrays)
    return y, *pull(cotangent)


@partial(jax.jit, static_argnames="implementation")
def run(arrays, ids_PK, cotangent, implementation):
    def function(x, weights, w1, w3, w2):
        plan = plan_groups(ids_PK, w1.shape[0])
        return expert_mlp(x, weights, plan, w1, w3, w2, activation=situ_glu, implementation=implementation)

    return value_and_grads(function, arrays, cotangent)


@jax.jit
def run_loop(arrays, ids_PK, cotangent):
    return value_and_grads(lambda x, weights, *rest: loop(x, weights, ids_PK, *rest), arrays, cotangent)


def distinct(tokens, experts, k, seed=0):
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((tokens, experts)), axis=1)[:, :k]


EVEN = distinct(40, 8, 3)
CASES = {
    "even": (EVEN, 8),
    "all to one expert": (np.full((40, 3), 5), 8),
    "few of many": (5 + distinct(40, 3, 3), 8),
    "half elsewhere": (np.where(EVEN < 4, EVEN, 8 + EVEN % 3), 8),
    "all elsewhere": (np.full((40, 3), 8), 8),
    "one token": (distinct(1, 4, 4), 4),
    "every expert": (distinct(9, 4, 4), 4),
    "skewed and ragged": (np.minimum(np.random.default_rng(3).geometric(0.3, (333, 1)) - 1, 15), 16),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equals_the_loop_over_experts(name, implementation):
    ids, experts = CASES[name]
    arrays, ids_PK, cotangent = make(ids, experts)
    wanted = run_loop(arrays, ids_PK, cotangent)
    got = run(arrays, ids_PK, cotangent, implementation)
    for what, a, b in zip(("y", "dx", "dweights", "dw1", "dw3", "dw2"), got, wanted, strict=True):
        assert_close(a, b, "op" if what == "y" else "op gradient", f"{name} {what}")
    unused = [e for e in range(experts) if e not in ids]
    assert not any(np.asarray(d)[unused].any() for d in got[3:])


def test_released_router_width():
    """896 experts, top-16, half of the tokens choosing the highest indices only."""
    ids = distinct(48, 896, 16)
    ids[::2] = 880 + distinct(24, 16, 16)
    arrays, ids_PK, cotangent = make(ids, 896, width=4, inner=3)

    def by_pair(x_PL, weights_PK, w1, w3, w2):
        gate, up = (jnp.einsum("PL,PKLF->PKF", x_PL, w[ids_PK]) for w in (w1, w3))
        return jnp.einsum("PKF,PKFL,PK->PL", situ_glu(gate, up), w2[ids_PK], weights_PK)

    wanted = value_and_grads(by_pair, arrays, cotangent)
    for a, b in zip(run(arrays, ids_PK, cotangent, "blocked"), wanted, strict=True):
        assert_close(a, b, "op gradient")


def test_implementations_agree_in_bfloat16():
    arrays, ids_PK, cotangent = make(distinct(64, 8, 3), 8, width=16, inner=24)
    x, weights, w1, w3, w2 = arrays
    arrays = (x.astype(jnp.bfloat16), weights, *(0.3 * w.astype(jnp.bfloat16) for w in (w1, w3, w2)))
    blocked, ragged = (run(arrays, ids_PK, cotangent, i) for i in ("blocked", "ragged"))
    assert blocked[0].dtype == jnp.float32 and blocked[1].dtype == jnp.bfloat16 and blocked[2].dtype == jnp.float32
    for a, b in zip(blocked, ragged, strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.abs(a - b).max() < 0.02 * np.abs(b).max()


def test_inside_scan_with_rematerialisation():
    arrays, ids_PK, cotangent = make(distinct(24, 8, 2), 8)

    def layer(x, _):
        plan = plan_groups(ids_PK, 8)
        return expert_mlp(x, arrays[1], plan, *arrays[2:], activation=situ_glu, implementation="blocked"), None

    def deep(step):
        return jax.grad(lambda x: jnp.sum(jax.lax.scan(step, x, None, length=3)[0] * cotangent))(arrays[0])

    kept, recomputed = (jax.jit(deep, static_argnums=0)(step) for step in (layer, jax.checkpoint(layer)))
    np.testing.assert_array_equal(kept, recomputed)


def test_plan_is_stable_and_counts_what_is_here():
    plan = plan_groups(jnp.asarray([[2, 0], [7, 2], [0, 4]]), 4)
    np.testing.assert_array_equal(plan.order_N, [1, 4, 0, 3, 2, 5])
    np.testing.assert_array_equal(plan.sizes_E, [2, 0, 2, 0])


def test_grouped_matmul_rows_past_the_groups_are_zero():
    x, w = jnp.ones((5, 3)), jnp.stack([jnp.ones((3, 2)), 2 * jnp.ones((3, 2))])
    got = grouped_matmul(x, w, jnp.asarray([1, 2], jnp.int32))
    np.testing.assert_array_equal(got, np.asarray([3, 6, 6, 0, 0])[:, None] * np.ones((1, 2)))


def test_unknown_implementation():
    arrays, ids_PK, _ = make(distinct(4, 4, 2), 4)
    with pytest.raises(ValueError, match="accepted: blocked, ragged"):
        expert_mlp(*arrays[:2], plan_groups(ids_PK, 4), *arrays[2:], activation=situ_glu, implementation="dense")


def test_a_decode_step_computes_no_more_blocks_than_it_has_pairs():
    """Four pairs of one token, sixteen experts: unfilled blocks would cost as much as filled ones."""
    block, group = _tiling(4, 16, 256)
    assert block * group <= 4 * 8
    assert _tiling(8192, 16, 256)[1] > 1
