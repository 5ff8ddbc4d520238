"""Muon as optax transforms for anybody's parameter tree (docs/k3.md section 3.2; report section 2.5).

A `MatrixView` says which axes of a leaf are the rows and the columns of a matrix. All other axes are a batch of such
matrices: stacked layers, experts, and for Per-Head Muon the heads. Nothing is read from names, ranks or sizes.

`optax.contrib.muon` covers the same views, but its Nesterov term corrects momentum and gradient for bias separately,
which is not Moonlight's g + mu m, its momentum takes the gradient's dtype, and its Adam branch is NAdam without a decay
mask. Those are the parts written here; AdamW, decay, schedules and chaining are optax's.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from math import prod, sqrt
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from k3train.ops.newton_schulz import SIMPLE, Coefficients, from_matrices, newton_schulz, to_matrices

Tree = Any  # any pytree


@dataclass(frozen=True)
class MatrixView:
    """Axes of a leaf that are the rows and the columns of a matrix; several axes count as one, slowest first.

    Every axis in neither is a batch axis. `[embed, heads, head_dim]`: `MatrixView((0,), (2,))` is one matrix a head,
    `MatrixView((0,), (1, 2))` the whole projection.
    """

    rows: tuple[int, ...]
    cols: tuple[int, ...]

    def check(self, shape: tuple[int, ...]) -> None:
        named = self.rows + self.cols
        if not self.rows or not self.cols or len(set(named)) < len(named) or not set(named) <= set(range(len(shape))):
            raise ValueError(f"{self} does not fit a leaf of shape {shape}: axes are 0..{len(shape) - 1}, each once")

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """(rows, columns) of one matrix."""
        return prod(shape[axis] for axis in self.rows), prod(shape[axis] for axis in self.cols)


Tagged = Tree | Callable[[Tree], Tree]  # a tree like params with one value at each leaf, or made from params


class MuonState(NamedTuple):
    """`momentum`: tree like params, float32, `None` where a leaf has no view."""

    momentum: Tree


def absent(leaf: Any) -> bool:
    """Whether an outer transform (`optax.masked`, `optax.partition`) took this leaf away."""
    return leaf is None or isinstance(leaf, optax.MaskedNode)


def flatten(tree: Tree, tags: Tagged) -> tuple[list, list, Any]:
    """(leaves of `tree`, tag of each, structure); an absent leaf has tag None."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=absent)
    found = structure.flatten_up_to(tags(tree) if callable(tags) else tags)
    return leaves, [None if absent(leaf) else tag for leaf, tag in zip(leaves, found, strict=True)], structure


def _mask(tags: Tagged, where: Callable[[Any], bool]) -> Callable[[Tree], Tree]:
    """Mask for `optax.masked`: true at the leaves for whose tag `where` holds."""

    def mask(tree):
        leaves, found, structure = flatten(tree, tags)
        return structure.unflatten(
            [leaf if absent(leaf) else where(tag) for leaf, tag in zip(leaves, found, strict=True)]
        )

    return mask


def _orthogonalise(arrays: list[jax.Array], views: list[MatrixView], **options: Any) -> list[jax.Array]:
    """Orthogonalise the views of all arrays; those of equal matrix shape run as one batch."""
    matrices, groups = [], defaultdict(list)
    for index, (array, view) in enumerate(zip(arrays, views, strict=True)):
        matrix = to_matrices(array, view.rows, view.cols)
        matrices.append(matrix.mT if matrix.shape[-2] > matrix.shape[-1] else matrix)
        groups[matrices[-1].shape].append(index)
    for members in groups.values():
        # A new leading axis: the batch axes of the leaves, and with them their sharding, stay as they are.
        results = newton_schulz(jnp.stack([matrices[index] for index in members]), **options)
        for index, result in zip(members, results, strict=True):
            matrices[index] = result
    done = []
    for array, view, matrix in zip(arrays, views, matrices, strict=True):
        rows, cols = view.sizes(array.shape)
        done.append(from_matrices(matrix.mT if rows > cols else matrix, array.shape, view.rows, view.cols))
    return done


def scale_by_muon(
    views: Tagged,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    scale: float = 0.2,
    coefficients: Coefficients = SIMPLE,
    eps: float = 1e-7,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> optax.GradientTransformation:
    """Momentum, then every matrix orthogonalised alone, then `scale * sqrt(max(rows, columns))` of that matrix.

    The factor makes the root mean square of an update about `scale`, the size of AdamW's: one learning rate serves
    both (Moonlight). Updates are float32 in the shape of their leaf, without learning rate or sign.

    Args:
        views: tree like params of `MatrixView`; `None` passes a leaf's gradient on unchanged, without state. Or a
            function from params to such a tree.
        momentum: m <- momentum * m + g, kept in float32 whatever the dtype of the gradients.
        nesterov: orthogonalise g + momentum * m (Moonlight's code) instead of m (Kimi K2, Algorithm 1).
        coefficients, eps, dtype: see `ops.newton_schulz.newton_schulz`.

    Raises:
        ValueError: a view that does not fit its leaf.
    """

    def init(params):
        leaves, found, structure = flatten(params, views)
        zeros = []
        for leaf, view in zip(leaves, found, strict=True):
            if view is not None:
                view.check(leaf.shape)
            zeros.append(None if view is None else jnp.zeros_like(leaf, dtype=jnp.float32))
        return MuonState(structure.unflatten(zeros))

    def update(updates, state, params=None):
        del params
        leaves, found, structure = flatten(updates, views)
        moments = structure.flatten_up_to(state.momentum)
        chosen = [index for index, view in enumerate(found) if view is not None]
        directions = []
        for index in chosen:
            gradient = leaves[index].astype(jnp.float32)
            moments[index] = momentum * moments[index] + gradient
            directions.append(gradient + momentum * moments[index] if nesterov else moments[index])
        kinds = [found[index] for index in chosen]
        results = _orthogonalise(directions, kinds, coefficients=coefficients, eps=eps, dtype=dtype)
        for index, view, result in zip(chosen, kinds, results, strict=True):
            leaves[index] = scale * sqrt(max(view.sizes(result.shape))) * result
        return structure.unflatten(leaves), MuonState(structure.unflatten(moments))

    return optax.GradientTransformation(init, update)


def _mask(tree: Tree | Callable[[Tree], Tree], where: Callable[[Any], bool]) -> Callable[[Tree], Tree]:
    """Mask for `optax.masked`: true at the leaves of `tree` for which `where` holds."""

    def mask(params):
        leaves, structure = jax.tree.flatten(params, is_leaf=absent)
        found = structure.flatten_up_to(tree(params) if callable(tree) else tree)
        return structure.unflatten(
            [leaf if absent(leaf) else where(value) for leaf, value in zip(leaves, found, strict=True)]
        )

    return mask


def muon(
    learning_rate: optax.ScalarOrSchedule,
    views: Tagged,
    *,
    weight_decay: float = 0.1,
    decay: Tagged | None = None,
    frozen: Tagged | None = None,
    adam_b1: float = 0.9,
    adam_b2: float = 0.95,
    adam_eps: float = 1e-8,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    """Muon for leaves with a matrix view, AdamW for the others, one learning rate, decoupled decay.

    A step is `p <- p - lr * (direction + weight_decay * p)`, with the decay only where `decay` holds.

    Args:
        learning_rate: a number, or a function of the 0-based step.
        views: tree like params of `MatrixView`, or `None` for AdamW.
        decay: tree like params of bool: which leaves decay. Default: those with a view.
        frozen: tree like params of bool: leaves without view that get a zero update and no state. Default: none.
        adam_b1, adam_b2, adam_eps: AdamW's (without Nesterov).
        options: `momentum`, `nesterov`, `scale`, `coefficients`, `eps`, `dtype` of `scale_by_muon`.
    """

    def adam(tree):
        leaves, found, structure = flatten(tree, views)
        still = flatten(tree, frozen)[1] if frozen is not None else [False] * len(leaves)
        rest = [view is None and not stays for view, stays in zip(found, still, strict=True)]
        return structure.unflatten(
            [leaf if absent(leaf) else chosen for leaf, chosen in zip(leaves, rest, strict=True)]
        )

    return optax.chain(
        optax.masked(optax.set_to_zero(), _mask(frozen, bool)) if frozen is not None else optax.identity(),
        scale_by_muon(views, **options),
        optax.masked(optax.scale_by_adam(adam_b1, adam_b2, adam_eps, mu_dtype=jnp.float32), adam),
        optax.add_decayed_weights(
            weight_decay, _mask(decay, bool) if decay is not None else _mask(views, lambda view: view is not None)
        ),
        optax.scale_by_learning_rate(learning_rate),
    )


def per_head(views: Tree, head_axes: Tree) -> Tree:
    """`views` with the head axis taken out of the matrix: it becomes a batch axis, one matrix a head.

    Args:
        head_axes: tree like params: index of the head axis, or `None` where the matrix stays whole.
    """

    def one(view, axis):
        if view is None or axis is None:
            return view
        return MatrixView(tuple(a for a in view.rows if a != axis), tuple(a for a in view.cols if a != axis))

    return jax.tree.map(one, views, head_axes, is_leaf=lambda leaf: leaf is None or isinstance(leaf, MatrixView))


def per_head_muon(
    learning_rate: optax.ScalarOrSchedule, views: Tree, head_axes: Tree, **options: Any
) -> optax.GradientTransformationExtraArgs:
    """`muon` with the heads of query, key and value projections orthogonalised apart (report section 2.5).

    Args:
        views: whole-matrix views, see `muon`.
        head_axes: see `per_head`.
        options: see `muon`.
    """
    return muon(learning_rate, per_head(views, head_axes), **options)
