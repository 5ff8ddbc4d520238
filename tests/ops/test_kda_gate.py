"""Decay gates against their golden files, limits, shapes and initialisers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.ops.kda_gate import (
    a_log_uniform_init,
    a_log_zeros_init,
    bounded_log_decay,
    dt_bias_init,
    l2_normalise,
    softplus_log_decay,
)
from tests.ops.kda_cases import golden
from tests.tolerances import assert_close


@pytest.mark.parametrize("name", ["g_gate_lower_bound", "g2_gate_softplus"])
def test_golden(name):
    file = golden(name)
    raw, a_log, dt_bias = (jnp.asarray(file[key]) for key in ("raw_gate", "A_log", "dt_bias"))

    def gate(raw, a_log, dt_bias):
        z = raw + dt_bias.reshape(raw.shape[-2:])
        bound = file.get("lower_bound")
        return softplus_log_decay(z, a_log) if bound is None else bounded_log_decay(z, a_log, float(bound))

    out, pull = jax.vjp(gate, raw, a_log, dt_bias)
    assert out.dtype == jnp.float32
    assert_close(out, file["g_out"], "op", "gate")
    for key, grad in zip(("raw_gate", "A_log", "dt_bias"), pull(jnp.asarray(file["dg_out"])), strict=True):
        assert_close(grad, file[f"d{key}"], "op gradient", key)


def test_bounded_gate_limits():
    """docs/k3.md section 9: -2.5 at zero, the bound and no decay far out."""
    z = jnp.array([0.0, 1e4, -1e4]).reshape(3, 1, 1)
    np.testing.assert_allclose(bounded_log_decay(z, jnp.zeros(1), -5.0).ravel(), [-2.5, -5.0, 0.0], atol=1e-6)


def test_gates_are_float32_for_bfloat16_logits():
    z = jnp.ones((2, 3, 4), jnp.bfloat16)
    assert bounded_log_decay(z, jnp.zeros(3, jnp.bfloat16), -5.0).dtype == jnp.float32
    assert softplus_log_decay(z, jnp.zeros(3)).dtype == jnp.float32


@pytest.mark.parametrize("a_log_shape", [(1,), (4,), (3, 4), (3, 1), ()])
def test_wrong_shapes_are_refused(a_log_shape):
    z, a_log = jnp.zeros((2, 3, 4)), jnp.zeros(a_log_shape)
    for gate in (softplus_log_decay, lambda z, a_log: bounded_log_decay(z, a_log, -5.0)):
        with pytest.raises(ValueError, match="a_log"):
            gate(z, a_log)


@pytest.mark.parametrize("bound", [0.0, 5.0, float("nan")])
def test_bound_must_be_negative(bound):
    with pytest.raises(ValueError, match="lower_bound"):
        bounded_log_decay(jnp.zeros((2, 3, 4)), jnp.zeros(3), bound)


def test_l2_normalise():
    x = np.random.default_rng(0).normal(size=(5, 16)).astype(np.float32)
    x[0] = 0.0
    x[1] *= 1e-3
    wanted = x.astype(np.float64) / np.sqrt((x.astype(np.float64) ** 2).sum(-1, keepdims=True) + 1e-6)
    assert_close(l2_normalise(jnp.asarray(x)), wanted, "op")
    grad = jax.grad(lambda x: jnp.sum(l2_normalise(x)))(jnp.asarray(x))
    assert np.isfinite(grad).all()
    assert l2_normalise(jnp.asarray(x, jnp.bfloat16)).dtype == jnp.float32


def test_dt_bias_init_is_an_inverse_softplus():
    dt = np.asarray(jax.nn.softplus(dt_bias_init(jax.random.key(0), (64, 64))))
    assert 0.99e-3 < dt.min() < 1.1e-3 and 0.09 < dt.max() < 0.101
    assert abs(np.log(dt).mean() - np.log(1e-2)) < 0.05


def test_a_log_inits():
    assert not np.asarray(a_log_zeros_init(jax.random.key(0), (8,))).any()
    a = np.exp(np.asarray(a_log_uniform_init(jax.random.key(0), (4096,))))
    assert 1.0 <= a.min() < 1.1 and 15.9 < a.max() <= 16.0 and abs(a.mean() - 8.5) < 0.3
