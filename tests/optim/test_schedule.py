"""The learning rate: never zero at the start, one peak, exact at the end."""

import jax
import numpy as np
import pytest

from k3train.optim.schedule import warmup_cosine


def rates(peak, final, fraction, num_steps, extra=0):
    return np.asarray(jax.vmap(warmup_cosine(peak, final, fraction, num_steps))(np.arange(num_steps + extra)))


@pytest.mark.parametrize(
    ("fraction", "num_steps", "warmup"), [(0.1, 100, 10), (0.01, 250, 3), (0.01, 7, 1), (0.0, 9, 0)]
)
def test_rises_to_the_peak_then_falls_to_the_final_rate(fraction, num_steps, warmup):
    lr = rates(2e-3, 2e-4, fraction, num_steps, extra=5)
    top = max(warmup - 1, 0)
    np.testing.assert_allclose(lr[:top], 2e-3 * np.arange(1, top + 1) / max(warmup, 1), rtol=1e-6)
    assert lr[0] > 0
    np.testing.assert_allclose(lr[top], 2e-3, rtol=1e-6)
    assert (np.diff(lr[: top + 1]) > 0).all() and (np.diff(lr[top:num_steps]) < 0).all()
    assert (lr[num_steps - 1 :] == np.float32(2e-4)).all()  # and stays there


def test_cosine_halfway():
    lr = rates(1.0, 0.0, 0.0, 101)
    np.testing.assert_allclose(lr[[0, 25, 50, 100]], [1, 0.5 + 0.25 * np.sqrt(2), 0.5, 0], atol=1e-6)


def test_very_short_runs():
    assert rates(1.0, 0.1, 0.01, 1).tolist() == [1.0]
    np.testing.assert_array_equal(rates(1.0, 0.1, 0.01, 2), np.float32([1.0, 0.1]))
    np.testing.assert_array_equal(rates(1.0, 0.1, 1.0, 4), np.float32([1 / 3, 2 / 3, 1.0, 0.1]))


def test_mistakes_are_refused():
    with pytest.raises(ValueError, match="num_steps must be at least 1, got 0"):
        warmup_cosine(1.0, 0.1, 0.01, 0)
    with pytest.raises(ValueError, match="warmup_fraction must lie between 0 and 1, got 1.5"):
        warmup_cosine(1.0, 0.1, 1.5, 10)
