"""Causal attention inside documents against a per-document loop; largest logits; long rows in blocks."""

import jax
import jax.numpy as jnp
import numpy as np

from k3train.ops import attention
from k3train.ops.attention import causal_attention


def literal(q, k, v, segments, scale):
    out, top = np.zeros((*q.shape[:3], v.shape[-1])), np.full(q.shape[2], -np.inf)
    for b in range(q.shape[0]):
        for t in range(q.shape[1]):
            if segments[b, t] == 0:
                continue
            seen = [u for u in range(t + 1) if segments[b, u] == segments[b, t]]
            for h in range(q.shape[2]):
                logits = scale * k[b, seen, h] @ q[b, t, h]
                top[h] = max(top[h], logits.max())
                weights = np.exp(logits - logits.max())
                out[b, t, h] = (weights / weights.sum()) @ v[b, seen, h]
    return out, top


def make(S=23):
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(2, S, 3, 8)), rng.normal(size=(2, S, 3, 8)), rng.normal(size=(2, S, 3, 5))
    segments = np.ones((2, S), np.int32)
    segments[0, S // 3 :] = 2
    segments[1, -4:] = 0
    return [jnp.asarray(x, jnp.float32) for x in (q, k, v)], jnp.asarray(segments)


def test_equals_the_loop_and_blocks_change_nothing(monkeypatch):
    (q, k, v), segments = make()
    out, top = causal_attention(q, k, v, segments, scale=0.3)
    expected, expected_top = literal(*map(np.asarray, (q, k, v, segments)), 0.3)
    np.testing.assert_allclose(out, expected, atol=2e-6)
    np.testing.assert_allclose(top, expected_top, atol=2e-6)

    def loss(q, k, v):
        return jnp.sum(jnp.sin(causal_attention(q, k, v, segments, scale=0.3)[0]))

    whole = jax.grad(loss, argnums=(0, 1, 2))(q, k, v)
    monkeypatch.setattr(attention, "QUERY_BLOCK", 8)  # 23 positions: two full blocks and a partial one
    blocked_out, blocked_top = causal_attention(q, k, v, segments, scale=0.3)
    np.testing.assert_allclose(blocked_out, out, atol=1e-6)
    np.testing.assert_allclose(blocked_top, top, atol=1e-6)
    for got, want in zip(jax.grad(loss, argnums=(0, 1, 2))(q, k, v), whole, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-6)


def test_a_row_of_padding_gives_zeros_and_finite_gradients():
    (q, k, v), segments = make()
    segments = segments.at[1].set(0)
    out, top = causal_attention(q, k, v, segments, scale=0.3)
    assert not np.any(out[1]) and bool(jnp.all(jnp.isfinite(top)))
    grads = jax.grad(lambda *a: jnp.sum(causal_attention(*a, segments, scale=0.3)[0] ** 2), argnums=(0, 1, 2))(q, k, v)
    assert all(bool(jnp.all(jnp.isfinite(g))) and not np.any(g[1]) for g in grads)
    _, nothing = causal_attention(q, k, v, jnp.zeros_like(segments), scale=0.3)
    assert bool(jnp.all(nothing == -jnp.inf))


def test_a_nan_query_is_visible_in_the_largest_logit():
    (q, k, v), segments = make()
    out, top = causal_attention(q.at[0, 3, 1].set(jnp.nan), k, v, segments, scale=0.3)
    assert bool(jnp.isnan(out[0, 3, 1]).all()) and bool(jnp.isnan(top[1])) and not bool(jnp.isnan(top[0]))
