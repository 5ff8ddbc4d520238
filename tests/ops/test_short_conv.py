"""Short convolution: golden file, packing, padding, carried tail."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.ops.short_conv import short_conv
from tests.ops.kda_cases import golden
from tests.tolerances import assert_close

FILE = golden("i_short_conv")
X, W, TAIL, IDS, DY = (jnp.asarray(FILE[key]) for key in ("x", "w", "state", "segment_ids", "dy"))
FILTERS = W[:, 0, :]


@pytest.mark.parametrize("suffix", ["", "_with_state", "_packed"])
def test_golden(suffix):
    ids = IDS if suffix == "_packed" else None
    tail = TAIL if suffix == "_with_state" else jnp.zeros_like(TAIL)

    def conv(x, w, tail):
        return short_conv(x, w, tail=tail, segment_ids=ids)[0]

    out, pull = jax.vjp(conv, X, FILTERS, tail)
    assert_close(out, FILE[f"y{suffix}"], "op", "out")
    dx, dw, dtail = pull(DY)
    assert_close(dx, FILE[f"dx{suffix}"], "op gradient", "dx")
    assert_close(dw[:, None], FILE[f"dw{suffix}"], "op gradient", "dw")
    if suffix == "_with_state":
        assert_close(dtail, FILE["dstate"], "op gradient", "dtail")


def test_documents_are_isolated_bit_for_bit():
    """Editing one document leaves the next unchanged, also when an id comes back within the taps' reach."""
    ids = jnp.asarray([[1] * 10 + [2] * 2 + [1] * 15 + [0] * 10, [5] * 20 + [6] + [5] * 16])
    edited = X.at[0, :12].add(1.0).at[1, :21].add(-3.0)
    out, _ = short_conv(X, FILTERS, segment_ids=ids)
    got, _ = short_conv(edited, FILTERS, segment_ids=ids)
    np.testing.assert_array_equal(got[0, 12:], out[0, 12:])
    np.testing.assert_array_equal(got[1, 21:], out[1, 21:])
    alone, _ = short_conv(X[:, 12:27], FILTERS)
    np.testing.assert_allclose(out[0, 12:27], alone[0], rtol=1e-6)


def test_padding_is_inert():
    ids = jnp.asarray([[0] * 2 + [3] * 20 + [0] * 15, [3] * 37])
    out, tail = short_conv(X, FILTERS, tail=TAIL, segment_ids=ids)
    dirty = jnp.where(ids[..., None] == 0, jnp.nan, X)
    got, dirty_tail = short_conv(dirty, FILTERS, tail=TAIL, segment_ids=ids)
    np.testing.assert_array_equal(got, out)
    np.testing.assert_array_equal(dirty_tail, tail)
    assert not np.asarray(out)[np.asarray(ids) == 0].any()
    grad = jax.grad(lambda x: short_conv(x, FILTERS, tail=TAIL, segment_ids=ids)[0].sum())(dirty)
    assert np.isfinite(grad).all() and not np.asarray(grad)[np.asarray(ids) == 0].any()


@pytest.mark.parametrize("split", [1, 2, 5, 36])
def test_carried_tail_equals_one_shot(split):
    whole, last = short_conv(X, FILTERS, tail=TAIL)
    first, tail = short_conv(X[:, :split], FILTERS, tail=TAIL)
    second, tail = short_conv(X[:, split:], FILTERS, tail=tail)
    np.testing.assert_allclose(jnp.concatenate([first, second], axis=1), whole, atol=1e-6)
    np.testing.assert_array_equal(tail, last)


def test_carried_tail_skips_right_padding_and_earlier_documents():
    """Rows of one bucket: full, two tokens, none, and one whose last document is one token long."""
    x = jnp.concatenate([X, X + 1.0])[:, :8]
    tail = jnp.concatenate([TAIL, TAIL + 1.0])
    ids = jnp.asarray([[1] * 8, [1] * 2 + [0] * 6, [0] * 8, [1] * 4 + [2] + [0] * 3])
    _, got = short_conv(x, FILTERS, tail=tail, segment_ids=ids)
    np.testing.assert_array_equal(got[0], x[0, 5:])
    np.testing.assert_array_equal(got[1], jnp.stack([tail[1, 2], x[1, 0], x[1, 1]]))
    np.testing.assert_array_equal(got[2], tail[2])
    np.testing.assert_array_equal(got[3], jnp.stack([jnp.zeros(24), jnp.zeros(24), x[3, 4]]))


def test_bfloat16_in_and_out():
    out, tail = short_conv(X.astype(jnp.bfloat16), FILTERS, tail=TAIL)
    assert out.dtype == tail.dtype == jnp.bfloat16
    wanted, _ = short_conv(X.astype(jnp.bfloat16).astype(jnp.float32), FILTERS, tail=TAIL.astype(jnp.bfloat16))
    np.testing.assert_array_equal(out, wanted.astype(jnp.bfloat16))


@pytest.mark.parametrize("bad", ["filters", "tail", "segment_ids"])
def test_wrong_shapes_are_refused(bad):
    arguments = {"filters": FILTERS, "tail": TAIL, "segment_ids": IDS}
    arguments[bad] = arguments[bad][:1]
    with pytest.raises(ValueError, match=bad):
        short_conv(X, arguments["filters"], tail=arguments["tail"], segment_ids=arguments["segment_ids"])
