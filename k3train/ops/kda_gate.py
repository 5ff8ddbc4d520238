"""Decay gates of KDA, the L2 norm of its queries and keys, and the published initialisers (docs/k3.md section 2.2)."""

import math

import jax
import jax.numpy as jnp

L2_EPS = 1e-6


def bounded_log_decay(z: jax.Array, a_log: jax.Array, lower_bound: float) -> jax.Array:
    """K3's gate, `lower_bound * sigmoid(exp(A) z)`: natural-log decay in (lower_bound, 0) (report equation 5).

    Args:
        z: [..., H, K] decay logits, dt_bias already added.
        a_log: [H].
        lower_bound: smallest log decay of a token, negative (-5 in K3).

    Returns:
        float32 [..., H, K].

    Raises:
        ValueError: wrong shapes, or a bound that is not negative.
    """
    if not lower_bound < 0:
        raise ValueError(f"lower_bound of the decay gate must be negative, got {lower_bound}")
    return lower_bound * jax.nn.sigmoid(_rate(z, a_log) * z.astype(jnp.float32))


def softplus_log_decay(z: jax.Array, a_log: jax.Array) -> jax.Array:
    """Kimi Linear's gate, `-exp(A) softplus(z)`, without a bound. Shapes as in `bounded_log_decay`."""
    return -_rate(z, a_log) * jax.nn.softplus(z.astype(jnp.float32))


def _rate(z: jax.Array, a_log: jax.Array) -> jax.Array:
    if z.ndim < 2 or a_log.shape != z.shape[-2:-1]:
        raise ValueError(f"decay gate takes z [..., H, K] and a_log [H], got {z.shape} and {a_log.shape}")
    return jnp.exp(a_log.astype(jnp.float32))[:, None]


def l2_normalise(x: jax.Array) -> jax.Array:
    """`x * rsqrt(sum x^2 + 1e-6)` over the last axis, float32: the sum and not the mean, epsilon under the root."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + L2_EPS)


def dt_bias_init(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Inverse softplus of a time step drawn log-uniformly from [1e-3, 0.1]."""
    low, high = math.log(1e-3), math.log(0.1)
    dt = jnp.maximum(jnp.exp(jax.random.uniform(key, shape, jnp.float32, low, high)), 1e-4)
    return dt + jnp.log(-jnp.expm1(-dt))


def a_log_zeros_init(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A = 0, K3's choice for the bounded gate (report section 2.1.1)."""
    del key
    return jnp.zeros(shape, jnp.float32)


def a_log_uniform_init(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """log U(1, 16), Kimi Linear's choice for the softplus gate."""
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, 1.0, 16.0))
