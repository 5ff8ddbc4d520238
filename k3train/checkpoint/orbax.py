"""Checkpoints of a run: `DIR/<step>/{model,optimizer,record}`, written in the background, complete or not there at all.

`model` holds {"params", "bias"}, all that evaluation and inference need; `optimizer` the rest of the training state;
`record` the data position, counters and configuration as JSON. Arrays are stored as nested dicts named by their place
in the tree, so that no Python type of ours or of optax is part of the format.

A thin layer over orbax's AsyncCheckpointer that adds what a run needs: restoring is strict and says which leaves
differ, a save cut short is named and never taken for a checkpoint, a failed save stops the run, older checkpoints go
only after a newer one is complete. (CheckpointManager does part of this, but after a failed save it forgets the former
checkpoint and may go on writing.)
"""

import json
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore

from k3train.core.tree import Tree, leaves

#: Kinds of arrays kept apart, so that reading a model does not read its optimizer.
PARTS = ("model", "optimizer")
_RECORD = "record"
_COMMITTED = "_CHECKPOINT_METADATA"
_SHOWN = 8


class SaveError(RuntimeError):
    """A checkpoint could not be written."""


@dataclass(frozen=True)
class Leaf:
    """One stored array."""

    path: str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Stored:
    """A stored array, read part by part: `stored[1, :, 2:4]` is a numpy array.

    Attributes:
        chunk: shape of what is read at once, wherever a part lies; a part of one chunk costs as much as the chunk.
    """

    def __init__(self, folder: Path, path: str):
        """`folder` of a part of a checkpoint, `path` of the array in it."""
        store = json.loads((folder / "_METADATA").read_text())
        place: dict[str, Any] = {"driver": "file", "path": f"{folder}/"}
        name = path.replace("/", ".") + "/"
        if store["use_ocdbt"]:
            place = {"driver": "ocdbt", "base": place, "path": name}
        else:
            place["path"] += name
        spec = {"driver": "zarr3" if store["use_zarr3"] else "zarr", "kvstore": place}
        self._array = tensorstore.open(spec, open=True, read=True).result()
        layout: Any = self._array.chunk_layout
        self.chunk: tuple[int, ...] = tuple(layout.read_chunk.shape)

    def __getitem__(self, index: tuple[int | slice, ...]) -> np.ndarray:
        return self._array[index].read().result()


class Checkpoints:
    """The checkpoints in one folder.

    Args:
        directory: folder that holds one folder per step; made by the first save.
        keep: how many complete checkpoints stay; older ones are removed after a newer one is complete. 0: all.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 0):
        self.directory = Path(directory).absolute()
        self._keep = keep
        self._checkpointer: ocp.AsyncCheckpointer | None = None
        self._saving: int | None = None
        logging.getLogger("absl").addFilter(_not_from_orbax)

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
            return
        try:  # the error under way matters more than one of the save in the background
            self.close()
        except SaveError as error:
            logging.getLogger(__name__).error("%s", error)

    def steps(self) -> list[int]:
        """Steps with a complete checkpoint, ascending."""
        return sorted(int(path.name) for path in self._folders() if path.name.isdigit() and _complete(path))

    def incomplete(self) -> list[str]:
        """Names of folders left behind by a save that was cut short."""
        return sorted(p.name for p in self._folders() if not (p.name.isdigit() and _complete(p)))

    def latest(self) -> int | None:
        """Newest complete step, or None."""
        return max(self.steps(), default=None)

    def resolve(self, step: int | None) -> int:
        """`step`, or the newest one for None.

        Raises:
            ValueError: there is no complete checkpoint (of that step).
        """
        steps = self.steps()
        known = ", ".join(map(str, steps)) or "none"
        if step is None:
            if not steps:
                raise ValueError(f"no complete checkpoint in {self.directory}")
            return steps[-1]
        if step in steps:
            return step
        if any(name.split(".")[0] == str(step) for name in self.incomplete()):
            raise ValueError(f"checkpoint {step} in {self.directory} is incomplete, a partial save; complete: {known}")
        raise ValueError(f"no checkpoint of step {step} in {self.directory}; complete: {known}")

    def save(self, step: int, parts: dict[str, Any], record: dict[str, Any]) -> None:
        """Starts writing; returns once the arrays may be donated. Waits for the save before this one.

        Args:
            step: name of the checkpoint; a partial one of the same step is replaced.
            parts: trees of arrays by part, keys from `PARTS`.
            record: whatever else belongs to the step, as JSON.

        Raises:
            SaveError: this save could not start, or the one before it failed.
        """
        self.wait()
        assert step not in self.steps(), f"step {step} is already saved"
        items: dict[str, Any] = {name: ocp.args.PyTreeSave(_nested(tree)) for name, tree in parts.items()}
        items[_RECORD] = ocp.args.JsonSave(record)
        self._saving = step
        self._reporting(lambda: self._start(step, ocp.args.Composite(**items)))

    def wait(self) -> None:
        """Blocks until the save in the background is complete.

        Raises:
            SaveError: it failed; names the step, the cause and the newest complete checkpoint.
        """
        if self._saving is not None:
            self._reporting(self._open().wait_until_finished)
            self._saving = None
            self._retire()

    def check(self) -> None:
        """Raises SaveError if the save in the background has failed; does not wait for it."""
        if self._saving is not None:
            self._reporting(self._open().check_for_errors)
            self._retire()

    def close(self) -> None:
        """Waits, then releases the background threads. Raises SaveError like `wait`."""
        self.wait()
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None

    def restore(self, step: int, abstract: dict[str, Any]) -> dict[str, Any]:
        """The arrays of `step`, placed as asked.

        Args:
            step: a complete step.
            abstract: tree of ShapeDtypeStruct per part to read, with a sharding on any mesh; without one, the leaf
                comes as a numpy array and needs no device.

        Raises:
            ValueError: no such checkpoint; or a leaf is missing, extra or of another shape or dtype (all are listed).
        """
        step = self.resolve(step)
        self._check_fit(step, abstract)
        items = {}
        for name, tree in abstract.items():
            wanted = _nested(tree)
            placed = ocp.checkpoint_utils.construct_restore_args(wanted)
            items[name] = ocp.args.PyTreeRestore(wanted, restore_args=placed)
        restored = self._open().restore(self._folder(step), args=ocp.args.Composite(**items))
        return {name: _unnested(restored[name], tree) for name, tree in abstract.items()}

    def stored(self, step: int, abstract: dict[str, Any]) -> dict[str, Stored]:
        """The arrays of `step` by path (of all parts together, which have none in common), to be read part by part.

        Args:
            step, abstract: as for `restore`; only shapes and dtypes count.

        Raises:
            ValueError: see `restore`.
        """
        step = self.resolve(step)
        self._check_fit(step, abstract)
        return {
            path: Stored(self._folder(step) / part, path)
            for part, tree in abstract.items()
            for path, _ in leaves(_nested(tree))
        }

    def record(self, step: int) -> dict[str, Any]:
        """What `save` was given as `record`."""
        step = self.resolve(step)
        return json.loads((self._folder(step) / _RECORD / "metadata").read_text())

    def leaves(self, step: int, part: str = "model") -> list[Leaf]:
        """The stored arrays of one part, from metadata alone: no device and no memory needed. Empty: no such part."""
        step = self.resolve(step)
        if not (self._folder(step) / part).is_dir():
            return []
        metadata: Any = self._open().metadata(self._folder(step))
        tree = metadata.item_metadata[part].tree
        return [Leaf(path, tuple(leaf.shape), str(leaf.dtype)) for path, leaf in leaves(tree)]

    def _folder(self, step: int) -> Path:
        return self.directory / str(step)

    def _folders(self) -> list[Path]:
        if not self.directory.is_dir():
            return []
        return [p for p in self.directory.iterdir() if p.is_dir() and p.name.split(".")[0].isdigit()]

    def _open(self) -> ocp.AsyncCheckpointer:
        if self._checkpointer is None:
            # Sharing out the writing of copies would compile a slice program for every shape and device.
            arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
            registry = ocp.type_handlers.create_type_handler_registry(
                (jax.Array, arrays), (np.ndarray, ocp.type_handlers.NumpyHandler())
            )
            handlers: dict[str, Any] = {
                name: ocp.PyTreeCheckpointHandler(type_handler_registry=registry) for name in PARTS
            }
            handlers[_RECORD] = ocp.JsonCheckpointHandler()
            self._checkpointer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(**handlers))
        return self._checkpointer

    def _start(self, step: int, items: ocp.args.Composite) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._open().save(self._folder(step), args=items, force=True)  # replaces what a save cut short left there

    def _retire(self) -> None:
        """Remove what is older than the complete checkpoints to be kept."""
        if not self._keep or jax.process_index():
            return
        for step in self.steps()[: -self._keep]:
            (self._folder(step) / _COMMITTED).unlink()  # first, so that a half-removed folder is not complete
            shutil.rmtree(self._folder(step))

    def _reporting(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            step, self._saving = self._saving, None
            if self._checkpointer is not None:
                with suppress(Exception):  # waits for what may still be writing; raises the same error again
                    self._checkpointer.close()
                self._checkpointer = None
            kept = self.latest()
            left = "no complete checkpoint" if kept is None else f"the newest complete checkpoint is step {kept}"
            raise SaveError(f"checkpoint of step {step} in {self.directory} failed: {_cause(error)}; {left}") from error

    def _check_fit(self, step: int, abstract: dict[str, Any]) -> None:
        lines: list[str] = []
        for part, tree in abstract.items():
            stored = {leaf.path: leaf for leaf in self.leaves(step, part)}
            if not stored:
                raise ValueError(f"checkpoint {step} in {self.directory} holds no {part}")
            wanted = {path: Leaf(path, tuple(x.shape), str(x.dtype)) for path, x in leaves(_nested(tree))}
            lines += _some(f"missing  {p}: expected {wanted[p]}" for p in wanted if p not in stored)
            lines += _some(f"extra    {p}: checkpoint has {stored[p]}" for p in stored if p not in wanted)
            lines += _some(
                f"differs  {p}: checkpoint has {stored[p]}, expected {wanted[p]}"
                for p in wanted
                if p in stored and stored[p] != wanted[p]
            )
        if lines:
            lines.insert(0, f"checkpoint {step} in {self.directory} is of another model or optimizer:")
            raise ValueError("\n  ".join(lines))


def _complete(folder: Path) -> bool:
    """Whether a step folder was committed: its last file is there and says when."""
    try:
        return json.loads((folder / _COMMITTED).read_text()).get("commit_timestamp_nsecs") is not None
    except (OSError, ValueError):
        return False


def _nested(tree: Any) -> Tree:
    """Any tree as nested dicts with string keys: fields by name, sequences by index; empty branches vanish."""
    nested: Tree = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        *parents, last = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        branch = nested
        for key in parents:
            branch = branch.setdefault(key, {})
        branch[last] = leaf
    return nested


def _unnested(nested: Tree, like: Any) -> Any:
    """The leaves of `nested` in the tree `like`."""
    flat = dict(leaves(nested))
    return jax.tree_util.tree_map_with_path(
        lambda path, _: flat[jax.tree_util.keystr(path, simple=True, separator="/")], like
    )


def _some(lines: Any) -> list[str]:
    lines = list(lines)
    rest = [f"... and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return lines[:_SHOWN] + rest


def _cause(error: BaseException) -> str:
    text = " ".join(str(error).split())
    for known in ("No space left on device", "File too large", "Disk quota exceeded", "Permission denied"):
        if known in text:
            return known
    return f"{type(error).__name__}: {text[:300]}"


def _not_from_orbax(record: logging.LogRecord) -> bool:
    """What orbax logs is either routine or raised as well; a run prints it once, in its own words."""
    return f"{os.sep}orbax{os.sep}" not in record.pathname
