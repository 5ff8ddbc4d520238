"""Where documents come from: random access by number, a stable name for each, and the document.

Kinds (`data.source`): `stdlib`, the standard library of the running Python; `text`, one document a file; `jsonl`, one
a line; `parquet`, one a row; `chat`, one conversation a line; `stdlib_chat`, conversations about the standard library.
A document is a text, or a rendered conversation. Order and names depend on the content of the folder only, not on the
machine.
"""

import fnmatch
import glob
import hashlib
import itertools
import os
import sysconfig
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from k3train.config.schema import DataConfig
from k3train.data import stdlib_chat
from k3train.data.chat import ChatError, read_conversation
from k3train.data.chat_corpus import style
from k3train.data.chat_template import Rendered, render
from k3train.data.records import BadDocument, JsonLines, MadeUp, ParquetRows, Parse, TextFiles, file_size, text_field

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Source(Protocol[T_co]):
    """Documents by number.

    Attributes:
        notes: what was left out while listing, for the log.
    """

    notes: tuple[str, ...]

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """Identity of a document that survives a move of the folder: relative path, `file:line` or `file:row`."""
        ...

    def read(self, index: int) -> T_co:
        """The document, never empty; BadDocument where there is none to have."""
        ...


def open_source(config: DataConfig, knob: str = "path") -> Source[Any]:
    """The documents that `data.source` and `data.path` name: texts, or where `config.is_chat` rendered conversations.

    Args:
        knob: of the two that hold a path: `path` or `eval_path`.

    Raises:
        ValueError: nothing there, not readable, or no document in it.
    """
    path = getattr(config, knob)
    if config.is_generated:
        if path:
            raise ValueError(f"data.{knob}={path!r}: source {config.source!r} takes no path; use another data.source")
        files, root = standard_library()
        if config.source == "stdlib":
            return TextFiles(files, root)
        return MadeUp(stdlib_chat.conversations(files, root), conversation_parser(config), config.source)
    files, root = find_files(path, _PATTERNS[config.source], f"data.{knob}")
    makers: dict[str, Callable[[], Source[Any]]] = {
        "text": lambda: TextFiles(files, root),
        "jsonl": lambda: JsonLines(files, root, text_field(config.text_field)),
        "parquet": lambda: ParquetRows(files, root, config.text_field),
        "chat": lambda: JsonLines(files, root, conversation_parser(config)),
    }
    source = makers[config.source]()
    if len(source) == 0:
        raise ValueError(f"data.{knob}={path!r}: no documents, {len(files)} file(s) are empty")
    return source


def conversation_parser(config: DataConfig) -> Parse[Rendered]:
    """Renders records as the configuration says."""
    wanted = style(config)

    def parse(record: dict[str, Any], where: str) -> Rendered:
        try:
            return render(read_conversation(record), wanted, where=where)
        except ChatError as error:
            raise BadDocument(where, str(error)) from error

    return parse


_PATTERNS = {"text": "*", "jsonl": "*.jsonl", "parquet": "*.parquet", "chat": "*.jsonl"}


def find_files(path: str, pattern: str, knob: str = "data.path") -> tuple[list[Path], Path]:
    """Files that `path` (a file, a folder searched with `pattern`, or a glob) stands for, sorted, and their root.

    Hidden files and folders are left out of a search.

    Raises:
        ValueError: nothing matches, or the one named file is empty.
    """
    if not path:
        raise ValueError(f"{knob} is empty: name a file, a folder or a glob")
    named = Path(path).expanduser()
    if named.is_file():
        if file_size(named) == 0:
            raise ValueError(f"{knob}={path!r}: the file is empty")
        return [named], named.parent
    if named.is_dir():
        files, root = _walk(named, pattern), named
    elif glob.has_magic(path):
        root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), named.parts))
        files = _in_order((Path(p) for p in glob.glob(str(named), recursive=True)), root)
    else:
        raise ValueError(f"{knob}={path!r}: no such file or folder")
    if not files:
        raise ValueError(f"{knob}={path!r}: no file matches {pattern if named.is_dir() else 'the glob'}")
    return files, root


def _walk(root: Path, pattern: str, apart: frozenset[str] = frozenset()) -> list[Path]:
    """Files under `root` whose name matches, sorted; folders named in `apart` and hidden ones are not entered."""

    def refuse(error: OSError) -> None:
        raise ValueError(f"{error.filename}: cannot be read: {error.strerror}") from error

    found = []
    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = [name for name in subfolders if name not in apart and not name.startswith(".")]
        found += [Path(folder, name) for name in fnmatch.filter(names, pattern) if not name.startswith(".")]
    return _in_order(found, root)


def _in_order(paths: Iterable[Path], root: Path) -> list[Path]:
    return sorted((p for p in paths if p.is_file()), key=lambda p: p.relative_to(root).as_posix())


def standard_library() -> tuple[list[Path], Path]:
    """Python sources that every machine has, and their root: no tests, nothing installed or made at build time."""
    root = Path(sysconfig.get_paths()["stdlib"])
    apart = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
    files = [path for path in _walk(root, "*.py", apart) if not path.name.startswith("_sysconfigdata")]
    if not files:
        raise ValueError(f"data.source='stdlib': no Python sources in {root}; use data.source='text' and data.path")
    return files, root


def held_out(names: list[str], fraction: float) -> np.ndarray:
    """bool [documents]: which documents are held out, by hash of their name.

    A document stays on its side when others come and go. With two documents or more at least one is held out: if the
    fraction picks none, the one that it would pick first.

    Raises:
        ValueError: fraction outside [0, 1), or one side of the split would be empty.
    """
    if not 0 <= fraction < 1:
        raise ValueError(f"data.eval_fraction={fraction}: expected 0 <= fraction < 1")
    if fraction == 0:
        return np.zeros(len(names), bool)
    # surrogateescape: file names are bytes, and not always UTF-8.
    digests = [hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest() for name in names]
    share = np.array([int.from_bytes(digest[:6], "big") / 2**48 for digest in digests])
    chosen = share < max(fraction, np.nextafter(share.min(), 1))
    if chosen.all():
        raise ValueError(
            f"data.eval_fraction={fraction}: all {len(names)} document(s) would be held out; "
            "whole documents are held out, so give more of them, a smaller fraction, or 0 for no held-out set"
        )
    return chosen


def documents(source: Source[T], on_bad_line: str) -> Generator[tuple[str, T], None, list[str]]:
    """(name, document) of every usable document in order; the generator returns the records it skipped.

    Raises:
        BadDocument: a record is unusable and `on_bad_line` is `stop`.
    """
    bad = []
    for index in range(len(source)):
        try:
            document = source.read(index)
        except BadDocument as error:
            if on_bad_line == "stop":
                raise
            bad.append(str(error))
            continue
        yield source.name(index), document
    return bad
