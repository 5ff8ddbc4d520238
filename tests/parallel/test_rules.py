"""One rule per axis name; unknown names, collisions and bad meshes are refused."""

import jax
import pytest
from jax.sharding import PartitionSpec

from k3train.core.param import AdamW, ParamInfo
from k3train.parallel.mesh import AXES, make_mesh
from k3train.parallel.rules import indivisible, spec


def test_names_become_mesh_axes():
    assert spec(("layers", "embed", "heads", "head_dim")) == PartitionSpec(None, "data", "tensor", None)
    assert spec(("act_batch", "act_seq", None)) == PartitionSpec(("data", "expert"), "context", None)
    assert spec(("layers", "experts", "expert_in", "expert_mlp")) == PartitionSpec(None, "expert", "data", "tensor")


def test_unknown_names_and_collisions_are_refused():
    with pytest.raises(ValueError, match="'embd' has no rule"):
        spec(("embd",))
    with pytest.raises(ValueError, match="both split over mesh axis 'tensor'"):
        spec(("heads", "mlp"))


def test_the_mesh_has_always_five_axes_and_must_fit():
    assert make_mesh({"data": 2, "expert": 4}).axis_names == AXES
    assert dict(make_mesh({}, jax.devices()[:1]).shape) == dict.fromkeys(AXES, 1)
    with pytest.raises(ValueError, match="needs 6 devices, there are 8"):
        make_mesh({"data": 2, "expert": 3})


def test_indivisible_axes_are_named_with_numbers():
    info = ParamInfo((6, 10), ("embed", "mlp"), AdamW(True, ""), "dense mlp")
    assert indivisible({"w": info}, {"data": 4, "tensor": 5}) == [
        "dense mlp: embed has 6 entries, which mesh.data=4 does not divide"
    ]
