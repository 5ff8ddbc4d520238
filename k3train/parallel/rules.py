"""Logical axis -> mesh axis: one rule per name. The only place that decides how an array is split."""

from collections.abc import Sequence

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3train.core.axes import ACTIVATION_AXES, PARAM_AXES
from k3train.core.param import ParamInfo
from k3train.core.tree import Tree, leaves, map_leaves
from k3train.parallel.mesh import BATCH_AXES, current_mesh

MeshAxes = str | tuple[str, ...] | None

RULES: dict[str, MeshAxes] = {
    # parameters: FSDP over data on the stream width, heads and inner widths over tensor, experts over expert
    "layers": None,
    "embed": "data",
    "vocab": "tensor",
    "heads": "tensor",
    "qkv": None,
    "head_dim": None,
    "rank": None,
    "rank_in": "data",
    "mlp": "tensor",
    "latent": None,
    "experts": "expert",
    "expert_in": "data",
    "expert_mlp": "tensor",
    "router_experts": None,
    "conv_tap": None,
    "norm": None,
    # activations
    "act_batch": BATCH_AXES,
    "act_seq": "context",
    "act_embed": None,
    "act_heads": "tensor",
    "act_mlp": "tensor",
    "act_vocab": "tensor",
}
assert RULES.keys() == PARAM_AXES.keys() | ACTIVATION_AXES.keys()


def spec(names: Sequence[str | None]) -> PartitionSpec:
    """PartitionSpec of an array with these logical axes; `None` is an axis that is never split.

    Raises:
        ValueError: a name without a rule, or two axes split over the same mesh axis.
    """
    entries: list[MeshAxes] = []
    used: dict[str, str] = {}
    for name in names:
        if name is not None and name not in RULES:
            raise ValueError(f"axis name {name!r} has no rule; known names: {', '.join(sorted(RULES))}")
        entry = None if name is None else RULES[name]
        for axis in (entry,) if isinstance(entry, str) else entry or ():
            if axis in used:
                raise ValueError(f"axes {used[axis]!r} and {name!r} of one array both split over mesh axis {axis!r}")
            used[axis] = str(name)
        entries.append(entry)
    return PartitionSpec(*entries)


def shard(x: jax.Array, *names: str | None) -> jax.Array:
    """Constrain an activation to the sharding of its logical axes; the identity outside of a mesh."""
    if current_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec(names))


def param_sharding(info: ParamInfo, mesh: Mesh) -> NamedSharding:
    """How one parameter lies on the mesh."""
    return NamedSharding(mesh, spec(info.axes))


def param_shardings(infos: Tree, mesh: Mesh) -> Tree:
    """NamedSharding per parameter, same nested keys as `infos`."""

    return map_leaves(lambda info: param_sharding(info, mesh), infos)


def indivisible(infos: Tree, sizes: dict[str, int]) -> list[str]:
    """One message per parameter axis that its mesh axis does not divide."""
    messages = set()
    for _, info in leaves(infos):
        for name, size in zip(info.axes, info.shape, strict=True):
            axis = RULES[name]
            parts = sizes.get(axis, 1) if isinstance(axis, str) else 1
            if size % parts:
                messages.add(f"{info.component}: {name} has {size} entries, which mesh.{axis}={parts} does not divide")
    return sorted(messages)
