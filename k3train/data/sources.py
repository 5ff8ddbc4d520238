"""Where documents come from: random access by number, a stable name for each, and the text.

Kinds (`data.source`): `stdlib`, the standard library of the running Python; `text`, one document a file; `jsonl`, one
a line; `parquet`, one a row. Order and names depend on the content of the folder only, not on the machine.
"""

import fnmatch
import glob
import hashlib
import itertools
import json
import os
import sysconfig
from array import array
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from k3train.config.schema import DataConfig


class BadDocument(ValueError):
    """A record that cannot be used: where it is, and why."""

    def __init__(self, where: str, reason: str):
        super().__init__(f"{where}: {reason}")


class Source(Protocol):
    """Documents by number.

    Attributes:
        notes: what was left out while listing, for the log.
    """

    notes: tuple[str, ...]

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """Identity of a document that survives a move of the folder: relative path, `file:line` or `file:row`."""
        ...

    def text(self, index: int) -> str:
        """The document, never empty; BadDocument where there is none to have."""
        ...


class TextFiles:
    """One document a file.

    Args:
        files: paths; empty files are left out and counted.
        root: names are relative to it.
    """

    def __init__(self, files: list[Path], root: Path):
        self._files = [f for f in files if _size(f) > 0]
        self._root = root
        empty = len(files) - len(self._files)
        self.notes = (f"left out {empty} empty files",) if empty else ()

    def __len__(self) -> int:
        return len(self._files)

    def name(self, index: int) -> str:
        return self._files[index].relative_to(self._root).as_posix()

    def text(self, index: int) -> str:
        path = self._files[index]
        return _decode(_read(path), str(path))


class JsonLines:
    """One document a line: the string at `field` of a JSON object. Blank lines are no records.

    Args:
        files: JSONL files; only the byte offsets of their lines stay in memory.
        root: names are relative to it.
        field: key of the text.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, files: list[Path], root: Path, field: str):
        self._files, self._field = files, field
        self._names = [path.relative_to(root).as_posix() for path in files]
        self._lines = [_line_spans(path) for path in files]
        self._ends = np.cumsum([len(spans) for spans in self._lines])
        self._held: tuple[int, BinaryIO | None] = (-1, None)  # the file read last, kept open for its neighbours

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _locate(self, index: int) -> tuple[int, int, int, int]:
        """Number of the file, physical line number from 1, first byte and end of the line."""
        nth = int(np.searchsorted(self._ends, index, side="right"))
        # A negative index: counted back from the end of the file's lines.
        line, begin, end = self._lines[nth][index - self._ends[nth]].tolist()
        return nth, line, begin, end

    def name(self, index: int) -> str:
        nth, line, _, _ = self._locate(index)
        return f"{self._names[nth]}:{line}"

    def text(self, index: int) -> str:
        nth, line, begin, end = self._locate(index)
        where = f"{self._files[nth]}:{line}"
        try:
            held, file = self._held
            if held != nth or file is None:
                file = self._files[nth].open("rb")
                self._held = (nth, file)
            file.seek(begin)
            raw = file.read(end - begin)
        except OSError as error:
            raise BadDocument(where, f"cannot be read: {error.strerror}") from error
        return _json_text(_decode(raw, where), self._field, where)


class ParquetRows:
    """One document a row: the string in `column`. Needs pyarrow; one row group is in memory at a time."""

    notes: tuple[str, ...] = ()

    def __init__(self, files: list[Path], root: Path, column: str):
        try:
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise ValueError("data.source='parquet' needs pyarrow: pip install pyarrow") from error
        self._files, self._column = files, column
        self._names = [path.relative_to(root).as_posix() for path in files]
        self._readers = [_open_parquet(parquet.ParquetFile, path, column) for path in files]
        # Of each row group: file, group within the file, rows of the file before it.
        self._groups: list[tuple[int, int, int]] = []
        sizes = []
        for nth, reader in enumerate(self._readers):
            before = 0
            for group in range(reader.metadata.num_row_groups):
                self._groups.append((nth, group, before))
                sizes.append(reader.metadata.row_group(group).num_rows)
                before += sizes[-1]
        self._starts = np.cumsum([0, *sizes])
        self._held: tuple[int, list] = (-1, [])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _locate(self, index: int) -> tuple[int, int, int, int]:
        """Number of the row group over all files, row within it, file, row within the file from 1."""
        nth = int(np.searchsorted(self._starts, index, side="right")) - 1
        inside = index - int(self._starts[nth])
        file, _, before = self._groups[nth]
        return nth, inside, file, before + inside + 1

    def name(self, index: int) -> str:
        _, _, file, row = self._locate(index)
        return f"{self._names[file]}:{row}"

    def text(self, index: int) -> str:
        nth, inside, file, row = self._locate(index)
        if self._held[0] != nth:
            self._held = (nth, self._read_group(file, self._groups[nth][1]))
        return _usable(self._held[1][inside], f"column {self._column!r}", f"{self._files[file]}: row {row}")

    def _read_group(self, file: int, group: int) -> list:
        try:
            return self._readers[file].read_row_group(group, columns=[self._column]).column(self._column).to_pylist()
        except (OSError, ValueError) as error:  # a page that does not decode; no single row is to blame
            raise ValueError(f"{self._files[file]}: row group {group} cannot be read: {error}") from error


def open_source(config: DataConfig) -> Source:
    """The documents that `data.source`, `data.path` and `data.text_field` name.

    Raises:
        ValueError: nothing there, not readable, or no document in it.
    """
    if config.source == "stdlib":
        if config.path:
            raise ValueError(f"data.path={config.path!r}: source 'stdlib' takes no path; use data.source='text'")
        return _standard_library()
    files, root = find_files(config.path, _PATTERNS[config.source])
    makers: dict[str, Callable[[], Source]] = {
        "text": lambda: TextFiles(files, root),
        "jsonl": lambda: JsonLines(files, root, config.text_field),
        "parquet": lambda: ParquetRows(files, root, config.text_field),
    }
    source = makers[config.source]()
    if len(source) == 0:
        raise ValueError(f"data.path={config.path!r}: no documents, {len(files)} file(s) are empty")
    return source


_PATTERNS = {"text": "*", "jsonl": "*.jsonl", "parquet": "*.parquet"}


def find_files(path: str, pattern: str) -> tuple[list[Path], Path]:
    """Files that `path` (a file, a folder searched with `pattern`, or a glob) stands for, sorted, and their root.

    Hidden files and folders are left out of a search.

    Raises:
        ValueError: nothing matches, or the one named file is empty.
    """
    if not path:
        raise ValueError("data.path is empty: name a file, a folder or a glob")
    named = Path(path).expanduser()
    if named.is_file():
        if _size(named) == 0:
            raise ValueError(f"data.path={path!r}: the file is empty")
        return [named], named.parent
    if named.is_dir():
        files, root = _walk(named, pattern), named
    elif glob.has_magic(path):
        root = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), named.parts))
        files = _in_order((Path(p) for p in glob.glob(str(named), recursive=True)), root)
    else:
        raise ValueError(f"data.path={path!r}: no such file or folder")
    if not files:
        raise ValueError(f"data.path={path!r}: no file matches {pattern if named.is_dir() else 'the glob'}")
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


def _standard_library() -> TextFiles:
    """Python sources that every machine has: no tests, nothing installed or generated at build time."""
    root = Path(sysconfig.get_paths()["stdlib"])
    apart = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})
    files = [path for path in _walk(root, "*.py", apart) if not path.name.startswith("_sysconfigdata")]
    if not files:
        raise ValueError(f"data.source='stdlib': no Python sources in {root}; use data.source='text' and data.path")
    return TextFiles(files, root)


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


def documents(source: Source, on_bad_line: str) -> Generator[tuple[str, str], None, list[str]]:
    """(name, text) of every usable document in order; the generator returns the records it skipped.

    Raises:
        BadDocument: a record is unusable and `on_bad_line` is `stop`.
    """
    bad = []
    for index in range(len(source)):
        try:
            text = source.text(index)
        except BadDocument as error:
            if on_bad_line == "stop":
                raise
            bad.append(str(error))
            continue
        yield source.name(index), text
    return bad


def _json_text(line: str, field: str, where: str) -> str:
    try:
        record = json.loads(line.removeprefix("\ufeff").rstrip("\r\n"))
    except json.JSONDecodeError as error:
        raise BadDocument(where, f"no valid JSON: {error.msg} (column {error.colno})") from error
    except (RecursionError, ValueError) as error:  # depth, or an integer of thousands of digits
        raise BadDocument(where, f"JSON beyond what is read: {error}") from error
    if not isinstance(record, dict):
        raise BadDocument(where, f"expected a JSON object, found {_json_kind(record)}")
    if field not in record:
        present = ", ".join(map(repr, list(record)[:5])) or "none"
        raise BadDocument(where, f"field {field!r} is missing (fields: {present})")
    return _usable(record[field], f"field {field!r}", where)


def _json_kind(value: object) -> str:
    kinds = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")


def _usable(value: object, what: str, where: str) -> str:
    """`value` if it is text that can be encoded."""
    if not isinstance(value, str):
        raise BadDocument(where, f"{what} is {type(value).__name__}, expected text")
    if not value.strip():
        raise BadDocument(where, f"{what} is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadDocument(where, f"{what} holds half a surrogate pair at character {error.start}") from error
    return value


def _line_spans(path: Path) -> np.ndarray:
    """int64 [records, 3]: physical line number, first byte, end, of every line that is not blank."""
    spans, begin = array("q"), 0  # 24 bytes a record: files may have millions of lines
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.isspace():
                    spans.extend((number, begin, begin + len(line)))
                begin += len(line)
    except OSError as error:
        raise BadDocument(str(path), f"cannot be read: {error.strerror}") from error
    return np.asarray(spans, np.int64).reshape(-1, 3)


def _open_parquet(reader: Callable, path: Path, column: str):
    try:
        file = reader(path)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # pyarrow.ArrowInvalid
        raise ValueError(f"{path}: no parquet file: {error}") from error
    names = file.schema_arrow.names
    if column not in names:
        raise ValueError(f"{path}: column {column!r} (data.text_field) is missing; columns: {', '.join(names)}")
    return file


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BadDocument(str(path), f"cannot be read: {error.strerror}") from error


def _decode(raw: bytes, where: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadDocument(where, f"no valid UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}") from error
