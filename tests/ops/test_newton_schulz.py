"""Newton-Schulz against float64 golden files, the singular value decomposition and a plain numpy loop."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.ops.newton_schulz import QUINTIC, SIMPLE, from_matrices, newton_schulz, to_matrices
from tests.tolerances import assert_close

GOLDEN = np.load(Path(__file__).parents[1] / "data/muon/per_head.npz", allow_pickle=False)
WEIGHTS = ("q", "mla_q_b", "mla_kv_b_joint", "mla_kv_b_k_only")  # momentum [rows, heads, columns]


def reference(x, coefficients):
    """One matrix, float64, as docs/k3.md section 3.2 writes it."""
    x = np.asarray(x, np.float64)
    x = x / (np.linalg.norm(x) + 1e-7)
    for a, b, c in coefficients:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@jax.jit
def per_head(m):
    """Both coefficient sets, [rows, heads, columns] in and out."""
    matrices = to_matrices(m, (0,), (2,))
    return [from_matrices(newton_schulz(matrices, coefficients=k), m.shape, (0,), (2,)) for k in (SIMPLE, QUINTIC)]


@pytest.mark.parametrize("weight", WEIGHTS)
def test_heads_match_golden(weight):
    for got, name in zip(per_head(GOLDEN[f"{weight}__momentum"]), ("ns5_simple", "ns5_quintic"), strict=True):
        assert_close(got, GOLDEN[f"{weight}__{name}"], "op", f"{weight} {name}")


@pytest.mark.parametrize("weight", WEIGHTS)
def test_heads_share_singular_vectors_with_polar_factor(weight):
    """P^T X is symmetric with positive eigenvalues below 1.25, where P = U V^T of the same head's momentum."""
    momentum, polar = GOLDEN[f"{weight}__momentum"], GOLDEN[f"{weight}__polar"]
    for got in per_head(momentum):
        for head in range(momentum.shape[1]):
            product = polar[:, head].T @ np.asarray(got, np.float64)[:, head]
            assert_close(product, product.T, "op", f"{weight} head {head}")
            eigenvalues = np.linalg.eigvalsh(product)
            assert eigenvalues.min() > 0 and eigenvalues.max() < 1.25, (weight, head, eigenvalues)
            assert np.median(eigenvalues) > 0.65, (weight, head, eigenvalues)


def test_matches_plain_loop_for_any_shape():
    rng = np.random.default_rng(0)
    for shape in [(5, 5), (2, 3, 9), (3, 2, 12, 4), (1, 7)]:
        x = jnp.asarray(rng.normal(size=shape), jnp.float32)
        for coefficients in (SIMPLE, QUINTIC[:3]):
            got = newton_schulz(x, coefficients=coefficients)
            wanted = np.array([reference(m, coefficients) for m in np.asarray(x).reshape(-1, *shape[-2:])])
            assert_close(got, wanted.reshape(shape), "op", str(shape))


def test_zero_and_extreme_matrices():
    x = np.zeros((4, 3, 5), np.float32)
    x[1] = np.random.default_rng(0).normal(size=(3, 5))
    x[2], x[3] = x[1] * 1e-30, x[1] * 1e12
    got = np.asarray(newton_schulz(x))
    assert (got[0] == 0).all()  # and zero does not spoil its neighbours
    assert_close(got[1], reference(x[1], SIMPLE), "op")
    assert np.abs(got[2]).max() < 1e-15
    assert_close(got[3], got[1], "op")


def test_heads_do_not_see_each_other():
    m = GOLDEN["q__momentum"].copy()
    before = np.asarray(per_head(m)[0])
    m[:, 2] *= 37.0
    after = np.asarray(per_head(m)[0])
    others = [head for head in range(m.shape[1]) if head != 2]
    np.testing.assert_array_equal(after[:, others], before[:, others])
    assert_close(after[:, 2], before[:, 2], "op")  # a scale of the gradient is no change of direction


def test_bfloat16_products_return_float32():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 16, 32)), jnp.float32)
    got = newton_schulz(x, dtype=jnp.bfloat16)
    assert got.dtype == jnp.float32
    singular = np.linalg.svd(np.asarray(got), compute_uv=False)
    assert singular.min() > 0.5 and singular.max() < 1.3
    assert (np.asarray(got) != np.asarray(newton_schulz(x))).any()


@pytest.mark.parametrize(("rows", "cols"), [((1, 2), (3,)), ((3,), (1, 2)), ((2,), (0,)), ((3, 1), (2, 0))])
def test_matrix_views_come_back(rows, cols):
    x = np.arange(2 * 3 * 4 * 5, dtype=np.float32).reshape(2, 3, 4, 5)
    matrices = to_matrices(jnp.asarray(x), rows, cols)
    batch = [axis for axis in range(4) if axis not in rows + cols]
    wanted_shape = tuple(x.shape[axis] for axis in batch)
    wanted_shape += tuple(int(np.prod([x.shape[axis] for axis in axes])) for axes in (rows, cols))
    assert matrices.shape == wanted_shape
    np.testing.assert_array_equal(np.asarray(matrices).ravel(), x.transpose(*batch, *rows, *cols).ravel())
    np.testing.assert_array_equal(from_matrices(matrices, x.shape, rows, cols), x)


@pytest.mark.parametrize("decades", [0, 2, 6])
def test_long_matrices_keep_small_singular_values(decades):
    """Several steps at once must not lose what a matrix with singular values over many decades has at its small end."""
    rng = np.random.default_rng(decades)
    left, _ = np.linalg.qr(rng.normal(size=(64, 64)))
    right, _ = np.linalg.qr(rng.normal(size=(256, 64)))
    x = left * np.logspace(0, -decades, 64) @ right.T
    for matrix in (x, x.T):
        got = np.asarray(newton_schulz(jnp.asarray(matrix, jnp.float32)), np.float64)
        wanted = reference(matrix, SIMPLE)
        assert np.abs(got - wanted).max() < 3e-5 * np.abs(wanted).max()
