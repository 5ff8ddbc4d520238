"""A batch of sharded matrices, brought whole onto the devices, worked on, and brought back.

Newton-Schulz needs whole matrices. Each device gives away its pieces of most matrices and gets the missing pieces of a
few: one all-to-all over the mesh axes that split the matrices, there and back, and no communication inside the
iteration. Nothing is replicated. Mesh axes over which the matrices are copies share out the batch as well; the results
come back by one all-gather.

What a device receives is therefore its share of the matrices without the pieces it had, then its pieces of all results
without those of its own share: the least that is possible when every matrix is worked on by one device, rounded up to
the device with most matrices. tests/optim/test_traffic.py reads it off the compiled program.
"""

from collections.abc import Callable, Sequence
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec

MeshAxes = tuple[str, ...]
Function = Callable[[jax.Array], jax.Array]

#: Numbers that a CPU works on at a time: 2 MiB, the second-level caches of two cores (scripts/bench_muon.py).
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
        function: takes [number, rows, cols], or all of `x` where `split` is not known.
        x: [count, batch..., rows, cols].
        split: for each axis of `x` the mesh axes that split it; none for the first. `None`: not known, only that the
            first axis is not split.
    """
    if split is None:
        return _few_at_a_time(function, x)
    sizes = _sizes()
    if not sizes:
        return _few_at_a_time(function, x.reshape(-1, *x.shape[-2:])).reshape(x.shape)
    number = prod(x.shape[:-2]) // prod(sizes[name] for names in split[:-2] for name in names)
    exchange = partial(_exchange, function, sizes, split[-2], split[-1], _idle(sizes, split, number))

    def local(part: jax.Array) -> jax.Array:
        return exchange(part.reshape(-1, *part.shape[-2:])).reshape(part.shape)

    spec = PartitionSpec(*split)
    return jax.shard_map(local, in_specs=spec, out_specs=spec, axis_names=set(sizes), check_vma=False)(x)


def _idle(sizes: dict[str, int], split: Sequence[MeshAxes], number: int) -> MeshAxes:
    """Mesh axes over which the matrices are copies, as far as sharing them out leaves a device fewer matrices."""
    parts, idle = prod(sizes[name] for name in (*split[-2], *split[-1])), []
    for name in sorted(sizes.keys() - {name for names in split for name in names}):
        if parts < number:
            idle.append(name)
            parts *= sizes[name]
    return tuple(idle)


def _exchange(
    function: Function, sizes: dict[str, int], row_axes: MeshAxes, col_axes: MeshAxes, idle: MeshAxes, x: jax.Array
) -> jax.Array:
    """On one device: pieces [N, r, c] of all matrices in, pieces of all results out."""
    R, C, shares = (prod(sizes[name] for name in names) for names in (row_axes, col_axes, idle))
    N, r, c = x.shape
    share = -(-N // shares)  # matrices for each of the devices that hold the same pieces
    n = -(-share // (R * C))  # whole matrices on every device
    if idle:
        x = _padded(x, share * shares)
        x = lax.dynamic_slice_in_dim(x, lax.axis_index(idle) * share, share)
    if R * C > 1:
        x = _padded(x, n * R * C).reshape(R * C, n, r, c)
        x = lax.all_to_all(x, row_axes + col_axes, 0, 0)
        x = x.reshape(R, C, n, r, c).transpose(2, 0, 3, 1, 4).reshape(n, R * r, C * c)
    x = _few_at_a_time(function, x)
    if R * C > 1:
        x = x.reshape(n, R, r, C, c).transpose(1, 3, 0, 2, 4).reshape(R * C, n, r, c)
        x = lax.all_to_all(x, row_axes + col_axes, 0, 0)
        x = x.reshape(R * C * n, r, c)[:share]
    return lax.all_gather(x, idle, tiled=True)[:N] if idle else x


def _padded(x: jax.Array, number: int) -> jax.Array:
    return jnp.pad(x, ((0, number - len(x)), (0, 0), (0, 0)))


def _few_at_a_time(function: Function, x: jax.Array) -> jax.Array:
    """`function(x)`, on a CPU in pieces of the first axis that fit into the cache."""
    if jax.default_backend() != "cpu" or x.size <= CACHED_NUMBERS:
        return function(x)
    return lax.map(function, x, batch_size=max(1, CACHED_NUMBERS * len(x) // x.size))
