"""What a run keeps of the release it was imported from, so that an export gives the same files back.

`release/` in the run folder:
    release.json   layout, dtypes, the imported config.json
    tensors/       tensors that belong to no model of ours: vision tower and projector, byte for byte
    files/         tokenizer, templates, code, licence: copied, never run
"""

import json
import logging
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from k3train.checkpoint.hf_config import FILE as CONFIG
from k3train.checkpoint.hf_config_write import TokenIds
from k3train.checkpoint.hf_names import Entry
from k3train.checkpoint.safetensors_reader import Header, SafetensorsReader, inside
from k3train.checkpoint.safetensors_writer import SafetensorsWriter
from k3train.config.load import read_run
from k3train.config.schema import Config

_LOG = logging.getLogger(__name__)
FOLDER, RECORD, TENSORS, FILES = "release", "release.json", "tensors", "files"
#: Tokenizer files of a release, read as data when a run needs text.
TOKENIZERS = ("tokenizer.json", "tiktoken.model")
_TOKEN_IDS = ("bos_token_id", "eos_token_id")
#: Files of a checkpoint that are carried along.
_CARRIED = (".json", ".jinja", ".model", ".txt", ".py")


@dataclass(frozen=True)
class Release:
    """The form of a released checkpoint.

    Args:
        layout: key of `hf_names.LAYOUTS`.
        packed: routed experts are MXFP4.
        dtypes: kind of tensor (`Rule.released`) -> dtype, and full name -> dtype where one differs from its kind.
        a_log_shape: of every A_log.
        config: `config.json`.
        ignored: its fields that were passed over.
    """

    layout: str
    packed: bool
    dtypes: dict[str, str]
    a_log_shape: tuple[int, ...]
    config: dict[str, Any]
    ignored: tuple[str, ...] = ()

    def dtype(self, kind: str, name: str) -> str:
        """As which a tensor is stored; of packed experts, as which they would be stored plain."""
        return self.dtypes.get(name, self.dtypes.get(kind, "BF16"))

    def token_ids(self) -> TokenIds:
        """Ids that `config.json` names."""
        levels = (self.config, self.config.get("text_config") or {})
        said = ([level[key] for level in levels if level.get(key) is not None] for key in _TOKEN_IDS)
        return TokenIds(*(next(iter(ids), None) for ids in said))


@dataclass(frozen=True)
class Kept:
    """A release as some run folder keeps it."""

    folder: Path
    release: Release

    def has_tensors(self) -> bool:
        return (self.folder / TENSORS).is_dir()

    def tensors(self) -> SafetensorsReader:
        """Tensors carried along, to be used as a context."""
        return SafetensorsReader(self.folder / TENSORS)

    def files(self) -> list[Path]:
        """Files carried along."""
        return sorted((self.folder / FILES).iterdir())


def dtypes_of(headers: Mapping[str, Header], found: Iterable[Entry], packed: bool) -> dict[str, str]:
    """`Release.dtypes` of a checkpoint whose tensors are those of `found`."""
    by_kind: dict[str, dict[str, str]] = defaultdict(dict)
    for entry in found:
        if not (packed and entry.num_experts):
            by_kind[entry.rule.released].update((name, headers[name].dtype) for name in entry.names())
    dtypes = {kind: Counter(names.values()).most_common(1)[0][0] for kind, names in by_kind.items()}
    apart = {n: d for kind, names in by_kind.items() for n, d in names.items() if d != dtypes[kind]}
    return dtypes | apart


def keep(
    workdir: Path, release: Release, reader: SafetensorsReader, tensors: Mapping[str, Header], files: Iterable[Path]
) -> None:
    """Writes `release/`: the record last."""
    folder = workdir / FOLDER
    (folder / FILES).mkdir(parents=True)
    for file in files:
        shutil.copyfile(file, folder / FILES / file.name)
    if tensors:
        (folder / TENSORS).mkdir()
        writer = SafetensorsWriter(folder / TENSORS, tensors)
        for name in tensors:
            writer.write(name, reader.read(name))
        writer.finish(sum(prod(header.shape) for header in tensors.values()))
    (folder / RECORD).write_text(json.dumps(asdict(release), indent=2) + "\n", encoding="utf-8")


def carried_files(source: Path) -> list[Path]:
    """Files of a checkpoint that are carried along beside its weights and `config.json`.

    Raises:
        ValueError: one of them is a link that leads out of the folder.
    """
    return [
        inside(source, path.name)
        for path in sorted(source.iterdir())
        if (path.suffix in _CARRIED or path.name.startswith("LICENSE"))
        and path.name != CONFIG
        and not path.name.endswith(".index.json")
        and path.is_file()
    ]


def find(workdir: Path, config: Config) -> Kept | None:
    """The release that a run comes from: imported into its own folder, or into that of the run it started from.

    Raises:
        ValueError: the record is damaged.
    """
    for folder in _origins(workdir, config):
        record = folder / FOLDER / RECORD
        if not record.is_file():
            continue
        try:
            values = json.loads(record.read_text(encoding="utf-8"))
            release = Release(**(values | {key: tuple(values[key]) for key in ("a_log_shape", "ignored")}))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{record} is damaged: {error}") from error
        return Kept(folder / FOLDER, release)
    return None


def _origins(workdir: Path, config: Config) -> Iterator[Path]:
    """The run folder, and those that each started from."""
    seen: set[Path] = set()
    while workdir.resolve() not in seen:
        seen.add(workdir.resolve())
        yield workdir
        if not config.init_from:
            return
        workdir = Path(config.init_from)
        if (workdir / CONFIG).is_file():
            config = read_run(workdir)
        else:
            _LOG.warning("init_from=%s is not there: what it kept of a release is not known here", workdir)
            return
