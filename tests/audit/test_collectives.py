"""Collectives of a compiled program, read from its text."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from k3train.audit.collectives import collectives
from k3train.audit.hlo import computations, product_flops
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
    found = [(c.kind, c.size, c.group) for c in collectives(text)]
    assert found == [("all-gather", 32 + 16 + 1, 4), ("all-reduce", 4, 3), ("all-to-all", 64, 4)]


GROUPS = {
    "replica_groups={{0,1,2,3},{4,5,6,7}}": ((0, 1, 2, 3), ("expert",)),
    "replica_groups={{0,4},{1,5},{2,6},{3,7}}": ((0, 4), ("data",)),
    "replica_groups={}": (tuple(range(8)), ("data", "expert")),
    "replica_groups=[2,4]<=[8]": ((0, 1, 2, 3), ("expert",)),
    "replica_groups=[4,2]<=[2,4]T(1,0)": ((0, 4), ("data",)),
    "replica_groups=mesh['a'=2,'b'=4] {'a'}": ((0, 4), ("data",)),
    "replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}": ((0, 1), ("expert",)),
    "replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}": ((0, 4), ("data",)),
    "source_target_pairs={{0,4},{4,0}}": ((0, 4), ("data",)),
}


@pytest.mark.parametrize("written", GROUPS)
def test_mesh_axes_of_a_group(written):
    text = f"  %a = f32[4]{{0}} all-reduce(%x), {written}, to_apply=%add"
    (found,) = collectives(text, {"data": 2, "expert": 4})
    assert (found.members, found.axes) == GROUPS[written]


def test_loops_multiply():
    """Five layers, each in three rounds; a loop whose length depends on data counts once, and says so."""
    mesh = make_mesh({"data": 2, "expert": 4})

    def layers(x, rounds):
        def layer(x, _):
            x = lax.fori_loop(0, 3, lambda _, x: jnp.tanh(lax.psum(x @ x, "expert")), x)
            return lax.fori_loop(0, rounds, lambda _, x: jnp.tanh(lax.psum(x, "data")), x), None

        return lax.scan(layer, x, length=5)[0]

    spec = PartitionSpec()
    with use_mesh(mesh):
        run = jax.jit(jax.shard_map(layers, in_specs=(spec, spec), out_specs=spec, check_vma=False))
        text = run.lower(jnp.ones((4, 4)), jnp.int32(2)).compile().as_text() or ""
    program = computations(text)
    found = {c.axes: c for c in collectives(program, dict(mesh.shape))}
    assert (found["expert",].times, found["expert",].size, found["expert",].open_ended) == (15, 64, False)
    assert (found["data",].times, found["data",].open_ended) == (5, True)
    assert product_flops(program) == (15 * 2 * 4 * 4 * 4, 0)
