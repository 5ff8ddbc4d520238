"""Attention residual reader against a literal loop over sources."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.ops.attn_res import attn_res

EPS = 1e-5


def literal(sources, gain, query):
    """docs/k3.md section 2.4, one source at a time, in float64."""
    scores = []
    for v in sources:
        key = v / np.sqrt(np.mean(v * v, axis=-1, keepdims=True) + EPS)
        scores.append(np.sum(key * (gain * query), axis=-1))
    scores = np.stack(scores)
    weights = np.exp(scores - scores.max(0))
    weights /= weights.sum(0)
    return sum(w[..., None] * v for w, v in zip(weights, sources, strict=True))


@pytest.fixture
def inputs():
    rng = np.random.default_rng(0)
    return rng.normal(size=(5, 2, 3, 8)), rng.normal(size=(2, 3, 8)), rng.normal(size=8), rng.normal(size=8)


def test_equals_the_literal_softmax_over_depth(inputs):
    sources, prefix, gain, query = inputs
    f32 = [jnp.asarray(x, jnp.float32) for x in inputs]
    got = attn_res(*f32, eps=EPS)
    np.testing.assert_allclose(got, literal([*sources, prefix], gain, query), atol=2e-6)
    # only three sources filled, counted statically or while tracing; the rest may hold anything
    spoiled = f32[0].at[3:].set(jnp.nan)
    expected = literal([*sources[:3], prefix], gain, query)
    np.testing.assert_allclose(attn_res(spoiled[:3], *f32[1:], eps=EPS), expected, atol=2e-6)
    masked = f32[0].at[3:].set(7.0)
    traced = jax.jit(lambda n: attn_res(masked, *f32[1:], eps=EPS, num_sources=n))(3)
    np.testing.assert_allclose(traced, expected, atol=2e-6)


def test_an_empty_block_is_no_source(inputs):
    sources, _, gain, query = inputs
    f32 = [jnp.asarray(x, jnp.float32) for x in inputs]
    expected = literal(sources, gain, query)
    np.testing.assert_allclose(attn_res(f32[0], None, *f32[2:], eps=EPS), expected, atol=2e-6)
    got = attn_res(f32[0], jnp.zeros_like(f32[1]), *f32[2:], eps=EPS, prefix_valid=jnp.asarray(False))
    np.testing.assert_allclose(got, expected, atol=2e-6)


def test_zero_query_is_the_plain_mean_and_order_does_not_matter(inputs):
    sources, prefix, gain, query = (jnp.asarray(x, jnp.float32) for x in inputs)
    mean = attn_res(sources, prefix, gain, jnp.zeros_like(query), eps=EPS)
    np.testing.assert_allclose(mean, jnp.mean(jnp.concatenate([sources, prefix[None]]), axis=0), atol=1e-6)
    shuffled = attn_res(sources[::-1], prefix, gain, query, eps=EPS)
    np.testing.assert_allclose(shuffled, attn_res(sources, prefix, gain, query, eps=EPS), atol=2e-6)


def test_gradients_are_finite_where_nothing_is_stored_yet(inputs):
    f32 = [jnp.asarray(x, jnp.float32) for x in inputs]

    def loss(sources, prefix, gain, query):
        out = attn_res(sources, prefix, gain, query, eps=EPS, num_sources=jnp.int32(1), prefix_valid=jnp.asarray(False))
        return jnp.sum(out**2)

    grads = jax.grad(loss, argnums=(0, 1, 2, 3))(jnp.zeros_like(f32[0]).at[0].set(f32[0][0]), *f32[1:])
    assert all(bool(jnp.all(jnp.isfinite(g))) for g in grads)
    assert not np.any(grads[1]) and not np.any(grads[0][1:])
