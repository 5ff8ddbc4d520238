"""Equal work on every device, whatever the router does: exact in values and gradients with every transport."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from k3train.ops.expert_plan import pairs_of_ranks, plan_ranks
from k3train.ops.mx import E4M3, Rounding
from k3train.ops.situ import situ_glu
from k3train.parallel.balanced import _count, _journey
from k3train.parallel.exchange import BUDGET, TRANSPORTS, budget
from k3train.parallel.expert import Sharing, routed_experts
from k3train.parallel.mesh import AXES, make_mesh, use_mesh
from k3train.parallel.rules import spec
from tests.parallel.test_expert import NAMES, assert_same, layer, make


@pytest.fixture
def ragged_on_cpu(monkeypatch):
    """`lax.ragged_all_to_all` by its definition, as this backend has none; a wrong receive size gives NaN."""

    def exchange(operand, output, input_offsets, send_sizes, output_offsets, recv_sizes, *, axis_name):
        me, row = jax.lax.axis_index(axis_name), jnp.arange(output.shape[0])
        operands, starts, sizes, ends = (
            jax.lax.all_gather(a, axis_name) for a in (operand, input_offsets, send_sizes, output_offsets)
        )
        for source in range(len(recv_sizes)):
            start, size, end = (a[source, me] for a in (starts, sizes, ends))
            here = (row >= end) & (row < end + size)
            rows = operands[source].at[start + row - end].get(mode="fill", fill_value=jnp.nan)
            output = jnp.where(here.reshape(-1, *[1] * (output.ndim - 1)), rows, output)
        return jnp.where(jnp.array_equal(sizes[:, me], recv_sizes), output, jnp.nan)

    monkeypatch.setattr(jax.lax, "ragged_all_to_all", exchange)


EXPERTS, CHOSEN = 16, 4


def choices(case, rows=8, seq=6):
    """Experts of every token; all cases have one shape and so one program."""
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((rows, seq, EXPERTS)), axis=-1)[..., :CHOSEN]
    if case == "four experts":  # one device of four owns all the work
        ids = ids % 4
    if case == "one expert":
        ids = np.full_like(ids, 5)
    if case == "one source":  # the rows of one device choose other experts than the rest
        ids[0] = ids[0] % 2
    if case == "padding":
        ids[:, seq // 2 :] = EXPERTS
    if case == "all padding":
        ids[:] = EXPERTS
    return jnp.asarray(ids, jnp.int32)


CASES = ("even", "four experts", "one expert", "one source", "padding", "all padding")


@cache
def program(transport):
    """The compiled layer of a transport on data 2 x expert 4; None: on one device."""
    if transport is None:
        return jax.jit(layer)
    arrays, _, cotangent = make()
    with use_mesh(make_mesh({"data": 2, "expert": 4})):
        sharing = Sharing("equal", transport)
        return jax.jit(partial(layer, sharing=sharing)).lower(arrays, choices("even"), cotangent).compile()


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("case", CASES)
def test_equals_one_device(transport, case, ragged_on_cpu):
    arrays, _, cotangent = make()
    inputs = (arrays, choices(case), cotangent)
    assert_same(program(transport)(*inputs), program(None)(*inputs))


def test_other_meshes():
    """With tensor parallelism, and rows that the mesh does not divide."""
    arrays, _, cotangent = make(rows=3)
    inputs = (arrays, choices("four experts", rows=3), cotangent)
    with use_mesh(make_mesh({"data": 2, "expert": 2, "tensor": 2})):
        got = jax.jit(partial(layer, sharing=Sharing("equal")))(*inputs)
    assert_same(got, jax.jit(layer)(*inputs))


def test_rounded_inputs():
    """Rounding sees the same rows wherever they are computed."""
    (x, weights, w1, w3, w2), _, _ = make(width=64, inner=64)
    ids = choices("four experts")

    def ours(sharing):
        return routed_experts(
            x, ids, weights, w1, w3, w2, activation=situ_glu, rounding=Rounding(E4M3, "floor"), sharing=sharing
        )

    wanted = jax.jit(lambda: ours(Sharing()))()
    with use_mesh(make_mesh({"data": 2, "expert": 4})):
        np.testing.assert_allclose(jax.jit(lambda: ours(Sharing("equal")))(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES[:4])
def test_every_device_computes_as_many_pairs(case):
    """S x K rows arrive on each device, from at most E / R foreign experts."""
    ids_BSK, ranks, experts = choices(case), 8, EXPERTS

    def arriving(ids_BSK):
        counts_RE = jax.lax.all_gather(_count(ids_BSK.reshape(-1), experts), "expert")
        load_E = jnp.sum(counts_RE, axis=0)
        allotted_ER = pairs_of_ranks(load_E, plan_ranks(load_E, ranks))
        return _journey(ids_BSK.reshape(-1), counts_RE, allotted_ER, "dense").slot_N[None]

    with use_mesh(make_mesh({"expert": ranks})):
        rows = PartitionSpec("expert")
        slot_RN = np.asarray(jax.jit(jax.shard_map(arriving, in_specs=rows, out_specs=rows, check_vma=False))(ids_BSK))
    assert slot_RN.shape == (ranks, ids_BSK.size // ranks)
    assert (slot_RN < 2 * experts // ranks).all()


def test_unknown_names():
    arrays, ids, _ = make()
    for sharing in (Sharing("even"), Sharing("equal", "sparse")):
        with pytest.raises(ValueError, match="equal, none, transport of ragged, dense, budgeted"):
            routed_experts(arrays[0], ids, *arrays[1:], activation=situ_glu, sharing=sharing)


def released_width(sizes, transport, implementation):
    """The layer with 896 experts, forward and backward, as lowered for a mesh that need not exist."""
    mesh = AbstractMesh(tuple(sizes.get(a, 1) for a in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES))
    tokens, experts, chosen, width, inner = (64, 128), 896, 16, 64, 32
    shapes = (
        (*tokens, width),
        (*tokens, chosen),
        (experts, width, inner),
        (experts, width, inner),
        (experts, inner, width),
    )
    dtypes = (jnp.bfloat16, jnp.float32, *(jnp.bfloat16,) * 3)
    arrays = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec(names)))
        for shape, dtype, names in zip(shapes, dtypes, NAMES, strict=True)
    ]
    ids = jax.ShapeDtypeStruct(shapes[1], jnp.int32, sharding=arrays[1].sharding)

    def function(ids, *arrays):
        def forward(x, *rest):
            how = {"activation": situ_glu, "sharing": Sharing("equal", transport), "implementation": implementation}
            return routed_experts(x, ids, *rest, **how)

        return jax.vjp(forward, *arrays)[1](jnp.ones(arrays[0].shape, jnp.float32))

    pairs = tokens[0] * tokens[1] // 64 * chosen
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function).trace(ids, *arrays), pairs, width


def test_ragged_buffers_on_64_devices():
    """As lowered for TPU: each way carries S x K rows of the latent in the compute dtype, nothing else is so large."""
    traced, pairs, width = released_width({"data": 4, "expert": 16}, "ragged", "ragged")
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    results = re.findall(r"custom_call @ragged_all_to_all.*-> tensor<([\dx]+)x(\w+)>", text)
    rows = [(shape, dtype) for shape, dtype in results if shape.startswith(f"{pairs}x")]
    assert rows.count((f"{pairs}x{width}", "bf16")) >= 2
    assert set(rows) == {(f"{pairs}x{width}", "bf16"), (f"{pairs}x1", "f32")}
    experts_here = 896 // 16
    others = {shape for shape, _ in results} - {shape for shape, _ in rows}
    assert {int(shape.split("x")[0]) for shape in others} <= {experts_here, 1}


def test_dense_budget():
    with use_mesh(make_mesh({"expert": 8})):
        assert budget(4096) * 8 == 4096 * BUDGET < 1.5 * 4096
        assert budget(3) == 1
