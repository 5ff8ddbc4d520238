"""The device mesh: five named axes, always all five (docs/k3.md section 4; README, "Map of the code")."""

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ("pipeline", "data", "context", "expert", "tensor")
#: The batch is split over both: outside the MoE layers the expert axis is more data parallelism.
BATCH_AXES = ("data", "expert")


def make_mesh(sizes: dict[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """Mesh of the given axis sizes (missing ones are 1) over `devices` (jax devices; default: all).

    Raises:
        ValueError: the product of the sizes is not the number of devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    if prod(shape) != len(devices):
        shown = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, shape, strict=True))
        raise ValueError(f"mesh {shown} needs {prod(shape)} devices, there are {len(devices)}")
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def current_mesh() -> jax.sharding.AbstractMesh:
    """The mesh set by `use_mesh`; empty outside of it."""
    return jax.sharding.get_abstract_mesh()


def use_mesh(mesh: Mesh):
    """Context in which `shard` and the expert exchange see `mesh`."""
    return jax.set_mesh(mesh)


def axis_size(axis: str) -> int:
    """Size of a mesh axis in the current mesh; 1 outside of any mesh."""
    return dict(current_mesh().shape).get(axis, 1)
