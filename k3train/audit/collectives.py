"""What a program sends between devices, read from its text."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from k3train.audit.hlo import ARRAY, Computation, computations

_KINDS = "all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute|ragged-all-to-all"
_OP = re.compile(rf" = (?P<shape>\(?[a-z0-9]+\[.*?) (?P<kind>{_KINDS})(?:-start)?\(")
_LISTED = re.compile(r"replica_groups=\{(?:\{([\d,]*)\}|\})")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_NAMED = re.compile(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{(.*?)\}")
_AXIS = re.compile(r"'(\w+)'(?::\((\d+)\)|=)?(\d*)")
_PAIRS = re.compile(r"source_target_pairs=\{\{(\d+),(\d+)\}")


@dataclass(frozen=True)
class Collective:
    """One collective operation of a program; `size` is the bytes of its result on one device."""

    kind: str
    size: int
    group: int  # devices that exchange with each other
    axes: tuple[str, ...] = ()  # mesh axes along which they differ
    times: int = 1  # how often a run executes it
    members: tuple[int, ...] = ()  # the first group, as positions in the mesh
    open_ended: bool = False  # inside a loop whose length depends on data, counted as one round

    @property
    def received(self) -> int:
        """Bytes that one device gets from the others in one execution, if nothing is sent twice."""
        return round(self.size * self.weight)

    @property
    def weight(self) -> float:
        """Received bytes per byte of the result."""
        others = self.group - 1
        if self.kind in ("all-gather", "all-to-all", "ragged-all-to-all"):
            return others / self.group
        if self.kind == "reduce-scatter":
            return others
        if self.kind == "all-reduce":  # a reduce-scatter and an all-gather
            return 2 * others / self.group
        return 1


def collectives(program: str | list[Computation], mesh: Mapping[str, int] | None = None) -> list[Collective]:
    """Every collective in the text of a program, in order; one inside a loop appears once, with its `times`.

    Args:
        program: `jax.jit(f).lower(...).compile().as_text()`, or its computations.
        mesh: axis sizes, slowest first; names the axes of each group.
    """
    found = []
    for computation in computations(program) if isinstance(program, str) else program:
        for line in computation.lines:
            match = _OP.search(line)
            if not match or not computation.times:
                continue
            size = sum(_size(*array) for array in ARRAY.findall(match["shape"]))
            members = _members(line, prod(mesh.values()) if mesh else 1)
            axes = axes_of(members, mesh) if mesh else ()
            found.append(
                Collective(match["kind"], size, len(members), axes, computation.times, members, computation.open_ended)
            )
    return found


def axes_of(members: tuple[int, ...], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Mesh axes along which the members of a group lie apart."""
    places = np.unravel_index(np.asarray(members), tuple(mesh.values()))
    return tuple(name for name, place in zip(mesh, places, strict=True) if len(set(place.tolist())) > 1)


def _size(bits: str, shape: str) -> int:
    """Bytes of an array such as `bf16[8,128]`; predicates take a byte."""
    count = prod(int(length) for length in shape.split(",") if length)
    return count * max(8, int(bits or 8)) // 8


def _numbers(text: str | None) -> list[int]:
    return [int(number) for number in (text or "").split(",") if number]


def _members(line: str, num_devices: int) -> tuple[int, ...]:
    """The first group of devices, from each of the ways in which XLA writes groups."""
    listed, iota, named, pairs = (each.search(line) for each in (_LISTED, _IOTA, _NAMED, _PAIRS))
    if named:  # mesh['a'=2,'b'=4] {'a','b':(1)2}: whole axes, or a part of one
        return _named_members(named)
    if listed:
        return tuple(_numbers(listed[1])) or tuple(range(num_devices))
    if iota:  # [groups, members]<=[shape]T(permutation)
        return tuple(_device_order(iota[3], iota[4]).reshape(int(iota[1]), int(iota[2]))[0].tolist())
    return tuple(int(number) for number in pairs.groups()) if pairs else (0,)


def _device_order(shape: str, permutation: str | None) -> np.ndarray:
    lengths = _numbers(shape)
    ids = np.arange(prod(lengths)).reshape(lengths)
    return (ids.transpose(_numbers(permutation)) if permutation else ids).reshape(-1)


def _named_members(named: re.Match) -> tuple[int, ...]:
    sizes = {name: int(size) for name, _, size in _AXIS.findall(named[1])}
    ids = _device_order(named[2], named[3]) if named[2] else np.arange(prod(sizes.values()))
    # every axis as (before the part, the part, after it); the group runs over the parts
    parts = {}
    for name, before, size in _AXIS.findall(named[4]):
        parts[name] = (int(before), int(size)) if size else (1, sizes[name])
    shape, picked = [], []
    for name, size in sizes.items():
        before, part = parts.get(name, (1, 1))
        shape += [before, part, size // before // part]
        picked += [0, slice(None), 0]
    return tuple(ids.reshape(shape)[tuple(picked)].reshape(-1).tolist())
