"""Sums over the whole batch of something each device computes on its own rows."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from k3train.parallel.mesh import AXES, BATCH_AXES, current_mesh


def sum_over_batch(function: Callable[..., jax.Array], batched: tuple[jax.Array, ...], *shared: jax.Array) -> jax.Array:
    """`function(*batched, *shared)` on each device's rows, added over the devices that hold different rows.

    For integer results that must not depend on the sharding, such as counts: one reduction, and devices that hold
    the same rows (tensor parallelism) count once.

    Args:
        function: from local rows [b, ...] to an array without a batch axis.
        batched: arrays whose first axis is split over the batch axes of the mesh.
        shared: arrays that every device holds whole.
    """
    mesh = current_mesh()
    if mesh.empty or all(size == 1 for size in dict(mesh.shape).values()):
        return function(*batched, *shared)

    def local(*args):
        return jax.lax.psum(function(*args), BATCH_AXES)

    rows = PartitionSpec(BATCH_AXES)
    return jax.shard_map(
        local,
        in_specs=(rows,) * len(batched) + (PartitionSpec(),) * len(shared),
        out_specs=PartitionSpec(),
        axis_names=set(AXES),
        check_vma=False,
    )(*batched, *shared)


def differentiable_sum_over_batch(
    function: Callable[..., jax.Array], batched: tuple[jax.Array, ...], *shared: jax.Array
) -> jax.Array:
    """The same for a scalar that is differentiated with respect to all arrays.

    What is shared is brought whole to every device before, and its gradient is added up over the devices after all of
    `function` is done. Left to the compiler, a loop inside `function` would add it up in every round. The tensor axis
    is the compiler's as elsewhere.
    """
    mesh = current_mesh()
    if mesh.empty or all(dict(mesh.shape)[axis] == 1 for axis in BATCH_AXES):
        return function(*batched, *shared)
    rows = PartitionSpec(BATCH_AXES)
    parts = jax.shard_map(
        lambda *args: function(*args)[None],
        in_specs=(rows,) * len(batched) + (PartitionSpec(),) * len(shared),
        out_specs=rows,
        axis_names=set(BATCH_AXES),
        check_vma=False,
    )(*batched, *shared)
    return jnp.sum(parts)
