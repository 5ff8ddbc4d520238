"""Leaves that a release stores as one matrix, orthogonalised together (docs/k3.md section 8, row 6).

A leaf says in its route (`core.param.Joint`) with which siblings it lies side by side. The optimizer then works on a
tree in which those leaves are one, and the updates are cut apart again.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import optax

from k3train.core.param import Clip, Joint, Muon, ParamInfo
from k3train.core.tree import Tree

#: (parts in the order of their keys, axis along which they lie side by side) -> one leaf
Combine = Callable[[list[Any], int], Any]


def _joint(info: ParamInfo) -> Joint | None:
    return info.route.joint if isinstance(info.route, Muon) else None


def partners(infos: Tree) -> dict[str, list[str]]:
    """Keys of one module's leaves that are joined, by the name of the whole."""
    found: dict[str, list[str]] = {}
    for key in sorted(infos):
        joint = None if isinstance(infos[key], dict) else _joint(infos[key])
        if joint is not None:
            found.setdefault(joint.name, []).append(key)
    return found


def merged(infos: Tree, tree: Tree, combine: Combine) -> Tree:
    """`tree` (keys as in `infos`) with joined leaves replaced by `combine` of them, under the name of the whole."""
    groups = partners(infos)
    taken = {key for keys in groups.values() for key in keys}
    out = {
        key: merged(info, tree[key], combine) if isinstance(info, dict) else tree[key]
        for key, info in infos.items()
        if key not in taken
    }
    for name, keys in groups.items():
        assert name not in infos, f"{name} is the name of a parameter already"
        axes = {infos[key].axes.index(infos[key].route.joint.axis) for key in keys}
        assert len(axes) == 1, f"parts of {name} lie along different axes"
        out[name] = combine([tree[key] for key in keys], axes.pop())
    return out


def merged_infos(infos: Tree) -> Tree:
    """The metadata of the tree that the optimizer works on."""
    return merged(infos, infos, _one_info)


def _one_info(parts: Sequence[ParamInfo], axis: int) -> ParamInfo:
    first = parts[0]
    shape = list(first.shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    return replace(first, shape=tuple(shape), clip=_one_clip(parts, axis))


def _one_clip(parts: Sequence[ParamInfo], axis: int) -> Clip | None:
    """Entries of a part without clip have exponent 0."""
    named = next((part.clip for part in parts if part.clip is not None), None)
    if named is None:
        return None
    assert all(p.clip is None or p.axes.index(p.clip.axis) == axis for p in parts), "clip across a joined axis"
    return replace(named, parts=sum((p.clip.parts if p.clip else ((p.shape[axis], 0.0),) for p in parts), ()))


def first(parts: list[Any], axis: int) -> Any:
    """`Combine` for tags that are the same for all parts, such as shardings."""
    del axis
    return parts[0]


def on_merged(inner: optax.GradientTransformationExtraArgs, infos: Tree) -> optax.GradientTransformationExtraArgs:
    """`inner`, which works on the merged tree, for the tree of `infos`. Its state is in the form of the merged tree."""

    def merge(tree: Tree) -> Tree:
        return merged(infos, tree, lambda parts, axis: jnp.concatenate(parts, axis))

    def update(updates, state, params=None, *, max_logits=None, **extra_args):
        if max_logits is not None:
            max_logits = merged(infos, max_logits, lambda parts, _: next((p for p in parts if p is not None), None))
        params = None if params is None else merge(params)
        moved: Any
        moved, state = inner.update(merge(updates), state, params, max_logits=max_logits, **extra_args)
        return _cut(infos, moved), state

    return optax.GradientTransformationExtraArgs(lambda params: inner.init(merge(params)), update)


def _cut(infos: Tree, tree: Tree) -> Tree:
    """The inverse of merging, for arrays."""
    pieces: dict[str, jax.Array] = {}
    for name, keys in partners(infos).items():
        axis = infos[keys[0]].axes.index(infos[keys[0]].route.joint.axis)
        ends = list(accumulate(infos[key].shape[axis] for key in keys))
        pieces |= dict(zip(keys, jnp.split(tree[name], ends[:-1], axis), strict=True))
    return {
        key: _cut(info, tree[key]) if isinstance(info, dict) else pieces.get(key, tree.get(key))
        for key, info in infos.items()
    }
