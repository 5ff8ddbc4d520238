"""Causal attention inside documents against a per-document loop; largest logits; long rows in blocks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.ops import attention
from k3train.ops.attention import causal_attention, latent_attention
from tests.tolerances import assert_close


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


VALUES = 6  # of 8 latent channels


def cached(T=40):
    """Two rows with 5 queries each: row 0 stands at 30, row 1 at 2 with two places of padding."""
    rng = np.random.default_rng(1)
    q, latent = rng.normal(size=(2, 5, 3, 8)), rng.normal(size=(2, T, 8))
    position = np.array([30, 2])[:, None] + np.arange(5)
    real = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], bool)
    return jnp.asarray(3 * q, jnp.float32), jnp.asarray(latent, jnp.float32), jnp.asarray(position), jnp.asarray(real)


def literal_cached(q, latent, position, real, scale):
    out, top = np.zeros((*q.shape[:3], VALUES)), np.full(q.shape[2], -np.inf)
    for b, t in np.argwhere(real):
        seen = latent[b, : position[b, t] + 1]
        logits = scale * np.float64(q[b, t]) @ seen.T
        top = np.maximum(top, logits.max(-1))
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        out[b, t] = weights / weights.sum(-1, keepdims=True) @ seen[:, :VALUES]
    return out, top


@pytest.mark.parametrize("held", [5 * 40, 5 * 16, 5 * 7, 5 * 3, 1], ids=lambda held: f"tile {max(held // 5, 1)}")
def test_cached_attention_in_tiles_of_keys_equals_the_loop(held):
    """Tiles that divide the cache and tiles that do not, a tile without any visible key, keys one by one."""
    q, latent, position, real = cached()
    latent = latent.at[:, 36:].set(1e4)  # beyond every query: must not be seen
    out, top = latent_attention(q, latent[None], 0, position, real, scale=0.3, value_width=VALUES, held_logits=held)
    expected, expected_top = literal_cached(*map(np.asarray, (q, latent, position, real)), 0.3)
    assert_close(out, expected, "op")
    assert_close(top, expected_top, "op")
    nothing, none_seen = latent_attention(
        q, latent[None], 0, position, jnp.zeros_like(real), scale=0.3, value_width=VALUES, held_logits=held
    )
    assert not np.any(nothing) and bool(jnp.all(none_seen == -jnp.inf))


def test_cached_attention_shows_a_nan():
    q, latent, position, real = cached()
    for held in (200, 35):
        out, top = latent_attention(
            q.at[0, 3, 1].set(jnp.nan), latent[None], 0, position, real, scale=0.3, value_width=VALUES, held_logits=held
        )
        assert bool(jnp.isnan(out[0, 3, 1]).all()) and bool(jnp.isnan(top[1])) and int(jnp.isnan(out).sum()) == VALUES


def test_cached_attention_holds_one_tile_of_logits():
    """The compiler's temporaries do not grow with the cache."""

    def temporaries(T):
        latent = jnp.zeros((3, 1, T, 24))
        shapes = (jnp.zeros((1, 64, 4, 24)), latent, 1, jnp.zeros((1, 64), int), jnp.ones((1, 64), bool))
        attend = partial(latent_attention, scale=1.0, value_width=16, held_logits=2**13)
        return jax.jit(attend).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    short, long = temporaries(256), temporaries(16_384)
    assert long < short + 2**16, "64 queries and 4 heads times 16,384 keys would be 16 MiB"
    assert long < 2**20
