"""Released checkpoints in: strict both ways, one stacked tensor at a time, onto the devices (docs/k3.md section 6)."""

import logging
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from k3train.checkpoint import release
from k3train.checkpoint.hf_config import ReadConfig, read_config
from k3train.checkpoint.hf_names import Entry, Leaf, Slices, Spec, entries, find_layout, names, parameters
from k3train.checkpoint.hf_vision import vision_names
from k3train.checkpoint.orbax import Checkpoints
from k3train.checkpoint.safetensors_reader import Header, SafetensorsReader
from k3train.config.check import check
from k3train.config.load import to_json
from k3train.config.schema import Config, ModelConfig, QuantConfig
from k3train.core.tree import Tree
from k3train.model.k3 import blueprint
from k3train.ops.mx import decode_mxfp4
from k3train.parallel.mesh import make_mesh
from k3train.parallel.rules import indivisible, spec

_LOG = logging.getLogger(__name__)
#: What a weight that is not packed may be stored as.
FLOATS = ("F32", "BF16", "F16")
_SHOWN = 8

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Imported:
    """A released model in our form.

    Args:
        params, bias: float32, as `Blueprint.init` makes them.
        notes: what a person should know about the import, one line each.
    """

    config: ModelConfig
    params: Tree
    bias: Tree
    notes: tuple[str, ...]


class _Source(NamedTuple):
    """An open checkpoint that was found complete.

    Args:
        model: its text model, the length of A_log included.
        form: how it is written.
        carried: tensors that are not the text model's.
    """

    reader: SafetensorsReader
    model: ModelConfig
    form: release.Release
    carried: dict[str, Header]
    notes: list[str]


def import_hf(
    source: str | Path, workdir: str | Path, *, ignore: Collection[str] = (), quant: str | None = None
) -> Imported:
    """Makes a run folder from a released checkpoint: `config.json`, `checkpoints/0`, weights only, and `release/`.

    Args:
        source, ignore: see `read_hf`.
        workdir: run folder to make; nothing is written before everything was read.
        quant: `quant.experts` of the run: how its routed experts compute. None: "mxfp4_mxfp8" where they are packed,
            as K3 is trained and sampled from (report section 4.1.4), else "none". On packed weights "mxfp4" and "none"
            are the same.

    Raises:
        ValueError: see `read_hf`; or `workdir` already holds a run, or cannot be written; or widths that cannot be
            quantised.
    """
    source, workdir = Path(source), Path(workdir)
    _refuse_workdir(workdir)
    with _opened(source, ignore) as opened:
        files = release.carried_files(source)
        experts = quant or ("mxfp4_mxfp8" if opened.form.packed else "none")
        config = Config(model=opened.model, quant=QuantConfig(experts=experts))
        check(config)
        imported = _onto_devices(opened, None)
        names = [file.name for file in files]
        tokenizer = next((name for name in release.TOKENIZERS if name in names), None)
        if tokenizer is not None:
            path = str((workdir / release.FOLDER / release.FILES / tokenizer).absolute())
            config = replace(config, data=replace(config.data, tokenizer=path))
        with Checkpoints(workdir / "checkpoints") as checkpoints:
            model = {"params": imported.params, "bias": imported.bias}
            checkpoints.save(0, {"model": model}, {"imported_from": str(source.absolute())})
        if jax.process_index() == 0:
            release.keep(workdir, opened.form, opened.reader, opened.carried, files)
            draft = workdir / "config.json.partial"
            draft.write_text(to_json(config))
            draft.replace(workdir / "config.json")  # last: a folder without it is not a run
    how = f"routed experts compute with quant.experts={experts}"
    for note in (*imported.notes, how, *_about_files(names, config.data.tokenizer)):
        _LOG.info("%s", note)
    _LOG.info("%s: step 0, %s parameters", workdir, f"{sum(x.size for x in jax.tree.leaves(imported.params)):,}")
    return imported


def read_hf(source: str | Path, mesh: Mesh | None = None, *, ignore: Collection[str] = ()) -> Imported:
    """Reads a released checkpoint: K3's layout, Kimi-Linear's, or what transformers saves; experts plain or MXFP4.

    Each process reads what its own devices hold, and no more.

    Args:
        source: folder with `config.json` and safetensors files.
        mesh: where the parameters go, by the rules of `parallel/rules.py`; None: split over `data` as far as the
            devices divide every axis.
        ignore: fields of `config.json` to pass over although they are not understood.

    Raises:
        ValueError: the folder is not a complete checkpoint of one model. Missing, unexpected and mis-shaped tensors are
            reported together; nothing keeps an initial value.
    """
    with _opened(Path(source), ignore) as opened:
        return _onto_devices(opened, mesh)


@contextmanager
def _opened(source: Path, ignore: Collection[str]) -> Iterator[_Source]:
    """The checkpoint, after everything that can be known before its numbers are read was checked."""
    read = read_config(source, ignore)
    model = read.model
    check(Config(model=model))
    with SafetensorsReader(source) as reader:
        headers = reader.headers
        layout = find_layout(headers, model)
        packed = any(name.endswith(".weight_packed") for name in headers)
        beside = vision_names(read.vision, model.hidden_size)
        try:
            expected = names(model, layout, packed=packed)
        except ValueError as error:  # widths that have no whole blocks
            raise ValueError(f"{source}: {error}") from error
        _refuse_differences(source, headers, expected | beside)
        found = entries(model, layout)
        a_log = _a_log_shape(headers, found)
        padded = len(a_log) == 1 and a_log[0] > model.kda_num_heads
        model = replace(model, kda_a_log_length=a_log[0] if padded else 0)
        dtypes = release.dtypes_of(headers, found, packed)
        form = release.Release(layout, packed, dtypes, a_log, read.tree, tuple(ignore))
        carried = {name: headers[name] for name in beside}
        notes = _notes(read, ignore, form, len(headers) - len(carried), len(carried))
        yield _Source(reader, model, form, carried, notes + _narrowed(headers, found))


def _notes(
    read: ReadConfig, ignored: Collection[str], form: release.Release, num_tensors: int, num_carried: int
) -> list[str]:
    notes = [f"{form.layout} layout, {'MXFP4' if form.packed else 'plain'} experts, {num_tensors} tensors"]
    if num_carried:
        notes.append(f"{num_carried} tensors of the vision tower and its projector are carried along, not trained")
    if ignored:
        notes.append(f"config.json: not understood and passed over: {', '.join(ignored)}")
    if any("auto_map" in level for level in (read.tree, read.tree.get("text_config") or {})):
        notes.append("config.json: auto_map names code of the checkpoint; it was not run")
    return notes


def _about_files(names: list[str], tokenizer: str) -> list[str]:
    """Which tokenizer the run has, and which code was copied."""
    notes = [f"tokenizer: {tokenizer}"]
    if tokenizer == Config().data.tokenizer:
        notes = [
            f"tokenizer: {tokenizer}, because there is neither {' nor '.join(release.TOKENIZERS)}; "
            "--config.data.tokenizer=FILE names another"
        ]
    code = [name for name in names if name.endswith(".py")]
    return notes + ([f"carried along for whoever serves an export, not run: {', '.join(code)}"] if code else [])


def _onto_devices(source: _Source, mesh: Mesh | None) -> Imported:
    loaded = dict(_load(source, mesh or _data_mesh(source.model)))
    plan = blueprint(source.model)
    params, bias = _take(loaded, plan.abstract_params), _take(loaded, plan.abstract_bias)
    return Imported(source.model, params, bias, tuple(source.notes))


def _refuse_workdir(workdir: Path) -> None:
    if any((workdir / name).exists() for name in ("config.json", "checkpoints")):
        raise ValueError(f"{workdir} already holds a run; give another --workdir")
    above = next(p for p in (workdir, *workdir.absolute().parents) if p.exists())
    if not above.is_dir() or not os.access(above, os.W_OK):
        raise ValueError(f"{workdir}: {above} is not a folder that can be written")


def _refuse_differences(folder: Path, headers: dict[str, Header], wanted: dict[str, Spec]) -> None:
    """All differences between what is there and what must be, at once."""
    faults: dict[str, list[str]] = {"missing": [name for name in wanted if name not in headers]}
    faults["unexpected"] = [name for name in headers if name not in wanted]
    faults["of another shape"], faults["of another dtype"] = [], []
    for name, header in headers.items():
        want = wanted.get(name)
        if want is None:
            continue
        if header.shape not in (want.shape, *want.also):
            faults["of another shape"].append(f"{name}: {list(header.shape)}, expected {list(want.shape)}")
        accepted = (want.dtype,) if want.dtype == "U8" else FLOATS
        if header.dtype not in accepted:
            faults["of another dtype"].append(f"{name}: {header.dtype}, accepted {', '.join(accepted)}")
    lines = [
        f"  {len(found)} {what}: {'; '.join(found[:_SHOWN])}{'; ...' if len(found) > _SHOWN else ''}"
        for what, found in faults.items()
        if found
    ]
    if lines:
        raise ValueError("\n".join([f"{folder}: the tensors are not those of the model in config.json", *lines]))


def _a_log_shape(headers: dict[str, Header], found: Iterable[Entry]) -> tuple[int, ...]:
    """Shape of every A_log; of none, ()."""
    shapes = {headers[entry.name].shape: entry.name for entry in found if entry.rule.form == "a_log"}
    if len(shapes) > 1:
        raise ValueError(f"A_log has several shapes: {', '.join(f'{name} {list(s)}' for s, name in shapes.items())}")
    return next(iter(shapes), ())


def _narrowed(headers: dict[str, Header], found: Iterable[Entry]) -> list[str]:
    """A note where numbers that K3 releases in float32 were rounded before they came here."""
    names = [e.name for e in found if e.rule.float32 and headers[e.name].dtype != "F32"]
    return [f"{len(names)} tensors that K3 keeps in float32 are stored narrower, as {names[0]} is"] if names else []


def _data_mesh(config: ModelConfig) -> Mesh:
    """As many of the devices as divide every axis that is split over `data`."""
    devices, infos = jax.devices(), blueprint(config).infos
    count = next(n for n in range(len(devices), 0, -1) if n == 1 or not indivisible(infos, {"data": n}))
    return make_mesh({"data": count}, devices[:count])


def _load(source: _Source, mesh: Mesh) -> Iterator[tuple[str, jax.Array]]:
    """Every parameter and router bias by path, read shard by shard."""
    feeders: dict[str, list[tuple[Entry, int]]] = {}
    for entry in entries(source.model, source.form.layout):
        for part, path in enumerate(entry.paths):
            feeders.setdefault(path, []).append((entry, part))
    for path, leaf in parameters(source.model).items():
        held: dict[Ranges, np.ndarray] = {}  # devices that hold the same numbers share one reading

        def block(index, leaf=leaf, feeders=feeders[path], held=held):
            ranges = tuple(s.indices(n)[:2] for s, n in zip(index, leaf.shape, strict=True))
            if ranges not in held:
                held[ranges] = _block(source, leaf, feeders, ranges)
            return held[ranges]

        yield path, jax.make_array_from_callback(leaf.shape, NamedSharding(mesh, spec(leaf.axes)), block)


def _block(source: _Source, leaf: Leaf, feeders: list[tuple[Entry, int]], ranges: Ranges) -> np.ndarray:
    """Some ranges of a stacked parameter, float32."""
    block = np.empty([stop - start for start, stop in ranges], np.float32)
    by_axis = dict(zip(leaf.axes, ranges, strict=True))
    wanted = tuple(slice(*by_axis[axis]) for axis in leaf.plain())
    for entry, part in feeders:
        if entry.layer is not None and entry.layer not in range(*by_axis["layers"]):
            continue
        for expert in range(*by_axis.get("experts", (0, 1))):
            name = entry.name_of(expert)
            read = partial(_read, source, name, packed=source.form.packed and entry.num_experts > 0)
            where = zip(entry.where(part, expert), ranges, strict=True)
            inside = tuple(at - start if isinstance(at, int) else at for at, (start, _) in where)
            try:
                block[inside] = entry.from_released(part, read, wanted)
            except ValueError as error:
                raise ValueError(f"{source.reader.folder}: {name}: {error}") from error
    return block


def _read(source: _Source, name: str, ranges: Slices, *, packed: bool) -> np.ndarray:
    """A part of a released tensor in float32; of packed weights whole rows are decoded."""
    if not packed:
        return source.reader.read(name, ranges).astype(np.float32)
    rows, columns = ranges
    bytes_and_scales = (source.reader.read(name + end, (rows, slice(None))) for end in ("_packed", "_scale"))
    return decode_mxfp4(*bytes_and_scales)[:, columns]


def _take(loaded: dict[str, jax.Array], tree: Tree, prefix: str = "") -> Tree:
    """The arrays of a tree, by path."""
    return {
        key: _take(loaded, value, f"{prefix}{key}/") if isinstance(value, dict) else loaded[f"{prefix}{key}"]
        for key, value in tree.items()
    }
