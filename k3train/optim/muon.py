"""Muon as optax transforms for anybody's parameter tree (docs/k3.md section 3.2; report section 2.5).

A `MatrixView` says which axes of a leaf are the rows and the columns of a matrix. All other axes are a batch of such
matrices: stacked layers, experts, and for Per-Head Muon the heads. Nothing is read from names, ranks or sizes.

`optax.contrib.muon` covers the same views, but its Nesterov term corrects momentum and gradient for bias separately,
which is not Moonlight's g + mu m, its momentum takes the gradient's dtype, and its Adam branch is NAdam without a decay
mask. Those are the parts written here; AdamW, decay, schedules and chaining are optax's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod, sqrt
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from k3train.ops.newton_schulz import SIMPLE, Coefficients, from_matrices, newton_schulz, to_matrices
from k3train.parallel.spread import mesh_axes, num_devices, on_whole_matrices

Tree = Any  # any pytree

#: Leaves of equal matrix shape are joined up to this many numbers a device: fewer and fuller products, bounded memory.
BATCH_ELEMENTS = 2**22


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


class _Batch(NamedTuple):
    """The matrices of one leaf as `[count, kept batch axes..., shorter side, longer side]`."""

    matrices: jax.Array
    split: tuple | None  # mesh axes that split each axis; None: not known
    undo: Callable[[jax.Array], jax.Array]


def _batch(leaf: jax.Array, view: MatrixView, spec: PartitionSpec | None) -> _Batch:
    matrices = to_matrices(leaf, view.rows, view.cols)
    split = None
    lead = 0
    if spec is not None:
        axes = mesh_axes(spec, leaf.ndim)
        kept = [axes[axis] for axis in range(leaf.ndim) if axis not in view.rows + view.cols]
        lead = next((i for i, names in enumerate(kept) if names), len(kept))
        # Of merged axes only the slowest can be split in the merged one.
        split = ((), *kept[lead:], axes[view.rows[0]], axes[view.cols[0]])
    rows, cols = matrices.shape[-2:]
    tall = rows > cols or (rows == cols and split is not None and split[-2] > split[-1])
    if tall:
        matrices = matrices.mT
        split = split and (*split[:-2], split[-1], split[-2])
    shape = matrices.shape

    def undo(done):
        done = done.reshape(shape)
        return from_matrices(done.mT if tall else done, leaf.shape, view.rows, view.cols)

    # Axes that are split, or may be, stay as they are; the leading ones that are not become one.
    return _Batch(matrices.reshape(prod(shape[:lead]), *shape[lead:]), split, undo)


def _orthogonalise(leaves: list, views: list, specs: list, options: dict[str, Any]) -> list[jax.Array]:
    """Orthogonalise the views of all leaves; matrices of equal shape and sharding run as one batch."""
    run = partial(newton_schulz, **options)
    batches = [_batch(*each) for each in zip(leaves, views, specs, strict=True)]
    groups: dict[Any, list[list[int]]] = {}
    for index, (matrices, split, _) in enumerate(batches):
        parts = groups.setdefault((matrices.shape[1:], split), [[]])
        room = BATCH_ELEMENTS * (1 if split is None else num_devices())
        if parts[-1] and sum(batches[other].matrices.size for other in parts[-1]) + matrices.size > room:
            parts.append([])
        parts[-1].append(index)
    done: dict[int, jax.Array] = {}
    for (_, split), parts in groups.items():
        for part in parts:
            together = jnp.concatenate([batches[index].matrices for index in part])
            together = on_whole_matrices(run, together, split)
            ends = np.cumsum([len(batches[index].matrices) for index in part])[:-1]
            for index, result in zip(part, jnp.split(together, ends), strict=True):
                done[index] = batches[index].undo(result)
    return [done[index] for index in range(len(leaves))]


def scale_by_muon(
    views: Tagged,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    scale: float = 0.2,
    coefficients: Coefficients = SIMPLE,
    eps: float = 1e-7,
    dtype: jax.typing.DTypeLike = jnp.float32,
    specs: Tagged = None,
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
        specs: tree like params of `PartitionSpec`: how leaves are split over the mesh of `jax.set_mesh`. Not needed for
            a correct update; with it, stacked layers are spread over the devices so that each works on whole matrices
            (`parallel/spread.py`).

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
        splits = flatten(updates, specs)[1] if specs is not None else [None] * len(leaves)
        options = {"coefficients": coefficients, "eps": eps, "dtype": dtype}
        results = _orthogonalise(directions, kinds, [splits[index] for index in chosen], options)
        for index, view, result in zip(chosen, kinds, results, strict=True):
            leaves[index] = scale * sqrt(max(view.sizes(result.shape))) * result
        return structure.unflatten(leaves), MuonState(structure.unflatten(moments))

    return optax.GradientTransformation(init, update)


def _mask(where: Callable[..., bool], *tags: Tagged) -> Callable[[Tree], Tree]:
    """Mask for `optax.masked`: true at the leaves for whose tags `where` holds."""

    def mask(tree):
        leaves, structure = jax.tree.flatten(tree, is_leaf=absent)
        values = zip(*(flatten(tree, each)[1] for each in tags), strict=True)
        return structure.unflatten(
            [leaf if absent(leaf) else where(*value) for leaf, value in zip(leaves, values, strict=True)]
        )

    return mask


def _in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner` on float32 copies: its state and its updates are float32 whatever the dtype of parameters."""

    def cast(tree):
        return jax.tree.map(lambda x: x.astype(jnp.float32), tree)

    return optax.GradientTransformation(
        lambda params: inner.init(cast(params)),
        lambda updates, state, params=None: inner.update(cast(updates), state, params),
    )


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

    >>> import jax, jax.numpy as jnp, optax
    >>> from k3train.optim import MatrixView, muon
    >>> params = {"hidden": jnp.ones((3, 8, 16)), "bias": jnp.zeros(16)}  # three stacked layers
    >>> views = {"hidden": MatrixView(rows=(1,), cols=(2,)), "bias": None}
    >>> tx = optax.chain(optax.clip_by_global_norm(1.0), muon(optax.cosine_decay_schedule(0.02, 100), views))
    >>> state = tx.init(params)
    >>> grads = jax.tree.map(jnp.ones_like, params)
    >>> updates, state = jax.jit(tx.update)(grads, state, params)
    >>> jax.tree.map(jnp.shape, optax.apply_updates(params, updates))
    {'bias': (16,), 'hidden': (3, 8, 16)}

    Args:
        learning_rate: a number, or a function of the 0-based step.
        views: tree like params of `MatrixView`, or `None` for AdamW; or a function from params to such a tree.
        decay: tree like params of bool: which leaves decay. Default: those with a view.
        frozen: tree like params of bool: leaves without view that get a zero update and no state. Default: none.
        adam_b1, adam_b2, adam_eps: AdamW's (without Nesterov).
        options: `momentum`, `nesterov`, `scale`, `coefficients`, `eps`, `dtype`, `specs` of `scale_by_muon`.
    """
    if frozen is None:
        frozen = _mask(lambda _: False, views)
    adam = _in_float32(optax.scale_by_adam(adam_b1, adam_b2, adam_eps))
    return optax.chain(
        optax.masked(optax.set_to_zero(), _mask(bool, frozen)),
        scale_by_muon(views, **options),
        optax.masked(adam, _mask(lambda view, stays: view is None and not stays, views, frozen)),
        optax.add_decayed_weights(weight_decay, _mask(bool, views if decay is None else decay)),
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

    >>> import jax.numpy as jnp
    >>> from k3train.optim import MatrixView, per_head_muon
    >>> params = {"query": jnp.ones((64, 4, 16)), "out": jnp.ones((4, 16, 64))}
    >>> whole = {"query": MatrixView((0,), (1, 2)), "out": MatrixView((0, 1), (2,))}
    >>> tx = per_head_muon(0.02, whole, {"query": 1, "out": None})  # query: four matrices of 64 x 16
    >>> state = tx.init(params)

    Args:
        views: whole-matrix views, see `muon`.
        head_axes: see `per_head`.
        options: see `muon`.
    """
    return muon(learning_rate, per_head(views, head_axes), **options)
