"""`k3train plan --devices N`: the step on a mesh of N devices, by formula and as compiled (docs/k3_on_a_pod.md)."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from k3train.audit import flops
from k3train.audit.budget import POLICIES, Budget, budget, kept_bytes, rows_per_device
from k3train.audit.hardware import Hardware, hardware
from k3train.audit.program import EXPERTS, Compiled, compile_step
from k3train.audit.roofline import Roofline, roofline
from k3train.config.check import ConfigError, check, mesh_size, mesh_text
from k3train.config.schema import Config, VisionConfig

#: Devices up to which the advice looks for a mesh that holds the model.
MOST_DEVICES = 2**16


@dataclass(frozen=True)
class Plan:
    """Everything that `plan --devices` says."""

    config: Config
    choice: str  # how the mesh came about
    device: str
    hardware: Hardware
    formula: Budget
    kept: dict[str, int]  # activations by remat policy
    compiled: Compiled
    roofline: Roofline

    @property
    def fits(self) -> bool:
        """By formula, which is about accelerators; the compiler's sum is about the CPU's program."""
        return self.formula.total <= self.hardware.usable


def plan(config: Config, devices: int, device: str) -> Plan:
    """Lower, compile and judge; `devices` simulated devices must be there.

    Args:
        config: any mesh; if it is not of this many devices, another one is chosen.
        device: name in `hardware.HARDWARE`.

    Raises:
        ConfigError: no mesh of so many devices can run this configuration.
    """
    kind = hardware(device)
    config, choice = fitted(config, devices)
    compiled = compile_step(config)
    kept = {policy: kept_bytes(config, policy) for policy in policies(config)}
    formula = budget(config, kept[config.model.remat])
    return Plan(config, choice, device, kind, formula, kept, compiled, roofline(config, formula, compiled, kind))


def policies(config: Config) -> tuple[str, ...]:
    """Remat policies that mean something for this model."""
    return tuple(p for p in POLICIES if p != "attention_residuals" or config.model.attn_res != "none")


def fitted(config: Config, devices: int) -> tuple[Config, str]:
    """The configuration on a mesh of so many devices, and how that was found.

    A mesh of another size is replaced by the one with the fewest bytes per device; its micro-batches have as many rows
    per device as before, or fewer.
    """
    config = replace(config, vision=VisionConfig())  # counted, but no part of the step
    if mesh_size(config.mesh) == devices:
        check(config, devices)
        return config, "mesh as configured"
    options = list(_candidates(config, devices))
    if not options:
        near = sorted(_hosts(config, devices), key=lambda n: (abs(n - devices), n))[:3]
        raise ConfigError(
            f"--devices {devices}: no data x expert x tensor {config.mesh.tensor} of so many devices divides the "
            f"model and data.batch_size={config.data.batch_size}; near: {', '.join(map(str, sorted(near))) or 'none'}"
        )
    best = min(options, key=lambda option: (budget(option).total, -option.mesh.expert))
    return best, (
        f"mesh chosen: {mesh_text(best.mesh)}, the fewest bytes per device of {len(options)} possible ones, with "
        f"data.micro_batches={best.data.micro_batches}; another: --config.mesh.data=.. --config.mesh.expert=.."
    )


def _candidates(config: Config, devices: int) -> Iterator[Config]:
    """Configurations on every mesh of so many devices that can run, tensor axis and rows per device as given."""
    mesh, data = config.mesh, config.data
    groups, rest = divmod(devices, mesh.tensor)
    if rest or data.batch_size % groups:
        return
    rows = next(r for r in range(rows_per_device(config), 0, -1) if data.batch_size // groups % r == 0)
    for expert in range(1, groups + 1):
        if groups % expert or (config.model.moe_layers and config.model.num_experts % expert):
            continue
        option = replace(
            config,
            mesh=replace(mesh, data=groups // expert, expert=expert),
            data=replace(data, micro_batches=data.batch_size // (groups * rows)),
        )
        try:
            check(option, devices)
        except ConfigError:
            continue
        yield option


def _hosts(config: Config, devices: int) -> Iterator[int]:
    """Numbers of devices near this one that have a mesh."""
    for number in range(max(1, devices // 2), 2 * devices + 1):
        if any(True for _ in _candidates(config, number)):
            yield number


def advice(found: Plan) -> list[str]:
    """What to change if it does not fit, the cheapest first; what is spare if it does."""
    config, room = found.config, found.hardware.usable
    if found.fits:
        return [f"{_gb(room - found.formula.total)} per device to spare"]
    lines = [f"too large by {_gb(found.formula.total - room)} per device"]

    def judged(option: Config, kept: int) -> str:
        total = budget(option, kept).total
        return f"{_gb(total)} per device, {'fits' if total <= room else 'does not fit either'}"

    for policy in policies(config)[policies(config).index(config.model.remat) + 1 :]:
        option = replace(config, model=replace(config.model, remat=policy))
        lines.append(f"--config.model.remat={policy}: {judged(option, found.kept[policy])}")
    if rows_per_device(config) > 1:
        micro = config.data.micro_batches * rows_per_device(config)
        option = replace(config, data=replace(config.data, micro_batches=micro))
        kept = found.kept[config.model.remat] // rows_per_device(config)
        lines.append(f"--config.data.micro_batches={micro}, one row per device: {judged(option, kept)}")
    options = list(_candidates(config, mesh_size(config.mesh)))
    best = min(options, key=lambda option: budget(option).total)
    if best.mesh != config.mesh:
        kept = found.kept[config.model.remat]
        axes = f"--config.mesh.data={best.mesh.data} --config.mesh.expert={best.mesh.expert}"
        lines.append(f"{axes}, the smallest mesh of as many devices: {judged(best, kept)}")
    lines.append(_more_devices(found))
    return lines


def _more_devices(found: Plan) -> str:
    """The first doubling of the devices that holds the run, every remat policy considered."""
    config, devices = found.config, mesh_size(found.config.mesh)
    policy = min(found.kept, key=lambda each: found.kept[each])
    held = found.formula.master + found.formula.momentum + found.formula.gradients
    while devices < MOST_DEVICES:
        devices *= 2
        for option in sorted(_candidates(config, devices), key=lambda each: budget(each).total)[:1]:
            option = replace(option, model=replace(option.model, remat=policy))
            total = budget(option, found.kept[policy]).total
            if total <= found.hardware.usable:
                mesh = f"{devices:,} as {mesh_text(option.mesh)}"
                return f"more devices: {mesh}, remat {policy}: {_gb(total)} per device, fits"
    return f"no mesh of up to {MOST_DEVICES} devices fits; master, momentum and gradients alone are {_gb(held)} here"


def report(found: Plan) -> dict[str, Any]:
    """What `--json` prints of it."""
    compiled, config = found.compiled, found.config
    return {
        "mesh": {**dict(asdict(config.mesh).items()), "choice": found.choice},
        "remat": config.model.remat,
        "micro_batches": config.data.micro_batches,
        "rows_per_device": rows_per_device(config),
        "bytes_per_device": {
            "formula": {**found.formula.kinds, "total": found.formula.total},
            "buffers": found.formula.working,
            "activations_by_policy": found.kept,
            "compiler": {
                "arguments": compiled.arguments,
                "temporaries": compiled.temporaries,
                "temporaries_by_shape": compiled.by_shape,
                "total": compiled.arguments + compiled.temporaries,
            },
        },
        "flops_per_device": asdict(found.roofline.flops),
        "collectives": [asdict(row) for row in collective_rows(compiled)],
        "hardware": {"name": found.device, "usable": found.hardware.usable, **asdict(found.hardware)},
        "roofline": {
            **{name: value for name, value in asdict(found.roofline).items() if name not in ("flops", "transfers")},
            "transfer_seconds_by_axes": {"+".join(axes): s for axes, s in found.roofline.transfers.items()},
        },
        "fits": found.fits,
        "advice": advice(found),
        "cost": {
            "lower_seconds": compiled.lower_seconds,
            "compile_seconds": compiled.compile_seconds,
            "peak_memory": compiled.peak_memory,
            "program_text_bytes": compiled.text_bytes,
        },
    }


@dataclass(frozen=True)
class CollectiveRow:
    """All collectives of one kind along the same mesh axes, in one step."""

    axes: str
    kind: str
    count: int
    received: int  # bytes per device
    open_ended: bool  # some in loops whose length depends on the router, counted as one round


def collective_rows(compiled: Compiled) -> list[CollectiveRow]:
    """Largest first."""
    found: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    for each in compiled.collectives:
        if each.group > 1:
            row = found["+".join(each.axes), each.kind]
            row[0] += each.times
            row[1] += each.times * each.received
            row[2] |= each.open_ended
    rows = [CollectiveRow(axes, kind, row[0], row[1], bool(row[2])) for (axes, kind), row in found.items()]
    return sorted(rows, key=lambda row: -row.received)


def text(found: Plan) -> str:
    """The plan for people."""
    config, compiled, formula = found.config, found.compiled, found.formula
    tokens = config.data.batch_size * config.data.seq_len
    lines = [
        f"{mesh_size(config.mesh):,} devices ({found.device}): {mesh_text(config.mesh)}; {found.choice}",
        f"a step: {config.data.batch_size:,} rows of {config.data.seq_len:,} ({tokens:,} tokens) in "
        f"{config.data.micro_batches:,} micro-batches, {_rows(rows_per_device(config))} per device each; "
        f"remat {config.model.remat}",
        "",
        f"{'bytes per device':<44}{'formula':>16}{'compiled for CPU':>20}",
    ]
    beside = {
        "momentum": (compiled.arguments, "state and batch"),
        "gradients": (compiled.by_shape["like parameters"], "temporaries like parameters"),
        "weights": (compiled.by_shape[EXPERTS], EXPERTS),
        "buffers": (compiled.by_shape["others"], "other temporaries"),
    }
    labels = {
        "master": "master: parameters, float32",
        "momentum": "momentum: optimizer moments, float32",
        "gradients": "gradients, float32" + (", step and micro-batch" if config.data.micro_batches > 1 else ""),
        "weights": f"weights of one layer, {config.model.compute_dtype}",
        "activations": f"activations kept, remat {config.model.remat}",
        "buffers": "buffers, the largest need",
    }
    for kind, size in formula.kinds.items():
        other, note = beside.get(kind, (None, ""))
        compiler = "" if other is None else f"{_gb(other):>20}  {note}"
        lines.append(f"  {labels[kind]:<42}{_gb(size):>16}{compiler}")
    total = compiled.arguments + compiled.temporaries
    lines += [f"  {'together':<42}{_gb(formula.total):>16}{_gb(total):>20}", "", "buffers by need:"]
    lines += [f"  {name:<62}{_gb(size):>16}" for name, size in sorted(formula.working.items(), key=lambda x: -x[1])]
    lines += ["", "activations by remat policy:"]
    lines += [f"  {policy:<62}{_gb(size):>16}" for policy, size in found.kept.items()]
    lines += ["", *_flops_lines(found), "", *_collective_lines(found), "", *_roofline_lines(found), ""]
    lines.append(f"fits: {'yes' if found.fits else 'no'} ({_gb(formula.total)} of {_gb(found.hardware.usable)} usable)")
    lines += [f"  {line}" for line in advice(found)]
    lines.append(
        f"\nlowered in {compiled.lower_seconds:.0f} s, compiled in {compiled.compile_seconds:.0f} s, "
        f"peak memory of this process {compiled.peak_memory / 1e9:.1f} GB; figures of {found.device}: "
        f"{found.hardware.source}"
    )
    return "\n".join(lines)


def _flops_lines(found: Plan) -> Iterator[str]:
    each = found.roofline.flops
    a_token = _scaled(flops.per_token(found.config).training, "FLOP")
    rows = {
        "of the model, forward and backward": each.model,
        "matrix products of the compiled program, without experts": each.products,
        "routed experts with what is computed again, by formula": each.routed_experts,
    }
    yield f"operations per device and step ({a_token} a token by formula):"
    for name, number in rows.items():
        yield f"  {name:<62}{_scaled(number, 'FLOP'):>16}"


def _collective_lines(found: Plan) -> Iterator[str]:
    yield f"{'collectives of a step':<22}{'kind':<20}{'count':>12}{'received per device':>22}"
    for row in collective_rows(found.compiled):
        mark = "  *" if row.open_ended else ""
        yield f"  {row.axes:<20}{row.kind:<20}{row.count:>12,}{_gb(row.received):>22}{mark}"
    if any(row.open_ended for row in collective_rows(found.compiled)):
        yield "  * some in loops whose length depends on the router: one round counted, as under an even router"


def _roofline_lines(found: Plan) -> Iterator[str]:
    roof = found.roofline
    yield f"a step on {found.device} at published peaks, a bound:"
    yield f"  {'operations':<62}{_time(roof.compute_seconds):>16}"
    yield f"  {'device memory':<62}{_time(roof.memory_seconds):>16}"
    for axes, seconds in sorted(roof.transfers.items(), key=lambda item: -item[1]):
        if axes:
            yield f"  {'transfers over ' + ' + '.join(axes):<62}{_time(seconds):>16}"
    yield (
        f"  all at once: {_time(roof.seconds_overlapped)}, MFU {roof.mfu_overlapped:.1%}; "
        f"one after the other: {_time(roof.seconds_in_turn)}, MFU {roof.mfu_in_turn:.1%}"
    )


def _rows(number: int) -> str:
    return f"{number} row{'' if number == 1 else 's'}"


def _scaled(number: float, unit: str) -> str:
    """With the prefix that leaves one to four digits before the point."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= size:
            return f"{number / size:,.1f} {prefix}{unit}"
    return f"{number:,.0f} {unit}"


def _gb(number: float) -> str:
    """Bytes of one device, in the unit in which memories are sold."""
    return f"{number / 1e9:,.1f} GB" if abs(number) >= 1e9 else _scaled(number, "B")


def _time(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 0.1 else f"{1e3 * seconds:,.3f} ms"
