"""Checkpoints of a run out as a release: streamed from disk to disk, whole or not at all (docs/k3.md section 6).

No device takes part: pieces of stacked parameters are read from the checkpoint, cut into released tensors, and written
at their places in the files. A piece is a row of stored chunks, never more than one stacked parameter.
"""

import json
import logging
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from k3train.checkpoint import release
from k3train.checkpoint.hf_config import FILE as CONFIG
from k3train.checkpoint.hf_config_write import TokenIds, layout_of, new_config, refuse_another_model, with_quantization
from k3train.checkpoint.hf_names import LAYOUTS, Entry, Spec, entries, packed_specs
from k3train.checkpoint.orbax import Checkpoints, Stored
from k3train.checkpoint.safetensors_reader import Header
from k3train.checkpoint.safetensors_writer import DTYPES, SafetensorsWriter, num_bytes, plan_files
from k3train.config.load import read_run
from k3train.config.schema import Config, ModelConfig
from k3train.data.tokenizer import load_tokenizer
from k3train.model.k3 import blueprint
from k3train.ops.mx import encode_mxfp4

_LOG = logging.getLogger(__name__)
#: How routed experts may be stored, and their dtype where that is a plain one.
EXPERTS = {"mxfp4": "U8", "bf16": "BF16", "f32": "F32"}
#: Axes along which stacked parameters are read in pieces.
_PIECED = ("layers", "experts")


@dataclass(frozen=True)
class Exported:
    """What was written.

    Args:
        tensors: name -> shape, dtype and file.
    """

    folder: Path
    step: int
    layout: str
    tensors: Mapping[str, Header]


class _Form(NamedTuple):
    """How the text model is written.

    Args:
        layout: key of `LAYOUTS`.
        experts: key of `EXPERTS`; "": in the dtypes below.
        known: the release whose dtypes are kept.
        default: dtype of what the release keeps in bfloat16, where no release is known.
    """

    layout: str
    experts: str
    known: release.Release | None
    default: str

    def specs(self, entry: Entry) -> dict[str, Spec]:
        """The tensors of an entry by name, and how they are stored."""
        if entry.num_experts and self.experts == "mxfp4":
            packed = packed_specs(entry)
            return {name + end: spec for name in entry.names() for end, spec in packed.items()}
        return {name: Spec(entry.shape, self._dtype(entry, name)) for name in entry.names()}

    def _dtype(self, entry: Entry, name: str) -> str:
        if entry.num_experts and self.experts:
            return EXPERTS[self.experts]
        if self.known is not None:
            return self.known.dtype(entry.rule.released, name)
        return "F32" if entry.rule.float32 else self.default


class _Plan(NamedTuple):
    """All that is decided before anything is written.

    Args:
        kept: the release that the run comes from; None: none.
        found: the text model's tensors, experts counted once.
        tree: `config.json`.
    """

    config: Config
    kept: release.Kept | None
    form: _Form
    found: list[Entry]
    tree: dict[str, Any]

    @property
    def same(self) -> release.Kept | None:
        """The release, if it has the layout that is written."""
        return self.kept if self.kept and self.kept.release.layout == self.form.layout else None


def export_hf(
    workdir: str | Path,
    output: str | Path,
    *,
    experts: str | None = None,
    layout: str | None = None,
    step: int | None = None,
) -> Exported:
    """Writes a checkpoint of a run as safetensors files with an index and `config.json`.

    A run that was imported, or started from one that was, gives the form of that release: its names, dtypes and shape
    of A_log, its `config.json`, its tokenizer, and the tensors that were carried along.

    Args:
        workdir: run folder.
        output: folder to make; an empty one may be there.
        experts: "mxfp4", "bf16" or "f32"; None: packed if training quantises them (then these are the weights that the
            forward pass of training saw, bit for bit), else as the release has them, or in the model's compute dtype.
        layout: key of `hf_names.LAYOUTS`; None: the release's, or the one that the model fits.
        step: None: the newest.

    Raises:
        ValueError: no such run or step, an output that is not empty, no room on the disk, a model that the layout
            cannot say, widths that cannot be packed, or a weight that its dtype cannot hold.
    """
    workdir, output = Path(workdir), Path(output).resolve()
    plan = _prepare(workdir, experts, layout)
    with ExitStack() as stack:
        carried = stack.enter_context(plan.same.tensors()) if plan.same and plan.same.has_tensors() else None
        beside = carried.headers if carried else {}
        headers = plan_files([*_by_layer(plan), *_by_file(beside)])
        checkpoints = stack.enter_context(Checkpoints(workdir / "checkpoints"))
        step = checkpoints.resolve(step)
        stored = _stored(checkpoints, step, plan.config.model)
        folder = stack.enter_context(_made_whole(output, sum(map(num_bytes, headers.values()))))
        writer = SafetensorsWriter(folder, headers)
        _write_model(plan, stored, headers, writer)
        for name in beside:
            assert carried is not None
            writer.write(name, carried.read(name))
        weights = sum(prod(entry.shape) * len(entry.names()) for entry in plan.found)
        writer.finish(weights + sum(prod(header.shape) for header in beside.values()))
        (folder / CONFIG).write_text(json.dumps(plan.tree, indent=2) + "\n", encoding="utf-8")
        for name, file in _files(plan).items():
            shutil.copyfile(file, folder / name)
    exported = Exported(output, step, plan.form.layout, headers)
    _say(exported, plan)
    return exported


def _prepare(workdir: Path, experts: str | None, layout: str | None) -> _Plan:
    config = read_run(workdir)
    kept = release.find(workdir, config)
    if experts is not None and experts not in EXPERTS:
        raise ValueError(f"experts={experts!r}: must be {', '.join(EXPERTS)}")
    layout = layout or (kept.release.layout if kept else layout_of(config.model))
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r}: must be {', '.join(LAYOUTS)}")
    trained_packed = config.quant.experts != "none"
    if experts is None:
        experts = "mxfp4" if trained_packed or (kept and kept.release.packed) else ""
    elif trained_packed and experts != "mxfp4":
        _LOG.warning("experts=%s: not rounded, though the forward pass of training rounds them to MXFP4", experts)
    default = "BF16" if config.model.compute_dtype == "bfloat16" else "F32"
    form = _Form(layout, experts, kept.release if kept else None, default)
    found = list(entries(config.model, layout))
    if kept and kept.release.layout == layout:
        known, where = kept.release, f"{kept.folder / release.RECORD}: config"
        found = [replace(e, shape=known.a_log_shape) if e.rule.form == "a_log" else e for e in found]
        refuse_another_model(known.config, config.model, where, known.ignored)
        tree = known.config
    else:
        ids = kept.release.token_ids() if kept else _token_ids(config)
        tree = new_config(config.model, layout, ids, config.data.seq_len)
    return _Plan(config, kept, form, found, with_quantization(tree, experts == "mxfp4"))


def _token_ids(config: Config) -> TokenIds:
    """Ids of the run's own tokenizer, as far as the model has them."""
    try:
        tokenizer = load_tokenizer(config.data.tokenizer)
    except ValueError as error:
        _LOG.warning("config.json will name no token that ends a text: %s", error)
        return TokenIds()
    rows = config.model.vocab_size
    bos = tokenizer.bos_id if tokenizer.bos_id is not None and tokenizer.bos_id < rows else None
    stop = [i for i in tokenizer.stop_ids if i < rows]
    return TokenIds(bos, stop if len(stop) > 1 else next(iter(stop), None))


def _by_layer(plan: _Plan) -> list[dict[str, Spec]]:
    """The text model's tensors layer by layer, those outside the layers last."""
    groups: dict[int, dict[str, Spec]] = defaultdict(dict)
    for entry in plan.found:
        groups[plan.config.model.num_layers if entry.number is None else entry.number] |= plan.form.specs(entry)
    return [groups[number] for number in sorted(groups)]


def _by_file(headers: Mapping[str, Header]) -> list[dict[str, Header]]:
    groups: dict[str, dict[str, Header]] = defaultdict(dict)
    for name, header in headers.items():
        groups[header.file][name] = header
    return [groups[file] for file in sorted(groups)]


def _stored(checkpoints: Checkpoints, step: int, model: ModelConfig) -> dict[str, Stored]:
    """Every parameter and router bias on the disk, by path."""
    plan = blueprint(model)
    wanted = {"params": plan.abstract_params, "bias": plan.abstract_bias}
    found = checkpoints.stored(step, {"model": wanted})
    return {path.split("/", 1)[1]: stored for path, stored in found.items()}


@contextmanager
def _made_whole(output: Path, size: int) -> Iterator[Path]:
    """An empty folder that becomes `output` if all goes well, and vanishes if not."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} is there already and not an empty folder; give another")
    draft = output.with_name(output.name + ".partial")
    if draft.exists():
        raise ValueError(f"{draft} is being written, or was left by an export cut short; remove it to export again")
    try:
        draft.mkdir(parents=True)
        free = shutil.disk_usage(draft).free
        if free < size:
            raise ValueError(f"{output} needs {size:,} bytes, {free:,} are free")
        yield draft
        draft.rename(output)
    except OSError as error:
        raise ValueError(f"{output} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(FileNotFoundError):
            shutil.rmtree(draft)


def _write_model(
    plan: _Plan, stored: Mapping[str, Stored], headers: Mapping[str, Header], writer: SafetensorsWriter
) -> None:
    """Every tensor of the text model, one stacked parameter (or those that share a tensor) after the other."""
    shared: dict[tuple[str, ...], list[Entry]] = defaultdict(list)
    for entry in plan.found:
        shared[entry.paths].append(entry)
    for paths, members in shared.items():
        arrays = [stored[path] for path in paths]
        for ranges in _pieces(members[0], arrays):
            pieces = []
            for leaf, array in zip(members[0].parts, arrays, strict=True):
                pieces.append(array[tuple(slice(*ranges[a]) if a in ranges else slice(None) for a in leaf.axes)])
            for entry in members:
                if entry.layer is None or entry.layer in range(*ranges["layers"]):
                    _write_entry(entry, pieces, ranges, headers, writer, plan.config.quant.weight_scale)


def _pieces(entry: Entry, arrays: Sequence[Stored]) -> Iterator[dict[str, tuple[int, int]]]:
    """Ranges along the stacked axes that together are the parameter, each as long as what is stored as one."""
    leaf = entry.parts[0]
    ranges: list[list[tuple[int, int]]] = []
    axes = [axis for axis in _PIECED if axis in leaf.axes]
    for axis in axes:
        size = leaf.shape[leaf.axes.index(axis)]
        lengths = (a.chunk[p.axes.index(axis)] for p, a in zip(entry.parts, arrays, strict=True))
        length = max(lengths)
        ranges.append([(start, min(start + length, size)) for start in range(0, size, length)])
    for choice in product(*ranges):
        yield dict(zip(axes, choice, strict=True))


def _write_entry(
    entry: Entry,
    pieces: Sequence[np.ndarray],
    ranges: Mapping[str, tuple[int, int]],
    headers: Mapping[str, Header],
    writer: SafetensorsWriter,
    rule: str,
) -> None:
    """The tensors of an entry that lie in these ranges; `rule` is that of the scales where they are packed."""
    for expert in range(*ranges.get("experts", (0, 1))):
        parts = []
        for part, piece in enumerate(pieces):
            start = [ranges.get(axis, (0, 0))[0] for axis in entry.parts[part].axes]
            where = zip(entry.where(part, expert), start, strict=True)
            parts.append(piece[tuple(at - first if isinstance(at, int) else at for at, first in where)])
        name, weights = entry.name_of(expert), entry.to_released(parts)
        if name in headers:
            writer.write(name, _cast(weights, name, headers[name].dtype))
            continue
        try:
            packed, scale = encode_mxfp4(weights, rule)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        writer.write(f"{name}_packed", packed)
        writer.write(f"{name}_scale", scale)


def _cast(weights: np.ndarray, name: str, dtype: str) -> np.ndarray:
    """The weights as they are stored; what is not finite, or would not be, is refused."""
    largest = np.abs(weights).max(initial=0)
    if not largest <= float(ml_dtypes.finfo(DTYPES[dtype]).max):
        raise ValueError(f"{name}: its largest weight is {largest:.6g}, which {dtype} cannot hold")
    return weights.astype(DTYPES[dtype], copy=False)


def _files(plan: _Plan) -> dict[str, Path]:
    """Files that go along, by the names they get: those of the release, else the run's own tokenizer."""
    found = {file.name: file for file in plan.kept.files()} if plan.kept else {}
    own = Path(plan.config.data.tokenizer)
    if not any(name in found for name in release.TOKENIZERS) and own.is_file():
        found["tokenizer.json" if own.suffix == ".json" else "tiktoken.model"] = own
        roles = own.with_name("tokenizer_config.json")
        found |= {roles.name: roles} if roles.is_file() else {}
    return found


def _say(exported: Exported, plan: _Plan) -> None:
    dtypes = {spec.dtype for entry in plan.found if entry.num_experts for spec in plan.form.specs(entry).values()}
    experts = "MXFP4" if "U8" in dtypes else "/".join(sorted(dtypes)) or "no"
    size = sum(map(num_bytes, exported.tensors.values()))
    files = len({header.file for header in exported.tensors.values()})
    _LOG.info(
        "%s: step %d, %s layout, %s experts, %s tensors, %s bytes in %d files",
        exported.folder, exported.step, exported.layout, experts, f"{len(exported.tensors):,}", f"{size:,}", files,
    )  # fmt: skip
    if plan.kept and not plan.same and plan.kept.has_tensors():
        _LOG.warning("%s layout has no vision tower: what was carried along was left out", exported.layout)
