"""Orthogonalisation of batches of matrices by Newton-Schulz iteration (docs/k3.md section 3.2).

The iteration X <- a X + (b A + c A^2) X with A = X X^T moves every singular value towards 1 and keeps the singular
vectors: the result stands for the polar factor U V^T. With the Muon coefficients it does not converge: singular values
above a few thousandths of the norm end between about 0.7 and 1.2, which is all that training needs.

Every matrix of a batch is treated alone. Batch axes are never merged or reordered, so however they are split over
devices, each device works on the matrices that it holds.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
from jax import lax

Coefficients = tuple[tuple[float, float, float], ...]

#: Five equal steps (Jordan's Muon; Moonlight).
SIMPLE: Coefficients = ((3.4445, -4.7750, 2.0315),) * 5
#: A schedule of five different steps that ends nearer to 1 (optax calls it "dion").
QUINTIC: Coefficients = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)

#: Matrices at least this many times longer than wide take several steps as one polynomial in A ...
LONG = 2
#: ... but not more than this: A then comes from X anew, or the error of small singular values would grow.
JOINT_STEPS = 3


def newton_schulz(
    x: jax.Array, *, coefficients: Coefficients = SIMPLE, eps: float = 1e-7, dtype: jax.typing.DTypeLike = jnp.float32
) -> jax.Array:
    """Orthogonalise every matrix of `x`.

    Args:
        x: [..., rows, cols]; all leading axes are a batch.
        coefficients: (a, b, c) of each step.
        eps: added to the Frobenius norm by which a matrix is first divided; a zero matrix stays zero.
        dtype: of the matrix products. float32 asks the hardware for full float32 products.

    Returns:
        [..., rows, cols] float32.
    """
    tall = x.shape[-2] > x.shape[-1]
    x = x.astype(jnp.float32)
    x = x / (jnp.sqrt(jnp.sum(x * x, axis=(-2, -1), keepdims=True)) + eps)
    if tall:  # A = X X^T is then the smaller of the two products
        x = x.mT
    full = dtype == jnp.float32
    matmul = partial(jnp.matmul, precision=lax.Precision.HIGHEST if full else lax.Precision.DEFAULT)
    steps = _jointly if full and x.shape[-1] >= LONG * x.shape[-2] else _one_by_one
    x = steps(x.astype(dtype), coefficients, matmul)
    return (x.mT if tall else x).astype(jnp.float32)


def _polynomial(gram: jax.Array, abc, matmul: Callable) -> jax.Array:
    """a + b A + c A^2. The term a is in it, so that no sweep over X is needed for a X."""
    a, b, c = abc
    return a * jnp.eye(gram.shape[-1], dtype=gram.dtype) + b * gram + c * matmul(gram, gram)


def _one_by_one(x: jax.Array, coefficients: Coefficients, matmul: Callable) -> jax.Array:
    def step(x, abc):
        return matmul(_polynomial(matmul(x, x.mT), abc, matmul), x), None

    return lax.scan(step, x, jnp.asarray(coefficients, x.dtype))[0]


def _jointly(x: jax.Array, coefficients: Coefficients, matmul: Callable) -> jax.Array:
    """The same steps, a few at a time as one polynomial in A: products with the long X are the dear ones."""
    for start in range(0, len(coefficients), JOINT_STEPS):
        gram = matmul(x, x.mT)
        first, *others = coefficients[start : start + JOINT_STEPS]
        polynomial = product = _polynomial(gram, first, matmul)
        for abc in others:
            gram = matmul(polynomial, matmul(gram, polynomial))  # what A has become by the step before
            polynomial = _polynomial(gram, abc, matmul)
            product = matmul(polynomial, product)
        x = matmul(product, x)
    return x


def to_matrices(x: jax.Array, rows: Sequence[int], cols: Sequence[int]) -> jax.Array:
    """`x` with its matrix axes last and merged: [batch axes in their order..., rows, cols].

    Args:
        rows: axes of `x` that count the rows of a matrix, slowest first; may be several, such as heads x channels.
        cols: axes that count the columns. Every axis in neither is a batch axis.
    """
    batch = [axis for axis in range(x.ndim) if axis not in (*rows, *cols)]
    x = x.transpose(*batch, *rows, *cols)
    sizes = x.shape[len(batch) :]
    return x.reshape(*x.shape[: len(batch)], prod(sizes[: len(rows)]), prod(sizes[len(rows) :]))


def from_matrices(m: jax.Array, shape: Sequence[int], rows: Sequence[int], cols: Sequence[int]) -> jax.Array:
    """The inverse of `to_matrices` for an array of `shape`."""
    order = [axis for axis in range(len(shape)) if axis not in (*rows, *cols)] + [*rows, *cols]
    m = m.reshape([shape[axis] for axis in order])
    return m.transpose([order.index(axis) for axis in range(len(shape))])
