"""A folder of safetensors files as one table of tensors. Nothing outside the folder is opened, nothing is executed."""

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  numpy learns bfloat16 from it
import numpy as np
from safetensors import SafetensorError, safe_open

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_SHOWN = 5


class Header(NamedTuple):
    """What a file says of a tensor before its numbers are read; dtype as safetensors writes it."""

    shape: tuple[int, ...]
    dtype: str
    file: str


class SafetensorsReader:
    """Tensors of `model.safetensors`, or of the files that `model.safetensors.index.json` names.

    Use as a context; files stay open (memory-mapped) inside it.

    Args:
        folder: the folder of the checkpoint.

    Attributes:
        headers: name -> `Header` of every tensor.

    Raises:
        ValueError: no such files; pickles only; a file named by the index is missing, lies outside of the folder, or is
            damaged; index and files disagree.
    """

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise ValueError(f"{self.folder} is not a folder")
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self.headers: dict[str, Header] = {}
        try:
            index = self._index()
            for file in sorted(set(index.values())) if index is not None else [SINGLE]:
                self._open(file)
            if index is not None:
                self._compare(index)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> "SafetensorsReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._stack.close()

    def read(self, name: str, ranges: tuple[slice, ...] = ()) -> np.ndarray:
        """The numbers of a tensor, or of a range along each axis, in the stored dtype (a copy)."""
        file = self._files[self.headers[name].file]
        return file.get_slice(name)[ranges] if ranges else file.get_tensor(name)

    def _index(self) -> dict[str, str] | None:
        """tensor -> file, or None where a single file holds everything."""
        if not _exists(self.folder / INDEX):
            if not _exists(self.folder / SINGLE):
                raise ValueError(self._nothing_here())
            return None
        path = self.folder / INDEX
        plain_file(self.folder, INDEX)
        try:
            index = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
            pairs = {str(name): str(file) for name, file in index.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path}: not an index of safetensors files ({error})") from error
        if not pairs:
            raise ValueError(f"{path}: names no tensor")
        missing = [f for f in sorted(set(pairs.values())) if not _exists(plain_file(self.folder, f))]
        if missing:
            raise ValueError(f"{self.folder}: {len(missing)} files of the index are missing: {_some(missing)}")
        return pairs

    def _nothing_here(self) -> str:
        pickles = sorted(p.name for pattern in _PICKLES for p in self.folder.glob(pattern))
        if pickles:
            return (
                f"{self.folder} holds pickled weights ({_some(pickles)}), which can run code when read and are "
                "refused; convert them to safetensors first"
            )
        return f"{self.folder} holds neither {INDEX} nor {SINGLE}"

    def _open(self, file: str) -> None:
        path = plain_file(self.folder, file)
        try:
            opened = self._stack.enter_context(safe_open(path, framework="np"))
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                part = opened.get_slice(name)
                if name in self.headers:
                    raise ValueError(f"{name} is in {self.headers[name].file} and in {file}")
                self.headers[name] = Header(tuple(part.get_shape()), str(part.get_dtype()), file)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path}: damaged or not a safetensors file ({error})") from error
        self._files[file] = opened

    def _compare(self, index: dict[str, str]) -> None:
        there = {name: header.file for name, header in self.headers.items()}
        wrong = [
            f"{name}: the index says {file}, it is {'in ' + there[name] if name in there else 'nowhere'}"
            for name, file in index.items()
            if there.get(name) != file
        ]
        wrong += [f"{name}: in {file}, not in the index" for name, file in there.items() if name not in index]
        if wrong:
            raise ValueError(f"{self.folder}: index and files disagree: {_some(wrong)}")


def plain_file(folder: Path, name: str) -> Path:
    """Path of a file of numbers or of JSON that lies in the folder itself.

    Raises:
        ValueError: `name` is more than a file name, is a pickle, or is a link that leads out of the folder.
    """
    if not name or name in (".", "..") or {PurePosixPath(name).name, PureWindowsPath(name).name} != {name}:
        raise ValueError(f"{folder}: {name!r} is not the name of a file in this folder; paths are refused")
    if not name.endswith((".safetensors", ".json")):
        raise ValueError(f"{folder}: {name!r} is not a safetensors file; nothing else is read, pickles least of all")
    return inside(folder, name)


def inside(folder: Path, name: str) -> Path:
    """Path of a file in the folder.

    Raises:
        ValueError: it is a link that leads out of the folder.
    """
    path = folder / name
    if path.is_symlink() and path.resolve().parent != folder.resolve():
        raise ValueError(f"{path} is a link to {path.resolve()}, outside of the folder; copy the file into the folder")
    return path


def _exists(path: Path) -> bool:
    return path.is_file() or path.is_symlink()


def _some(lines: Iterable[str]) -> str:
    lines = list(lines)
    more = f" and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return "; ".join(lines[:_SHOWN]) + more
