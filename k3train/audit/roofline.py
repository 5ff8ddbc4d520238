"""How long a step takes at least, from operations, device memory and transfers (docs/k3_on_a_pod.md)."""

from dataclasses import dataclass

import jax.numpy as jnp

from k3train.audit import flops
from k3train.audit.budget import Budget
from k3train.audit.hardware import Hardware, transfer_seconds
from k3train.audit.params import bytes_per_device
from k3train.audit.program import Compiled
from k3train.config.check import mesh_size
from k3train.config.schema import Config

#: Forward passes of a sublayer under a remat policy; the nested `block` runs one again for the block, one for itself.
PASSES = {"none": 1, "attention_residuals": 1, "sublayer": 2, "block": 3}


@dataclass(frozen=True)
class StepFlops:
    """Operations of one device in one step."""

    model: float  # by formula, nothing computed again
    products: float  # matrix products of the compiled program, outside loops whose length depends on the router
    routed_experts: float  # by formula under an even router, with what is computed again

    @property
    def executed(self) -> float:
        return self.products + self.routed_experts


@dataclass(frozen=True)
class Roofline:
    """Seconds of one step; MFU counts the model's operations only."""

    flops: StepFlops
    compute_seconds: float
    memory_seconds: float
    transfers: dict[tuple[str, ...], float]  # by mesh axes
    seconds_overlapped: float
    seconds_in_turn: float
    mfu_overlapped: float
    mfu_in_turn: float


def roofline(config: Config, formula: Budget, compiled: Compiled, kind: Hardware) -> Roofline:
    """The bound: everything at its published peak, either all at once or one after the other."""
    operations = step_flops(config, compiled)
    compute = operations.executed / kind.peak
    memory = _memory_bytes(config, formula) / kind.bandwidth
    transfers = transfer_seconds(compiled.collectives, kind)
    together = max(compute, memory, sum(transfers.values()))
    in_turn = compute + memory + sum(transfers.values())
    ideal = operations.model / kind.peak
    return Roofline(operations, compute, memory, transfers, together, in_turn, ideal / together, ideal / in_turn)


def step_flops(config: Config, compiled: Compiled) -> StepFlops:
    """Operations of one device in one step."""
    devices = mesh_size(config.mesh)
    tokens = config.data.batch_size * config.data.seq_len
    return StepFlops(
        model=flops.per_token(config).training * tokens / devices,
        products=compiled.products,
        routed_experts=routed_flops(config) / devices,
    )


def routed_flops(config: Config) -> float:
    """Operations of the routed experts in one step of all devices: forward as often as remat wants, and backward."""
    model = config.model
    pairs = config.data.batch_size * config.data.seq_len * model.num_experts_per_token * len(model.moe_layers)
    pair = 2 * 3 * (model.moe_latent_size or model.hidden_size) * model.moe_intermediate_size
    return float((PASSES[model.remat] + 2) * pair * pairs)


def _memory_bytes(config: Config, formula: Budget) -> float:
    """Bytes through device memory: weights once for every pass, gradients added up, activations kept and read, update.

    What a sublayer reads and writes inside is left out: it is what kernels keep on the chip, in part.
    """
    item = jnp.dtype(config.model.compute_dtype).itemsize
    split = bytes_per_device(config)["parameters"] // 4
    whole = split * config.mesh.data  # of all layers, as brought together from their shards
    weights = (PASSES[config.model.remat] + 1) * item * whole
    gradients = item * whole + 12 * split
    return config.data.micro_batches * (weights + gradients + 2 * formula.activations) + 20 * split
