"""Bytes that the optimizer of a small K3 moves between 64 devices, read from the compiled program."""

import json
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import json
from collections import defaultdict
from math import ceil, prod

import jax
jax.config.update("jax_num_cpu_devices", 64)
from jax.sharding import NamedSharding, PartitionSpec
from k3train.audit.collectives import collectives
from k3train.config.schema import Config, ModelConfig
from k3train.core.param import Muon
from k3train.core.tree import leaves
from k3train.parallel.mesh import make_mesh, use_mesh
from k3train.parallel.rules import RULES
from k3train.train.step import Program

SIZES = {"data": 4, "expert": 8, "tensor": 2}
layers = tuple(range(13))
model = ModelConfig(
    num_layers=13, mla_layers=(3, 7, 11, 12), kda_layers=tuple(i for i in layers if i not in (3, 7, 11, 12)),
    moe_layers=layers[1:], num_experts=16, num_experts_per_token=2, attn_res_block_size=6,
)
program = Program(Config(model=model), make_mesh(SIZES))
state = program.abstract_state
shardings = jax.tree.map(lambda x: x.sharding, (state.params, state.opt_state))
with use_mesh(program.mesh):
    update = jax.jit(lambda g, o, p: program.optimizer.update(g, o, p), out_shardings=shardings)
    text = update.lower(state.params, state.opt_state, state.params).compile().as_text()

# stacks of matrices of equal shape and splitting
stacks = defaultdict(int)
for _, info in leaves(program.blueprint.infos):
    if isinstance(info.route, Muon):
        mesh_axes = lambda names: tuple(RULES[n] for n in names if RULES[n])
        sides = [(prod(info.shape[info.axes.index(n)] for n in names), mesh_axes(names))
                 for names in (info.route.rows, info.route.cols)]
        batch = mesh_axes([n for n in info.axes if n not in (*info.route.rows, *info.route.cols)])
        numbers = prod(info.shape) // (sides[0][0] * sides[1][0])
        stacks[tuple(sorted(sides)), batch] += numbers
need = 0
for (sides, batch), number in stacks.items():
    numbers_of_matrix = sides[0][0] * sides[1][0]
    split = prod(SIZES[n] for _, names in sides for n in names)
    held = split * prod(SIZES[n] for n in batch)
    copies = 64 // held
    number //= prod(SIZES[n] for n in batch)  # matrices of one group of devices that together hold them once

    def received(copies):
        share = ceil(number / copies)
        lacking = ceil(share / split) * numbers_of_matrix * (1 - 1 / split)  # pieces to get, and later to give back
        return 2 * lacking + share * copies * numbers_of_matrix / split * (1 - 1 / copies)  # and others' results

    need += 4 * min(received(1), received(copies))
got = sum(c.received for c in collectives(text))
state = jax.tree.leaves((state.params, state.opt_state))
held = sum(prod(x.sharding.shard_shape(x.shape)) for x in state) / sum(prod(x.shape) for x in state)
print(json.dumps({"need": need, "got": got, "held": held}))
"""


def test_bytes_of_the_optimizer_step_on_64_devices():
    """Received bytes stay within a tenth of what is needed to have every matrix whole on one device, and back."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert 0.9 * result["need"] < result["got"] < 1.1 * result["need"], result
    # weights and moments: most are split over data and tensor, experts over expert as well
    assert result["held"] < 0.1, result
