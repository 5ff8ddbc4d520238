"""Sums over the whole batch of something each device computes on its own rows."""

from collections.abc import Callable

import jax
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
