"""QK-clip: golden files, heads that must not change by a bit, and what is counted."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from k3train.optim import ClipView, MatrixView, muon_clip, qk_clip
from tests.tolerances import assert_close

GOLDEN = np.load(Path(__file__).parents[1] / "data/muon/qk_clip.npz", allow_pickle=False)
NOPE, ROPE, V = 16, 8, 16
QUERY = ClipView(head_axis=0, axis=1, parts=((NOPE, 0.5), (ROPE, 1.0)))
KEY_VALUE = ClipView(head_axis=0, axis=1, parts=((NOPE, 0.5), (V, 0.0)))


@jax.jit
def clip_mla(params, updates, max_logit, threshold):
    tx = qk_clip(1.0, {"q_b": QUERY, "kv_b": KEY_VALUE, "kv_a": None})
    scaled = max_logit / threshold  # only the ratio matters
    logits = {"q_b": scaled, "kv_b": scaled, "kv_a": None}
    updates, state = tx.update(updates, tx.init(params), params, max_logits=logits)
    return updates, optax.apply_updates(params, updates), state.num_clipped


@pytest.mark.parametrize(
    ("kind", "max_logit", "threshold"),
    [("mla", "given__S_max", "tau"), ("e2e", "e2e__S_max_per_head", "e2e__tau")],
)
def test_mla_matches_golden(kind, max_logit, threshold):
    q_b = GOLDEN[f"{kind}__q_b"]
    params = {"q_b": q_b, "kv_b": GOLDEN["mla__kv_b"], "kv_a": GOLDEN["mla__kv_a_proj_with_mqa"]}
    params = {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}
    zero = jax.tree.map(jnp.zeros_like, params)
    _, clipped, count = clip_mla(params, zero, jnp.asarray(GOLDEN[max_logit], jnp.float32), float(GOLDEN[threshold]))
    assert_close(clipped["q_b"], GOLDEN[f"{kind}__q_b_clipped"], "op")
    assert_close(clipped["kv_b"], GOLDEN[f"{kind}__kv_b_clipped"], "op")
    np.testing.assert_array_equal(clipped["kv_a"], params["kv_a"])
    np.testing.assert_array_equal(clipped["kv_b"][:, NOPE:], params["kv_b"][:, NOPE:])
    assert count == (GOLDEN[max_logit] > GOLDEN[threshold]).sum() > 0


def test_plain_heads_match_golden():
    params = {"q": jnp.asarray(GOLDEN["mha__wq"]), "k": jnp.asarray(GOLDEN["mha__wk"])}
    view = ClipView(head_axis=0, axis=1, parts=((params["q"].shape[1], 0.5),))
    largest = jnp.asarray(GOLDEN["given__S_max"], jnp.float32)
    tx = qk_clip(float(GOLDEN["tau"]), {"q": view, "k": view})
    zero = jax.tree.map(jnp.zeros_like, params)
    updates, state = tx.update(zero, tx.init(params), params, max_logits={"q": largest, "k": largest})
    clipped = optax.apply_updates(params, updates)
    assert_close(clipped["q"], GOLDEN["mha__wq_clipped"], "op")
    assert_close(clipped["k"], GOLDEN["mha__wk_clipped"], "op")
    assert state.num_clipped == (GOLDEN["given__gamma"] < 1).sum()


def test_logits_after_the_clip_are_at_the_threshold():
    """Logits of the golden activations, computed from the clipped weights: min(S, tau) of each head."""
    tau = float(GOLDEN["e2e__tau"])
    params = {"q_b": GOLDEN["e2e__q_b"], "kv_b": GOLDEN["mla__kv_b"], "kv_a": np.zeros((1, 1))}
    params = {name: jnp.asarray(value, jnp.float32) for name, value in params.items()}
    zero = jax.tree.map(jnp.zeros_like, params)
    before = jnp.asarray(GOLDEN["e2e__S_max_per_head"], jnp.float32)
    clipped = clip_mla(params, zero, before, tau)[1]
    q_BSHK = jnp.einsum("BSR,HKR->BSHK", GOLDEN["e2e__c_q"], clipped["q_b"])
    k_BSHK = jnp.einsum("BSR,HKR->BSHK", GOLDEN["e2e__c_kv"], clipped["kv_b"][:, :NOPE])
    logits = jnp.einsum("BSHK,BTHK->BHST", q_BSHK[..., :NOPE], k_BSHK)
    logits += jnp.einsum("BSHK,BTK->BHST", q_BSHK[..., NOPE:], GOLDEN["e2e__k_rope"])
    logits = np.where(np.tri(logits.shape[-1], dtype=bool), logits / np.sqrt(NOPE + ROPE), -np.inf)
    assert_close(logits.max((0, 2, 3)), np.minimum(GOLDEN["e2e__S_max_per_head"], tau), "op")


def test_other_heads_keep_their_update_bit_for_bit():
    params = {"q_b": GOLDEN["mla__q_b"], "kv_b": GOLDEN["mla__kv_b"], "kv_a": GOLDEN["mla__kv_a_proj_with_mqa"]}
    params = {name: jnp.asarray(value) for name, value in params.items()}
    updates = jax.tree.map(lambda p: 1e-3 * jnp.sin(100 * p), params)
    largest = np.array([400, 100, 0, -7, np.nan, np.inf, -np.inf, 100.001], np.float32)
    got, after, count = clip_mla(params, updates, jnp.asarray(largest), 100.0)
    kept = [1, 2, 3, 4, 5, 6]  # exactly at the threshold is allowed; a number that is none clips nothing
    for name in ("q_b", "kv_b"):
        np.testing.assert_array_equal(got[name][np.array(kept)], updates[name][np.array(kept)])
    np.testing.assert_array_equal(got["kv_b"][:, NOPE:], updates["kv_b"][:, NOPE:])
    np.testing.assert_array_equal(got["kv_a"], updates["kv_a"])
    assert count == 2
    assert_close(after["q_b"][0, :NOPE], (params["q_b"] + updates["q_b"])[0, :NOPE] / 2, "op")
    assert_close(after["q_b"][0, NOPE:], (params["q_b"] + updates["q_b"])[0, NOPE:] / 4, "op")


def test_stacked_layers():
    """[layers, rank, heads, head_dim] with [layers, heads]: each layer has its own heads."""
    params = {"q": jnp.ones((3, 5, 4, 6)), "k": jnp.ones((3, 5, 4, 6)), "unused": None}
    view = ClipView(head_axis=2, axis=3, parts=((6, 0.5),))
    tx = qk_clip(100.0, {"q": view, "k": view, "unused": None})
    largest = jnp.full((3, 4), 50.0).at[1, 2].set(400.0).at[2, 0].set(1600.0)
    zero = jax.tree.map(jnp.zeros_like, params)
    logits = {"q": largest, "k": largest, "unused": None}
    updates, state = tx.update(zero, tx.init(params), params, max_logits=logits)
    wanted = np.ones((3, 5, 4, 6))
    wanted[1, :, 2], wanted[2, :, 0] = 0.5, 0.25
    np.testing.assert_array_equal(optax.apply_updates(params, updates)["q"], wanted)
    assert state.num_clipped == 2  # heads, not leaves
    same, state = tx.update(zero, state, params)
    assert same is zero and state.num_clipped == 0


def test_muon_clip_clips_what_muon_made():
    params = {"q": jnp.asarray(np.random.default_rng(0).normal(size=(8, 2, 4)), jnp.float32), "gain": jnp.ones(8)}
    views = {"q": MatrixView((0,), (2,)), "gain": None}
    tx = muon_clip(0.1, views, {"q": ClipView(1, 2, ((4, 1.0),)), "gain": None}, threshold=10.0, weight_decay=0.0)
    state = tx.init(params)
    largest = jnp.array([20.0, 5.0])
    free, _ = tx.update(params, state, params)
    bound, _ = tx.update(params, state, params, max_logits={"q": largest, "gain": None})
    moved, clipped = optax.apply_updates(params, free), optax.apply_updates(params, bound)
    assert_close(clipped["q"][:, 0], moved["q"][:, 0] / 2, "op")
    np.testing.assert_array_equal(clipped["q"][:, 1], moved["q"][:, 1])
    np.testing.assert_array_equal(clipped["gain"], moved["gain"])


def test_mistakes_are_refused():
    params = {"q": jnp.ones((5, 4, 6))}
    view = ClipView(head_axis=1, axis=2, parts=((6, 0.5),))
    with pytest.raises(ValueError, match="threshold must be positive, got 0"):
        qk_clip(0, {"q": view})
    tx = qk_clip(100.0, {"q": view})
    with pytest.raises(ValueError, match=r"call update\(updates, state, params\)"):
        tx.update(params, tx.init(params))
    with pytest.raises(ValueError, match=r"shape \(3,\) .* want \(4,\)"):
        tx.update(params, tx.init(params), params, max_logits={"q": jnp.ones(3)})
    tx = qk_clip(100.0, {"q": ClipView(head_axis=1, axis=2, parts=((4, 0.5),))})
    with pytest.raises(ValueError, match="add up to 4, the axis has 6"):
        tx.update(params, tx.init(params), params, max_logits={"q": jnp.ones(4)})
