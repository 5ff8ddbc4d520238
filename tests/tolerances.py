"""The one table of tolerances, float32 on CPU, and the one comparison that uses it.

A line bounds the largest absolute difference; `of_max` lines are relative to the largest entry of the wanted array.
They are set by what independent float32 implementations differ by, and never widened to make a test pass.
"""

from typing import NamedTuple

import numpy as np


class Tolerance(NamedTuple):
    bound: float
    of_max: bool


TOLERANCES = {
    # one operation against its reference or golden file
    "op": Tolerance(2e-5, of_max=True),
    "op gradient": Tolerance(2e-5, of_max=True),
    # the assembled model against golden files
    "kimi_linear logits": Tolerance(5e-5, of_max=False),
    "k3 logits": Tolerance(2e-4, of_max=False),
    "golden loss": Tolerance(1e-5, of_max=True),
    "layer tensor": Tolerance(2e-4, of_max=True),
    "model gradient": Tolerance(5e-4, of_max=True),
    # the same computation arranged otherwise: packed and alone, recomputed
    "same model": Tolerance(5e-5, of_max=True),
    # prefill and decode against one forward pass
    "decode": Tolerance(2e-5, of_max=True),
    # a mesh against one device
    "mesh loss": Tolerance(1e-6, of_max=True),
    "mesh op": Tolerance(1e-6, of_max=True),
    "mesh op gradient": Tolerance(1e-5, of_max=True),
    "mesh gradient": Tolerance(1e-4, of_max=True),
    # an optimizer update against its float64 golden file
    "update": Tolerance(1e-4, of_max=True),
    # an optimizer update on a mesh against one device
    "mesh update": Tolerance(1e-5, of_max=True),
    "router bias": Tolerance(1e-6, of_max=False),
}


def assert_close(got, wanted, kind: str, what: str = "") -> None:
    """Same shape, finite, and within the line `kind` of the table."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    label = f"{what or 'array'} ({kind})"
    assert got.shape == wanted.shape, f"{label}: shape {got.shape}, wanted {wanted.shape}"
    assert np.isfinite(got).all(), f"{label}: not finite"
    line = TOLERANCES[kind]
    error = np.abs(got - wanted).max(initial=0.0)
    allowed = line.bound * (max(np.abs(wanted).max(initial=0.0), 1e-30) if line.of_max else 1.0)
    assert error <= allowed, f"{label}: largest difference {error:.2e}, allowed {allowed:.2e}"
