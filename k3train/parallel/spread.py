"""A batch of sharded matrices, brought whole onto the devices, worked on, and brought back.

Newton-Schulz needs whole matrices. Where there are batch axes long enough, the mesh axes that split the matrices are
moved to them: each device then holds some whole matrices instead of a piece of each, and there is no communication
inside the iteration. A move is one all-to-all of the data a device holds, there and back; nothing is replicated. Mesh
axes over which the matrices are copies share out the batch as well; the results come back by one all-gather.

On a CPU a device works on as many matrices at a time as its cache holds.
"""

from collections.abc import Callable, Sequence
from math import prod

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

MeshAxes = tuple[str, ...]
Function = Callable[[jax.Array], jax.Array]

#: Numbers that a CPU works on at a time: 2 MiB, the second-level caches of two cores (scripts/bench_step.py).
CACHED_NUMBERS = 2**19


def _sizes() -> dict[str, int]:
    """Axes of the current mesh that the compiler handles and that split something."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return {name: size for name, size, kind in kinds if size > 1 and kind == AxisType.Auto}


def num_devices() -> int:
    """Devices over which the compiler may split an array in the current mesh."""
    return prod(_sizes().values())


def mesh_axes(spec: PartitionSpec, ndim: int) -> list[MeshAxes]:
    """For each axis of an array the axes of the current mesh that split it."""
    sizes = _sizes()
    entries = [*spec, *(None,) * ndim][:ndim]
    names = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in entries]
    return [tuple(name for name in axes if name in sizes) for axes in names]


def on_whole_matrices(function: Function, x: jax.Array, split: Sequence[MeshAxes] | None) -> jax.Array:
    """`function(x)` for a function that treats every matrix of a batch alone and keeps zero matrices zero.

    Args:
        function: takes [..., rows, cols].
        x: [count, batch..., rows, cols].
        split: for each axis of `x` the mesh axes that split it; none for the first. A mesh axis for which the batch is
            too short stays where it is. `None`: not known, only that the first axis is not split.
    """
    if split is None:
        return _few_at_a_time(function, x)
    layouts = _layouts(x.shape, split)
    if len(layouts) == 1:
        return _on_each_device(function, x, layouts[0])
    missing = -len(x) % _parts(layouts[-1][0])
    y = jnp.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1))
    for layout in layouts:
        # without the barrier XLA joins the all-to-alls of different leaves and then refuses their different shapes
        y = jax.lax.optimization_barrier(jax.lax.with_sharding_constraint(y, PartitionSpec(*layout)))
    y = _on_each_device(function, y, layouts[-1])
    for layout in reversed(layouts):
        y = jax.lax.with_sharding_constraint(y, PartitionSpec(*layout))
    return y[: len(x)]


def _on_each_device(function: Function, x: jax.Array, layout: Sequence[MeshAxes]) -> jax.Array:
    """`function` of the matrices that each device holds; a matrix that is still split is the compiler's affair."""
    if layout[-2] or layout[-1]:
        return function(x)

    def local(part: jax.Array) -> jax.Array:
        return _few_at_a_time(function, part.reshape(-1, *part.shape[-2:])).reshape(part.shape)

    if not _sizes():
        return local(x)
    spec = PartitionSpec(*layout)
    return jax.shard_map(local, in_specs=spec, out_specs=spec, axis_names=set(_sizes()), check_vma=False)(x)


def _few_at_a_time(function: Function, x: jax.Array) -> jax.Array:
    """`function(x)`, on a CPU in pieces of the first axis that fit into the cache."""
    if jax.default_backend() != "cpu" or x.size <= CACHED_NUMBERS:
        return function(x)
    return jax.lax.map(function, x, batch_size=max(1, CACHED_NUMBERS * len(x) // x.size))


def _parts(names: MeshAxes) -> int:
    sizes = _sizes()
    return prod(sizes[name] for name in names)


def _layouts(shape: Sequence[int], split: Sequence[MeshAxes]) -> list[list[MeshAxes]]:
    """Shardings on the way from `split` to whole matrices spread over the devices.

    One mesh axis moves at a time, because XLA replicates when it is to move two at once.
    """
    spread = list(split)  # of the batch axes; what is still to be moved off the matrices does not matter here
    moves: list[tuple[str, int | None, int]] = []  # mesh axis, from, to
    for source in (-2, -1):
        for name in reversed(split[source]):
            target = _target(shape, spread, name)
            if target is None:
                break
            spread[target] = (*spread[target], name)
            moves.append((name, source, target))
    idle = []
    for name in sorted(_sizes().keys() - {name for names in split for name in names}):
        target = _target(shape, spread, name)
        if target is not None:
            spread[target] = (*spread[target], name)
            idle.append((name, None, target))
    layouts = [list(split)]
    for name, source, target in idle + moves:
        layout = list(layouts[-1])
        layout[target] = (*layout[target], name)
        if source is not None:
            layout[source] = layout[source][:-1]
        layouts.append(layout)
    return layouts


def _target(shape: Sequence[int], spread: Sequence[MeshAxes], name: str) -> int | None:
    """The batch axis that takes one more mesh axis with the least padding; None if every one is too short."""
    best, least = None, 0.0
    for axis, length in enumerate(shape[:-2]):
        parts = _parts((*spread[axis], name))
        if parts > length or (axis > 0 and length % parts):  # only the first axis is padded
            continue
        waste = -length % parts / length
        if best is None or waste < least:
            best, least = axis, waste
    return best
