"""Documents in files by number: whole texts, lines of JSON, rows of parquet; each fault with its place and reason."""

import json
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar

import numpy as np

T = TypeVar("T")

#: Makes a document of a JSON object and of the place where it stands; refuses it with BadDocument.
Parse = Callable[[dict[str, Any], str], T]


class BadDocument(ValueError):
    """A record that cannot be used: where it is, and why."""

    def __init__(self, where: str, reason: str):
        super().__init__(f"{where}: {reason}")


class NamedTwice(ValueError):
    """A JSON object that has a name twice, so that one of its values would be lost."""


class TextFiles:
    """One document a file.

    Args:
        files: paths; empty files are left out and counted.
        root: names are relative to it.
    """

    def __init__(self, files: list[Path], root: Path):
        self._files = [f for f in files if file_size(f) > 0]
        self._root = root
        empty = len(files) - len(self._files)
        self.notes = (f"left out {empty} empty files",) if empty else ()

    def __len__(self) -> int:
        return len(self._files)

    def name(self, index: int) -> str:
        return self._files[index].relative_to(self._root).as_posix()

    def read(self, index: int) -> str:
        path = self._files[index]
        return _decode(_read(path), str(path))


class JsonLines(Generic[T]):
    """One document a line: what `parse` makes of a JSON object. Blank lines are no records.

    Args:
        files: JSONL files; only the byte offsets of their lines stay in memory.
        root: names are relative to it.
        parse: see `Parse`.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, files: list[Path], root: Path, parse: Parse[T]):
        self._files, self._parse = files, parse
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

    def read(self, index: int) -> T:
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
        return self._parse(_json_object(_decode(raw, where), where), where)


class MadeUp(Generic[T]):
    """Documents from records in memory.

    Args:
        records: name and JSON object of each.
        parse: see `Parse`.
        origin: where they come from, for messages.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, records: list[tuple[str, dict[str, Any]]], parse: Parse[T], origin: str):
        self._records, self._parse, self._origin = records, parse, origin

    def __len__(self) -> int:
        return len(self._records)

    def name(self, index: int) -> str:
        return self._records[index][0]

    def read(self, index: int) -> T:
        name, record = self._records[index]
        return self._parse(record, f"{self._origin}: {name}")


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

    def read(self, index: int) -> str:
        nth, inside, file, row = self._locate(index)
        if self._held[0] != nth:
            self._held = (nth, self._read_group(file, self._groups[nth][1]))
        return _usable(self._held[1][inside], f"column {self._column!r}", f"{self._files[file]}: row {row}")

    def _read_group(self, file: int, group: int) -> list:
        try:
            return self._readers[file].read_row_group(group, columns=[self._column]).column(self._column).to_pylist()
        except (OSError, ValueError) as error:  # a page that does not decode; no single row is to blame
            raise ValueError(f"{self._files[file]}: row group {group} cannot be read: {error}") from error


def text_field(field: str) -> Parse[str]:
    """The text at `field` of an object."""

    def parse(record: dict[str, Any], where: str) -> str:
        if field not in record:
            present = ", ".join(map(repr, list(record)[:5])) or "none"
            raise BadDocument(where, f"field {field!r} is missing (fields: {present})")
        return _usable(record[field], f"field {field!r}", where)

    return parse


def _json_object(line: str, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.removeprefix("\ufeff").rstrip("\r\n"), object_pairs_hook=json_members)
    except NamedTwice as error:
        raise BadDocument(where, str(error)) from error
    except json.JSONDecodeError as error:
        raise BadDocument(where, f"no valid JSON: {error.msg} (column {error.colno})") from error
    except (RecursionError, ValueError) as error:  # depth, or an integer of thousands of digits
        raise BadDocument(where, f"JSON beyond what is read: {error}") from error
    if not isinstance(record, dict):
        raise BadDocument(where, f"expected a JSON object, found {json_kind(record)}")
    return record


def json_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of its members, as `object_pairs_hook` of `json.loads`.

    Raises:
        NamedTwice: two of them have the same name.
    """
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for place, name in enumerate(names) if name in names[:place])
        raise NamedTwice(f"an object has the name {twice!r} twice")
    return members


def json_kind(value: object) -> str:
    """What a decoded JSON value is, in words."""
    kinds = {
        dict: "an object",
        list: "an array",
        str: "a string",
        bool: "a boolean",
        int: "a number",
        float: "a number",
    }
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


def file_size(path: Path) -> int:
    """Bytes of a file; ValueError where the system does not tell."""
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
