"""Safetensors files filled in any order: headers first, then each tensor at its place, an index at the end."""

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from k3train.checkpoint.safetensors_reader import INDEX, Header

#: dtypes as safetensors writes them, as numpy has them.
DTYPES: dict[str, Any] = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F16": np.float16, "U8": np.uint8}
#: A file takes in more tensors up to this size; no more than a layer of K3 with packed experts.
FILE_BYTES = 16 * 2**30
_ALIGNMENT = 8
_WIDTHS = {name: np.dtype(dtype).itemsize for name, dtype in DTYPES.items()}


def num_bytes(header: Any) -> int:
    """Bytes of a tensor of a shape and a dtype."""
    return prod(header.shape) * _WIDTHS[header.dtype]


def plan_files(groups: Iterable[Mapping[str, Any]], limit: int = FILE_BYTES) -> dict[str, Header]:
    """Which file each tensor goes to: as few files as `limit` allows, a group in one file where it fits.

    Args:
        groups: tensors by name, with shape and dtype each; in the order of the files.

    Returns:
        name -> Header.
    """
    files: list[dict[str, Any]] = [{}]
    free = limit
    for group in groups:
        sizes = {name: num_bytes(tensor) for name, tensor in group.items()}
        if sum(sizes.values()) > free and files[-1]:
            files.append({})
            free = limit
        for name, tensor in group.items():
            if sizes[name] > free and files[-1]:
                files.append({})
                free = limit
            files[-1][name] = tensor
            free -= sizes[name]
    return {
        name: Header(tuple(tensor.shape), tensor.dtype, f"model-{number:05}-of-{len(files):05}.safetensors")
        for number, tensors in enumerate(files, 1)
        for name, tensor in tensors.items()
    }


class SafetensorsWriter:
    """Files of a checkpoint, made whole at once and filled tensor by tensor.

    Args:
        folder: an empty folder.
        headers: every tensor, as `plan_files` gives them.

    Raises:
        OSError: the disk is full, or not writable.
    """

    def __init__(self, folder: Path, headers: Mapping[str, Header]):
        self._folder, self._headers = folder, headers
        self._offsets: dict[str, int] = {}
        self._left = set(headers)
        by_file: dict[str, list[str]] = defaultdict(list)
        for name, header in headers.items():
            by_file[header.file].append(name)
        for file, names in by_file.items():
            self._start(file, names)

    def _start(self, file: str, names: list[str]) -> None:
        """Header and full length of one file; wide numbers first, so that all of them lie aligned."""
        names = sorted(names, key=lambda n: (-_WIDTHS[self._headers[n].dtype], n))
        table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name in names:
            header = self._headers[name]
            end = at + num_bytes(header)
            table[name] = {"dtype": header.dtype, "shape": list(header.shape), "data_offsets": [at, end]}
            self._offsets[name], at = at, end
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        with (self._folder / file).open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + at)
        for name in names:
            self._offsets[name] += 8 + len(text)

    def write(self, name: str, array: np.ndarray) -> None:
        """The numbers of one tensor, in the dtype of its header; each tensor once."""
        header = self._headers[name]
        assert name in self._left and array.shape == header.shape and array.dtype == DTYPES[header.dtype], name
        self._left.remove(name)
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        at = self._offsets[name]
        descriptor = os.open(self._folder / header.file, os.O_WRONLY)
        try:
            while data:
                written = os.pwrite(descriptor, data, at)
                data, at = data[written:], at + written
        finally:
            os.close(descriptor)

    def finish(self, num_parameters: int) -> None:
        """Waits until all is on the disk, and writes the index.

        Args:
            num_parameters: weights in all tensors, for the index.
        """
        assert not self._left, f"never written: {sorted(self._left)[:5]}"
        files = {name: header.file for name, header in sorted(self._headers.items())}
        metadata = {
            "total_parameters": num_parameters,
            "total_size": sum(num_bytes(header) for header in self._headers.values()),
        }
        index = json.dumps({"metadata": metadata, "weight_map": files}, indent=2) + "\n"
        (self._folder / INDEX).write_text(index, encoding="utf-8")
        for file in {INDEX, *files.values()}:
            descriptor = os.open(self._folder / file, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
