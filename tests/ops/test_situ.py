from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.ops.situ import situ_glu, swiglu
from tests.tolerances import assert_close

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "situ.npz")


def grid(dtype=jnp.float32):
    gate, up = np.meshgrid(GOLDEN["grid"], GOLDEN["grid"], indexing="ij")
    return jnp.asarray(gate, dtype), jnp.asarray(up, dtype)


def derivatives(function, gate, up):
    y, pull = jax.vjp(function, gate, up)
    return y, *pull(jnp.ones_like(y))


def test_values_and_derivatives_on_the_golden_grid():
    y, dgate, dup = jax.jit(lambda g, u: derivatives(situ_glu, g, u))(*grid())
    assert_close(y, GOLDEN["y"], "op", "y")
    assert_close(dgate, GOLDEN["dy_dgate"], "op gradient", "dgate")
    assert_close(dup, GOLDEN["dy_dup"], "op gradient", "dup")
    assert np.abs(y).max() <= 100.0


def test_small_values_keep_their_relative_precision():
    gate, up = jnp.asarray(GOLDEN["fine_x"], jnp.float32), jnp.ones(1601, jnp.float32)
    y, dgate, _ = derivatives(situ_glu, gate, up)
    up_branch = 25.0 * np.tanh(1.0 / 25.0)
    np.testing.assert_allclose(y, GOLDEN["fine_gate"] * up_branch, rtol=2e-5, atol=1e-12)
    # 1 - tanh^2 is exact to one step of float32 near 1, not relative to itself
    np.testing.assert_allclose(dgate, GOLDEN["fine_dgate"] * up_branch, rtol=2e-5, atol=6e-7)


def test_check_values_of_the_fact_sheet():
    gate, up = jnp.asarray([1.0, 10.0, 100.0, -5.0]), jnp.asarray([1.0, 10.0, 100.0, 3.0])
    np.testing.assert_allclose(situ_glu(gate, up), [0.715818, 37.484606, 99.932930, -0.067804], rtol=2e-5)


def test_own_derivative_equals_autodiff():
    def plain(gate, up):
        return 2.0 * jnp.tanh(gate / 2.0) * jax.nn.sigmoid(gate) * 5.0 * jnp.tanh(up / 5.0)

    key = jax.random.key(0)
    gate, up = 3.0 * jax.random.normal(key, (2, 50, 7))
    got = derivatives(lambda g, u: situ_glu(g, u, beta=2.0, linear_beta=5.0), gate, up)
    for a, b in zip(got, derivatives(plain, gate, up), strict=True):
        assert_close(a, b, "op gradient")


def test_bfloat16_is_float32_inside():
    gate, up = grid(jnp.bfloat16)
    y, dgate, _ = derivatives(situ_glu, gate, up)
    assert y.dtype == dgate.dtype == jnp.bfloat16
    wanted = GOLDEN["y_bf16_in_fp32_math_bf16_out"]
    # equal bit for bit, but for what depends on flushing denormals: sigmoid(-88) and products below 1e-38
    np.testing.assert_allclose(np.asarray(y, np.float32), wanted, rtol=0, atol=1e-36)
    assert np.isfinite(np.asarray(dgate, np.float32)).all()


@pytest.mark.parametrize(("dtype", "rtol"), [(jnp.float32, 1e-5), (jnp.bfloat16, 1e-2)])
def test_swiglu_is_the_limit_of_large_caps(dtype, rtol):
    gate, up = jax.random.normal(jax.random.key(1), (2, 64)).astype(dtype)
    got, wanted = swiglu(gate, up), situ_glu(gate, up, beta=1e4, linear_beta=1e4)
    assert got.dtype == dtype
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(wanted, np.float32), rtol=rtol)
    y, dgate, dup = derivatives(swiglu, jnp.asarray([3e38, -3e38]), jnp.ones(2))
    assert np.isfinite([y, dgate, dup]).all()
