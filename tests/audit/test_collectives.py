"""Collectives of a compiled program, read from its text."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from k3train.audit.collectives import Collective, collectives
from k3train.parallel.mesh import make_mesh, use_mesh

# on each of 8 devices [16, 4] float32 comes in
CASES = {
    "all-gather": (lambda x: lax.all_gather(x, "data"), 8 * 256, 7 * 256),
    "all-to-all": (lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True), 256, 256 * 7 // 8),
    "all-reduce": (lambda x: lax.psum(x, "data"), 256, 2 * 256 * 7 // 8),
    "reduce-scatter": (lambda x: lax.psum_scatter(x, "data", tiled=True), 32, 7 * 32),
    "collective-permute": (lambda x: lax.ppermute(x, "data", [(i, (i + 1) % 8) for i in range(8)]), 256, 256),
}


@pytest.mark.parametrize("kind", CASES)
def test_kind_bytes_and_received(kind):
    function, size, received = CASES[kind]
    mesh = make_mesh({"data": 8})
    spec = PartitionSpec("data")
    with use_mesh(mesh):
        run = jax.jit(jax.shard_map(lambda x: jnp.sin(function(jnp.cos(x))), in_specs=spec, out_specs=spec))
        (found,) = collectives(run.lower(jnp.ones((128, 4))).compile().as_text())
    assert (found.kind, found.size, found.received) == (kind, size, received)


def test_text_of_other_backends():
    text = """
  %a = (bf16[8,2]{1,0}, f8e4m3fn[16]{0}, pred[]) all-gather-start(%x), replica_groups=[2,4]<=[8], dimensions={0}
  ROOT %b = f32[] all-reduce(%y), replica_groups={{0,1,2},{3,4,5}}, to_apply=%add
  %d = f32[4,4]{1,0} all-to-all(%z), replica_groups=mesh['data'=4,'tensor'=2] {'data':(1)2,'tensor'}, dimensions={0}
  %c = f32[2]{0} add(%a, %b), metadata={op_name="all-gather(x)"}
"""
    assert collectives(text) == [
        Collective("all-gather", 32 + 16 + 1, 4), Collective("all-reduce", 4, 3), Collective("all-to-all", 64, 4)
    ]  # fmt: skip
