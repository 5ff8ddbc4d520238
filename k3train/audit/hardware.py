"""Accelerators by name, with published figures, and the time that collectives take on them at best.

Figures are per device as jax counts devices: a GPU, a TPU v5p chip, one of the two chiplets of a TPU7x chip. Vendors'
peaks, never reached; what follows from them is a bound.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches

from k3train.audit.collectives import Collective


@dataclass(frozen=True)
class Hardware:
    """Published figures of one device."""

    peak: float  # dense bfloat16 operations a second, a multiply-add as two
    memory: int  # bytes
    bandwidth: float  # bytes a second of that memory
    links: float  # bytes a second that a device can receive from those of its own node
    node: int  # devices of a node; 0: all devices are one
    network: float  # bytes a second that a device can receive from other nodes
    source: str

    @property
    def usable(self) -> int:
        """Bytes that a program can count on: what runtime and fragments take is left out, by rule of thumb."""
        return int(0.92 * self.memory)


GiB = 2**30

HARDWARE: dict[str, Hardware] = {
    "h200": Hardware(
        989.5e12, 141 * 10**9, 4.8e12, 450e9, 8, 50e9,
        "nvidia.com/data-center/h200: 1,979 TFLOP/s with sparsity, 141 GB, 4.8 TB/s, NVLink 900 GB/s both ways; DGX "
        "H200 datasheet: 8 GPUs, one 400 Gb/s adapter each",
    ),
    "b200": Hardware(
        2.25e15, 180 * 10**9, 8e12, 900e9, 8, 50e9,
        "nvidia.com/data-center/dgx-b200, an eighth of: 1,440 GB, 64 TB/s, 72 PFLOP/s FP8 with sparsity (a quarter is "
        "dense bfloat16), NVLink 14.4 TB/s both ways, one 400 Gb/s adapter a GPU",
    ),
    "tpu-v5p": Hardware(
        459e12, 95 * GiB, 2.765e12, 600e9, 0, 600e9,
        "cloud.google.com/tpu/docs/v5p: 459 TFLOP/s, 95 GiB, 2,765 GB/s, interconnect 1,200 GB/s both ways",
    ),
    "tpu7x": Hardware(
        1153.5e12, 96 * GiB, 3.69e12, 300e9, 0, 300e9,
        "cloud.google.com/tpu/docs/tpu7x, half a chip of: 2,307 TFLOP/s, 192 GiB, 7,380 GB/s, interconnect 1,200 GB/s "
        "both ways; jax sees a device in each half",
    ),
}  # fmt: skip


def hardware(name: str) -> Hardware:
    """The line of the table.

    Raises:
        ValueError: no such line; the message names the nearest.
    """
    if name not in HARDWARE:
        near = get_close_matches(name, HARDWARE, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ValueError(f"--hardware {name}: unknown; {hint}accepted: {', '.join(HARDWARE)}")
    return HARDWARE[name]


def transfer_seconds(found: Iterable[Collective], kind: Hardware) -> dict[tuple[str, ...], float]:
    """Seconds that the collectives take, by mesh axes, if every link is busy all the time and nothing waits.

    What is the same for all members (gathered, or reduced) crosses between nodes once per node, shared out over the
    node's devices, and is passed on inside; of what differs for every pair each device gets its own.
    """
    seconds: dict[tuple[str, ...], float] = {}
    for each in found:
        inside, outside = _received(each, kind.node)
        seconds[each.axes] = seconds.get(each.axes, 0.0) + each.times * (inside / kind.links + outside / kind.network)
    return seconds


def _received(each: Collective, node: int) -> tuple[float, float]:
    """Bytes that a device receives in one execution from its own node, and from others."""
    if not node:
        return each.received, 0.0
    first = each.members[0] // node
    near = sum(member // node == first for member in each.members)
    others = each.group - 1
    if not others:
        return 0.0, 0.0
    if near == 1:
        return 0.0, each.received
    far = (each.group - near) / others  # share of the others that are in another node
    if each.kind in ("all-to-all", "ragged-all-to-all", "collective-permute"):
        return each.received * (1 - far), each.received * far
    return each.received, each.received * far / near


def table(names: Mapping[str, Hardware] = HARDWARE) -> str:
    """The table for people."""
    lines = [f"{'name':<8} {'TFLOP/s':>8} {'memory':>8} {'GB/s':>7} {'links GB/s':>11} {'network GB/s':>13}  source"]
    for name, kind in names.items():
        lines.append(
            f"{name:<8} {kind.peak / 1e12:>8,.0f} {kind.memory / 1e9:>5,.0f} GB {kind.bandwidth / 1e9:>7,.0f} "
            f"{kind.links / 1e9:>11,.0f} {kind.network / 1e9:>13,.0f}  {kind.source}"
        )
    return "\n".join(lines)
