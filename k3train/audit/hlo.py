"""The text of a program as XLA prints it: its computations, how often each runs, the products in it."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_NAME = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(?[a-z0-9]+\[.*)$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_WHILE = re.compile(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)")
_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# An operand may be an element of a tuple, written name#index by later versions.
_COMPARE = re.compile(r"ROOT .* compare\(%?[\w.\-#]+, %?([\w.\-]+)\), direction=LT")
_CONSTANT = re.compile(r"^\s+%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)")
_DOT = re.compile(r" dot\(%?([\w.\-#]+), %?[\w.\-#]+\).*?lhs_contracting_dims=\{([\d,]*)\}")
ARRAY = re.compile(r"[a-z]+(\d*)(?:e\d+m\d+\w*)?\[([\d,]*)\]")  # bits and lengths of `bf16[8,128]`


@dataclass
class Computation:
    """Instructions of one computation, and how often a run of the program executes them."""

    name: str
    lines: list[str] = field(default_factory=list)
    times: int = 0
    open_ended: bool = False  # inside a loop whose length depends on data, which `times` takes for one round


def computations(program: str) -> list[Computation]:
    """The computations of a program, with `times` set; lines outside any computation form one that runs once.

    Args:
        program: `jax.jit(f).lower(...).compile().as_text()`, or a program that XLA dumped.
    """
    found: dict[str, Computation] = {}
    loose = Computation("", times=1)
    entry, current = loose, loose
    for line in program.splitlines():
        header = _HEADER.match(line)
        if header:
            current = found[header[2]] = Computation(header[2])
            entry = current if header[1] else entry
        elif line.startswith("}"):
            current = loose
        else:
            current.lines.append(line)
    entry.times = 1
    for computation in _callers_first(found, entry):
        for name, times, open_ended in _calls(computation, found):
            found[name].times += computation.times * times
            found[name].open_ended |= computation.open_ended or open_ended
    return [loose, *found.values()]


def _callers_first(found: dict[str, Computation], entry: Computation) -> list[Computation]:
    """Computations reachable from the entry, every one after all that call it."""
    order: list[Computation] = []
    seen: set[str] = set()
    stack = [(entry, False)]
    while stack:
        computation, finished = stack.pop()
        if finished:
            order.append(computation)
        elif computation.name not in seen:
            seen.add(computation.name)
            stack.append((computation, True))
            stack += [(found[name], False) for name, *_ in _calls(computation, found)]
    return order[::-1]


def _calls(computation: Computation, found: dict[str, Computation]) -> Iterator[tuple[str, int, bool]]:
    """(called computation, rounds, whether their number depends on data) of every call."""
    for line in computation.lines:
        loop = _WHILE.search(line)
        if loop:
            rounds = _rounds(line, found.get(loop[1]))
            yield from ((name, rounds or 1, rounds is None) for name in loop.groups() if name in found)
            continue
        names = _CALLED.findall(line)
        for several in _BRANCHES.findall(line):  # of a conditional every branch is counted
            names += [name.strip().lstrip("%") for name in several.split(",")]
        yield from ((name, 1, False) for name in names if name in found)


def _rounds(line: str, condition: Computation | None) -> int | None:
    """Rounds of a loop: as the compiler noted them, or from a condition that compares a counter with a constant."""
    known = _KNOWN.search(line)
    if known:
        return int(known[1])
    constants: dict[str, int] = {}
    for each in condition.lines if condition else ():
        constant, compare = _CONSTANT.match(each), _COMPARE.search(each)
        if constant:
            constants[constant[1]] = int(constant[2])
        elif compare:
            return constants.get(compare[1])
    return None


def product_flops(program: list[Computation]) -> tuple[int, int]:
    """Operations of all matrix products, a multiply-add as two: (in loops of known length, one round of the others)."""
    known, open_ended = 0, 0
    for computation in program:
        shapes: dict[str, tuple[int, ...]] = {}
        for line in computation.lines:
            named = _NAME.match(line)
            if not named:
                continue
            shapes |= _shapes(named[1], named[2])
            dot = _DOT.search(line)
            if dot and dot[1] in shapes:
                inner = prod(shapes[dot[1]][int(axis)] for axis in dot[2].split(",") if axis)
                flops = 2 * prod(shapes[named[1]]) * inner * computation.times
                known, open_ended = (
                    (known, open_ended + flops) if computation.open_ended else (known + flops, open_ended)
                )
    return known, open_ended


def _shapes(name: str, text: str) -> dict[str, tuple[int, ...]]:
    """Shape of what an instruction makes, or of the elements of the tuple that it makes, as operands name them."""
    arrays = ARRAY.findall(text.split(") ")[0]) if text.startswith("(") else ARRAY.findall(text)[:1]
    shapes = [tuple(int(length) for length in lengths.split(",") if length) for _, lengths in arrays]
    return {f"{name}#{i}": shape for i, shape in enumerate(shapes)} if text.startswith("(") else {name: shapes[0]}
