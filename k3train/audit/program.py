"""The training step lowered and compiled with abstract values: what the compiler says of it. Nothing is allocated.

Everything is compiled for the CPU. Collectives and products are read from the program as the partitioner leaves it,
which is what every backend starts from; the CPU's own passes turn bfloat16 into float32 afterwards.
"""

import re
import resource
import time
from dataclasses import dataclass
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp

from k3train.audit.collectives import Collective, collectives
from k3train.audit.hlo import computations, product_flops
from k3train.config.schema import Config
from k3train.parallel.mesh import make_mesh
from k3train.train.step import Program

_LIVE = re.compile(r"^\s+\S+: (\d+) bytes \(cumulative")

#: Part of the temporaries that only the CPU's program has.
EXPERTS = "experts' matrices of a layer, the CPU's own"


@dataclass(frozen=True)
class Compiled:
    """Facts about one compiled step, per device."""

    arguments: int  # bytes of state and batch
    temporaries: int  # bytes beside them, at the peak
    by_shape: dict[str, int]  # the temporaries at the peak, by their sizes
    products: int  # operations of matrix products, loops of known length multiplied out
    open_ended: int  # the same of one round of loops whose length depends on data
    collectives: list[Collective]
    text_bytes: int  # of the lowered program
    lower_seconds: float
    compile_seconds: float
    peak_memory: int  # bytes of this process, at its largest


def compile_step(config: Config) -> Compiled:
    """Lower and compile the step of `config` on its mesh; the devices must be there (simulated ones will do)."""
    jax.config.update("jax_enable_compilation_cache", False)  # a program from the cache is not dumped
    mesh = make_mesh({axis: getattr(config.mesh, axis) for axis in ("pipeline", "data", "context", "expert", "tensor")})
    start = time.monotonic()
    program = Program(config, mesh)
    lowered = program.lower(abstract_batch(config, program))
    text_bytes = len(lowered.as_text())
    middle = time.monotonic()
    with TemporaryDirectory() as folder:
        # what the machine code is like does not matter here, only what it computes and where it keeps it
        options = {
            "xla_backend_optimization_level": 0,
            "xla_dump_to": folder, "xla_dump_hlo_as_text": True, "xla_dump_hlo_pass_re": "spmd-partition",
        }  # fmt: skip
        memory: Any = lowered.compile(compiler_options=options).memory_analysis()
        end = time.monotonic()
        parts = computations(_partitioned(Path(folder)))
        by_shape = _by_shape(_newest(Path(folder), "*live-range.txt"), program, memory.temp_size_in_bytes)
    known, open_ended = product_flops(parts)
    return Compiled(
        memory.argument_size_in_bytes, memory.temp_size_in_bytes, by_shape, known, open_ended,
        collectives(parts, dict(mesh.shape)), text_bytes, middle - start, end - middle,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )  # fmt: skip


def abstract_batch(config: Config, program: Program) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes of one step's batch, all micro-batches together."""
    kinds = {"tokens": jnp.int32, "segment_ids": jnp.int32, "targets": jnp.int32, "loss_mask": jnp.float32}
    shape = (config.data.batch_size, config.data.seq_len)
    return {name: jax.ShapeDtypeStruct(shape, kind, sharding=program.batch_sharding) for name, kind in kinds.items()}


def _newest(folder: Path, pattern: str) -> str:
    """The dumped file of the largest module: small helpers may be compiled beside the step."""
    return max(folder.glob(pattern), key=lambda path: path.stat().st_size).read_text()


def _partitioned(folder: Path) -> str:
    after = "*after_spmd-partitioning*.txt"
    # on one device nothing is partitioned
    return _newest(folder, after if any(folder.glob(after)) else "*before_optimizations.txt")


def _by_shape(ranges: str, program: Program, total: int) -> dict[str, int]:
    """The temporaries, by the sizes of what lives at the peak of the compiler's schedule."""
    state = program.abstract_state
    kinds = {
        "like parameters": {
            4 * prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves((state.params, state.opt_state))
        },
        EXPERTS: _expert_sizes(program.config),
    }
    found, others, listed = dict.fromkeys(kinds, 0), 0, False
    for line in ranges.splitlines():
        row = _LIVE.match(line) if listed else None
        if row:
            size = int(row[1])
            kind = next((kind for kind, sizes in kinds.items() if size in sizes), None)
            if kind is None:
                others += size
            else:
                found[kind] += size
        elif listed:
            break
        listed = listed or "(peak)" in line
    share = total / max(sum(found.values()) + others, 1)
    found = {kind: int(share * size) for kind, size in found.items()}
    return {**found, "others": total - sum(found.values())}


def _expert_sizes(config: Config) -> set[int]:
    """Bytes of the matrices of one layer's routed experts, own ones or own and fetched, in both dtypes.

    The CPU adds their gradients up in float32 and multiplies in float32, and its compiler does not let the several
    kinds of layers share that room; on accelerators experts need nothing of the kind.
    """
    model, mesh = config.model, config.mesh
    if not model.moe_layers:
        return set()
    width, inner = model.moe_latent_size or model.hidden_size, model.moe_intermediate_size // mesh.tensor
    own = model.num_experts // mesh.expert
    return {item * count * width * inner for item in (2, 4) for count in (own, 2 * own)}
