"""A batch of sharded matrices, brought whole onto the devices, worked on, and brought back.

Newton-Schulz needs whole matrices. Where the leading batch axis is long enough, the mesh axes that split the matrices
are moved to it: each device then holds some whole matrices instead of a piece of each, and there is no communication
inside the iteration. A move is one all-to-all of the data a device holds, there and back; nothing is replicated. Mesh
axes over which the matrices are copies share out the batch as well; the results come back by one all-gather.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

MeshAxes = tuple[str, ...]


def _sizes() -> dict[str, int]:
    """Axes of the current mesh that the compiler handles and that split something."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return {name: size for name, size, kind in kinds if size > 1 and kind == AxisType.Auto}


def mesh_axes(spec: PartitionSpec, ndim: int) -> list[MeshAxes]:
    """For each axis of an array the axes of the current mesh that split it."""
    sizes = _sizes()
    entries = [*spec, *(None,) * ndim][:ndim]
    names = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in entries]
    return [tuple(name for name in axes if name in sizes) for axes in names]


def on_whole_matrices(function: Callable[[jax.Array], jax.Array], x: jax.Array, split: Sequence[MeshAxes]) -> jax.Array:
    """`function(x)` for a function that treats every matrix of a batch alone and keeps zero matrices zero.

    Args:
        x: [count, batch..., rows, cols].
        split: for each axis of `x` the mesh axes that split it; none for the first, which is spread. Where it is too
            short for a mesh axis, that axis stays where it is.
    """
    layouts, devices = _layouts(len(x), split)
    if len(layouts) == 1:
        return function(x)
    y = jnp.pad(x, [(0, -len(x) % devices)] + [(0, 0)] * (x.ndim - 1))
    for layout in layouts:
        y = jax.lax.with_sharding_constraint(y, PartitionSpec(*layout))
    y = function(y)
    for layout in reversed(layouts):
        y = jax.lax.with_sharding_constraint(y, PartitionSpec(*layout))
    return y[: len(x)]


def _layouts(count: int, split: Sequence[MeshAxes]) -> tuple[list[list[MeshAxes]], int]:
    """Shardings from `split` to the spread one, in order, and the number of parts of the first axis in the last."""
    sizes, devices = _sizes(), 1
    moving = []
    for axis in (-2, -1):
        for name in reversed(split[axis]):
            if devices * sizes[name] > count:  # some devices would have nothing to do
                break
            devices *= sizes[name]
            moving.append((axis, name))
    idle = []
    for name in sorted(sizes.keys() - {name for names in split for name in names}):
        if devices * sizes[name] <= count:
            devices *= sizes[name]
            idle.append(name)
    # One mesh axis at a time, because XLA replicates when it is to move two at once.
    layouts: list[list[MeshAxes]] = [list(split)]
    for axis, name in [(None, name) for name in idle] + moving:
        layout = list(layouts[-1])
        layout[0] = (*layout[0], name)
        if axis is not None:
            layout[axis] = layout[axis][:-1]
        layouts.append(layout)
    return layouts, devices
