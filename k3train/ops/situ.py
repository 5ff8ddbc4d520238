"""Gated activations of every MLP: SiTU-GLU (report section 2.3.2; docs/k3.md section 2.6) and SwiGLU."""

from functools import partial

import jax
import jax.numpy as jnp

Array = jax.Array


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _situ(gate: Array, up: Array, beta: float, linear_beta: float) -> Array:
    gate32, up32 = gate.astype(jnp.float32), up.astype(jnp.float32)
    capped_gate = beta * jnp.tanh(gate32 / beta)
    capped_up = linear_beta * jnp.tanh(up32 / linear_beta)
    return (capped_gate * jax.nn.sigmoid(gate32) * capped_up).astype(gate.dtype)


def _situ_fwd(gate: Array, up: Array, beta: float, linear_beta: float) -> tuple[Array, tuple[Array, Array]]:
    return _situ(gate, up, beta, linear_beta), (gate, up)


def _situ_bwd(beta: float, linear_beta: float, saved: tuple[Array, Array], dy: Array) -> tuple[Array, Array]:
    # Written out so that only gate and up are kept for the backward pass, in their own dtype.
    gate, up = saved
    gate32, up32, dy32 = gate.astype(jnp.float32), up.astype(jnp.float32), dy.astype(jnp.float32)
    tanh_gate, tanh_up = jnp.tanh(gate32 / beta), jnp.tanh(up32 / linear_beta)
    sigmoid = jax.nn.sigmoid(gate32)
    gate_branch = beta * tanh_gate * sigmoid
    gate_slope = sigmoid * ((1.0 - tanh_gate * tanh_gate) + beta * tanh_gate * jax.nn.sigmoid(-gate32))
    dgate = dy32 * gate_slope * (linear_beta * tanh_up)
    dup = dy32 * gate_branch * (1.0 - tanh_up * tanh_up)
    return dgate.astype(gate.dtype), dup.astype(up.dtype)


_situ.defvjp(_situ_fwd, _situ_bwd)


def situ_glu(gate: Array, up: Array, *, beta: float = 4.0, linear_beta: float = 25.0) -> Array:
    """beta tanh(gate / beta) sigmoid(gate) linear_beta tanh(up / linear_beta), in float32, cast to the input dtype.

    Args:
        gate, up: arrays of one shape and dtype.
        beta: cap of the gate branch. The sigmoid sees the uncapped gate.
        linear_beta: cap of the up branch.

    Returns:
        Same shape and dtype; absolute value at most `beta * linear_beta`. Finite, with finite derivatives, for every
        finite input.
    """
    return _situ(gate, up, beta, linear_beta)


def swiglu(gate: Array, up: Array) -> Array:
    """silu(gate) * up in float32, cast to the input dtype; the limit of `situ_glu` for large caps."""
    return (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)
