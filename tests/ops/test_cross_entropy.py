"""Chunked cross-entropy against the plain one, values and gradients; its memory does not grow with the row."""

import jax
import jax.numpy as jnp
import numpy as np

from k3train.ops.cross_entropy import cross_entropy_sum


def plain(hidden, head, targets, weights):
    logp = jax.nn.log_softmax(jnp.einsum("BSD,DX->BSX", hidden, head))
    return -jnp.sum(weights * jnp.take_along_axis(logp, targets[..., None], axis=-1)[..., 0])


def make(seed=0, B=2, S=37, D=8, X=50):
    keys = jax.random.split(jax.random.key(seed), 4)
    weights = jax.random.bernoulli(keys[3], 0.7, (B, S)) * 0.5
    hidden, head = jax.random.normal(keys[0], (B, S, D)), jax.random.normal(keys[1], (D, X))
    return hidden, head, jax.random.randint(keys[2], (B, S), 0, X), weights.astype(jnp.float32)


def test_equals_the_plain_loss_and_its_gradients():
    args = make()
    expected, wanted = jax.value_and_grad(plain, argnums=(0, 1))(*args)
    for chunk in (1, 16, 37, 64):
        fast = jax.value_and_grad(lambda *a, c=chunk: 3.0 * cross_entropy_sum(*a, c), argnums=(0, 1))
        value, grads = fast(*args)
        np.testing.assert_allclose(value, 3.0 * expected, rtol=1e-6)
        for got, want in zip(grads, wanted, strict=True):
            np.testing.assert_allclose(got, 3.0 * want, atol=2e-5)


def test_a_position_without_weight_counts_for_nothing_even_if_it_is_not_finite():
    hidden, head, targets, weights = make()
    weights = weights.at[1, 5].set(0.0)
    expected = cross_entropy_sum(hidden, head, targets, weights)
    spoiled = hidden.at[1, 5].set(jnp.nan)
    value, grad = jax.value_and_grad(cross_entropy_sum)(spoiled, head, targets, weights)
    assert value == expected
    assert bool(jnp.all(jnp.isfinite(grad)))


def test_memory_does_not_depend_on_row_length_times_vocabulary():
    def temp_bytes(S):
        args = make(S=S, D=8, X=4096)
        step = jax.jit(jax.grad(lambda *a: cross_entropy_sum(*a, 64), argnums=(0, 1)))
        return step.lower(*args).compile().memory_analysis().temp_size_in_bytes

    short, long = temp_bytes(128), temp_bytes(1024)
    whole_row = 2 * (1024 - 128) * 4096 * 4
    assert long - short < whole_row / 20
