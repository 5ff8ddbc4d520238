"""The training step with K3's 896 experts, 16 of them chosen, on 64 simulated devices: as on one device."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tolerances import assert_close

PROGRAM = """
import json
from dataclasses import replace
from math import prod

import jax
jax.config.update("jax_num_cpu_devices", 64)
jax.config.update("jax_default_matmul_precision", "float32")
import jax.numpy as jnp
from jax.sharding import NamedSharding
from k3train.audit.collectives import collectives
from k3train.config.load import load
from k3train.config.schema import MeshConfig
from k3train.ops.situ import situ_glu
from k3train.parallel.expert import Sharing, routed_experts
from k3train.parallel.mesh import make_mesh, use_mesh
from k3train.parallel.rules import spec
from k3train.train.step import Program
from tests.train import micro

config, _ = load("tiny_64")
experts = {name: getattr(config.model, name) for name in ("num_experts", "num_experts_per_token")}
small = {"moe_intermediate_size": 8, "moe_latent_size": 16}
layers = {"num_layers": 2, "kda_layers": (0,), "mla_layers": (1,), "dense_layers": (0,), "moe_layers": (1,)}
model = replace(micro.MODEL, **experts, **small, **layers)
rows = micro.batch(rows=64, seq=24)


def trained(sizes):
    run = replace(micro.config(), model=model, mesh=MeshConfig(**sizes))
    program = Program(run, make_mesh(sizes, jax.devices()[: prod(sizes.values())]))
    state, batch, seen = program.init(), program.put_batch(rows), []
    for _ in range(3):
        state, metrics = program.train_step(state, batch)
        seen.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    return seen


def dense_exchange():
    "Bytes of the largest buffer of each kind of collective in the layer, as compiled, and of S x K rows."
    tokens, width, inner, chosen = (64, 64), 64, 32, experts["num_experts_per_token"]
    E, names = experts["num_experts"], ("act_batch", "act_seq", None)
    into, out_of = ("experts", "expert_in", "expert_mlp"), ("experts", "expert_mlp", "expert_in")
    mesh = make_mesh({"data": 4, "expert": 16})

    def array(names, dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec(names)))

    def loss(x, weights, w1, w3, w2, ids):
        return jnp.sum(routed_experts(x, ids, weights, w1, w3, w2, activation=situ_glu, sharing=Sharing("equal")))

    arrays = [
        array(names, "float32", *tokens, width), array(names, "float32", *tokens, chosen),
        array(into, "float32", E, width, inner), array(into, "float32", E, width, inner),
        array(out_of, "float32", E, inner, width), array(names, "int32", *tokens, chosen),
    ]
    with use_mesh(mesh):
        text = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3, 4))).lower(*arrays).compile().as_text()
    largest = {}
    for c in (c for c in collectives(text) if c.group > 1):
        largest[c.kind] = max(c.size, largest.get(c.kind, 0))
    return {"largest": largest, "rows": prod(tokens) // 64 * chosen * width * 4, "matrix": width * inner * 4}


meshes = [{"expert": 1}, {"data": 4, "expert": 16}, {"expert": 64}, {"data": 2, "expert": 16, "tensor": 2}]
print(json.dumps({"losses": [trained(sizes) for sizes in meshes], "dense": dense_exchange()}))
"""


@pytest.fixture(scope="module")
def seen():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("mesh", [1, 2, 3], ids=["4x16 data-expert", "64 expert", "2x16x2 data-expert-tensor"])
def test_three_steps_equal_one_device(seen, mesh):
    alone, together = seen["losses"][0], seen["losses"][mesh]
    for (loss, norm), (wanted_loss, wanted_norm) in zip(together, alone, strict=True):
        assert_close(loss, wanted_loss, "mesh loss")
        assert_close(norm, wanted_norm, "mesh gradient")
    assert alone[2][0] < alone[0][0]


def test_dense_buffers(seen):
    """Tokens: at most 1.5 times S x K rows. Experts: one at a time, three matrices; all 56 only from FSDP shards."""
    dense = seen["dense"]
    assert dense["rows"] < dense["largest"]["all-to-all"] <= 1.5 * dense["rows"]
    assert dense["largest"]["all-reduce"] <= 3 * dense["matrix"]
    assert dense["largest"]["all-gather"] <= 896 // 16 * dense["matrix"]
    assert set(dense["largest"]) <= {"all-to-all", "all-reduce", "all-gather", "reduce-scatter"}
