"""Released checkpoints in: strict both ways, one stacked tensor at a time, onto the devices (docs/k3.md section 6)."""

import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from k3train.checkpoint.hf_config import read_config
from k3train.checkpoint.hf_names import (
    VISION_PREFIXES,
    Entry,
    Leaf,
    Slices,
    Spec,
    entries,
    find_layout,
    names,
    parameters,
)
from k3train.checkpoint.orbax import Checkpoints
from k3train.checkpoint.safetensors_reader import Header, SafetensorsReader
from k3train.config.check import check
from k3train.config.load import to_json
from k3train.config.schema import Config, ModelConfig
from k3train.core.tree import Tree
from k3train.model.k3 import blueprint
from k3train.ops.mx import decode_mxfp4
from k3train.parallel.mesh import make_mesh
from k3train.parallel.rules import indivisible, spec

_LOG = logging.getLogger(__name__)
#: Tokenizer files of a release, read as data when the run needs text.
TOKENIZERS = ("tokenizer.json", "tiktoken.model")
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
    """An open release that was found complete."""

    reader: SafetensorsReader
    config: ModelConfig
    layout: str
    packed: bool


def import_hf(source: str | Path, workdir: str | Path) -> Imported:
    """Makes a run folder from a released checkpoint: `config.json` and `checkpoints/0`, weights only.

    Args:
        source: see `read_hf`.
        workdir: run folder to make; nothing is written before everything was read.

    Raises:
        ValueError: see `read_hf`; or `workdir` already holds a run, or cannot be written.
    """
    source, workdir = Path(source), Path(workdir)
    _refuse_workdir(workdir)
    imported = read_hf(source)
    config = Config(model=imported.config)
    tokenizer = next((p for p in map(source.absolute().joinpath, TOKENIZERS) if p.is_file()), None)
    if tokenizer is not None:
        config = replace(config, data=replace(config.data, tokenizer=str(tokenizer)))
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        model = {"params": imported.params, "bias": imported.bias}
        checkpoints.save(0, {"model": model}, {"imported_from": str(source.absolute())})
    if jax.process_index() == 0:  # last: a folder without it is not a run
        draft = workdir / "config.json.partial"
        draft.write_text(to_json(config))
        draft.replace(workdir / "config.json")
    for note in imported.notes:
        _LOG.info("%s", note)
    _LOG.info("%s: step 0, %s parameters", workdir, f"{sum(x.size for x in jax.tree.leaves(imported.params)):,}")
    return imported


def read_hf(source: str | Path, mesh: Mesh | None = None) -> Imported:
    """Reads a released checkpoint: K3's layout, Kimi-Linear's, or what transformers saves; experts plain or MXFP4.

    Args:
        source: folder with `config.json` and safetensors files.
        mesh: where the parameters go, by the rules of `parallel/rules.py`; None: split over `data` as far as the
            devices divide every axis.

    Raises:
        ValueError: the folder is not a complete checkpoint of one model. Missing, unexpected and mis-shaped tensors are
            reported together; nothing keeps an initial value.
    """
    model, not_understood = read_config(source)
    check(Config(model=model))
    notes = [f"config.json: not understood and not used: {', '.join(not_understood)}"] if not_understood else []
    with SafetensorsReader(source) as reader:
        headers = dict(reader.headers)
        layout = find_layout(headers, model)
        packed = any(name.endswith(".weight_packed") for name in headers)
        left_aside = [name for name in headers if layout == "k3" and name.startswith(VISION_PREFIXES)]
        for name in left_aside:
            del headers[name]
        if left_aside:
            notes.append(f"{len(left_aside)} tensors of the vision tower and its projector were left aside")
        notes.append(f"{layout} layout, {'MXFP4' if packed else 'plain'} experts, {len(headers)} tensors")
        _refuse_differences(reader.folder, headers, names(model, layout, packed=packed))
        length, narrow = _a_log_length(headers, entries(model, layout)), _narrowed(headers, entries(model, layout))
        model, notes = replace(model, kda_a_log_length=length), notes + narrow
        loaded = dict(_load(_Source(reader, model, layout, packed), mesh or _data_mesh(model)))
    plan = blueprint(model)
    return Imported(model, _take(loaded, plan.abstract_params), _take(loaded, plan.abstract_bias), tuple(notes))


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


def _a_log_length(headers: dict[str, Header], found: Iterable[Entry]) -> int:
    """Entries of A_log in the files where it is padded; 0 where it is not."""
    shapes = {headers[entry.name].shape: entry for entry in found if entry.rule.form == "a_log"}
    if len(shapes) > 1:
        raise ValueError(f"A_log has several shapes: {', '.join(f'{e.name} {list(s)}' for s, e in shapes.items())}")
    padded = [shape[0] for shape, entry in shapes.items() if len(shape) == 1 and shape[0] > entry.parts[0].shape[-1]]
    return padded[0] if padded else 0


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
    for entry in entries(source.config, source.layout):
        for part, path in enumerate(entry.paths):
            feeders.setdefault(path, []).append((entry, part))
    for path, leaf in parameters(source.config).items():
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
            name = entry.name.replace("{e}", str(expert))
            read = partial(_read, source, name, packed=source.packed and entry.num_experts > 0)
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
