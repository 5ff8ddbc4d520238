"""What a compiled program sends between devices, read from its text."""

import re
from dataclasses import dataclass
from math import prod

_KINDS = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute|ragged-all-to-all"
_OP = re.compile(rf" = (?P<shape>\(?[a-z0-9]+\[.*?) (?P<kind>{_KINDS})(?:-start)?\(")
_ARRAY = re.compile(r"[a-z]+(\d*)(?:e\d+m\d+\w*)?\[([\d,]*)\]")
_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_IOTA = re.compile(r"replica_groups=\[\d+,(\d+)\]")
_NAMED = re.compile(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}")
_AXIS = re.compile(r"'(\w+)'(?::\(\d+\)|=)?(\d*)")


@dataclass(frozen=True)
class Collective:
    """One collective operation of a program; `size` is the bytes of its result on one device."""

    kind: str
    size: int
    group: int  # devices that exchange with each other

    @property
    def received(self) -> int:
        """Bytes that one device gets from the others, if nothing is sent twice."""
        others = self.group - 1
        if self.kind in ("all-gather", "all-to-all", "ragged-all-to-all"):
            return self.size * others // self.group
        if self.kind == "reduce-scatter":
            return self.size * others
        if self.kind == "all-reduce":  # a reduce-scatter and an all-gather
            return 2 * self.size * others // self.group
        return self.size


def collectives(program: str) -> list[Collective]:
    """Every collective in the text of a compiled program, in order; one inside a loop counts once.

    Args:
        program: `jax.jit(f).lower(...).compile().as_text()`.
    """
    found = []
    for line in program.splitlines():
        match = _OP.search(line)
        if match:
            size = sum(_size(*array) for array in _ARRAY.findall(match["shape"]))
            found.append(Collective(match["kind"], size, _group(line)))
    return found


def _size(bits: str, shape: str) -> int:
    """Bytes of an array such as `bf16[8,128]`; predicates take a byte."""
    count = prod(int(length) for length in shape.split(",") if length)
    return count * max(8, int(bits or 8)) // 8


def _group(line: str) -> int:
    """Devices in a group, from each of the ways in which XLA writes groups."""
    listed, iota, named = _LISTED.search(line), _IOTA.search(line), _NAMED.search(line)
    if named:  # mesh['a'=2,'b'=4] {'a','b':(1)2}: whole axes, or a part of one
        sizes = {name: int(size) for name, size in _AXIS.findall(named[1])}
        return prod(int(part) if part else sizes[name] for name, part in _AXIS.findall(named[2]))
    if listed:
        return len(listed[1].split(","))
    return int(iota[1]) if iota else 1
