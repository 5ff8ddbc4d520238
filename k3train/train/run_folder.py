"""The folder of a run: who may write it, what it is the folder of, where everything lies.

config.json      the resolved configuration (data, not code)
metrics.jsonl    one object per logged step
tensorboard/     the same numbers for TensorBoard
checkpoints/     one folder per saved step
log.txt          everything the run said, with the time
release/         of an imported run: the form of what was imported (checkpoint/release.py)
.lock            there while a process writes the folder
"""

import errno
import fcntl
import json
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3train.checkpoint.orbax import Checkpoints
from k3train.config.load import read_run, to_json
from k3train.config.schema import Config
from k3train.config.values import flat_values
from k3train.parallel import hosts

_LOG = logging.getLogger(__name__)

#: Knobs, or sections, that may change while a run goes on: none of them says what is learnt from what.
MAY_CHANGE = (
    "mesh.", "checkpoint.", "eval.", "log.", "num_steps", "model.remat", "data.path", "data.micro_batches",
    "data.eval_batches", "optim.max_consecutive_nonfinite",
)  # fmt: skip
#: Filesystems that know no locks; the run goes on without.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)


@dataclass(frozen=True)
class RunFolder:
    """Paths inside a run's folder."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def log(self) -> Path:
        return self.path / "log.txt"

    def read_config(self) -> Config:
        """The configuration of the run.

        Raises:
            ValueError: this is not a run's folder, or its config.json is damaged.
        """
        return read_run(self.path)

    def changes(self, config: Config) -> list[str]:
        """How `config` differs from the configuration of the run that the folder holds, one line a knob.

        A folder without a complete checkpoint holds no run yet.

        Raises:
            ValueError: it differs in what makes a run that run; lists those knobs.
        """
        latest = Checkpoints(self.checkpoints).latest()
        if latest is None or not self.config.exists():
            return []
        before, now = flat_values(self.read_config()), flat_values(config)
        changed = [knob for knob in now if before[knob] != now[knob]]
        refused = [knob for knob in changed if not knob.startswith(MAY_CHANGE)]
        if refused:
            lines = "".join(f"\n  {knob} was {before[knob]!r}, is {now[knob]!r}" for knob in refused)
            raise ValueError(
                f"workdir {self.path} holds a run with another configuration:{lines}\n"
                f"Choose another --workdir; --config.init_from={self.path} starts from this run's weights."
            )
        if config.num_steps < before["num_steps"]:
            raise ValueError(
                f"num_steps={config.num_steps}: the run in {self.path} was set to {before['num_steps']} steps and has "
                f"reached {latest}; it can be extended, not shortened (--config.num_steps={before['num_steps']})"
            )
        return [f"{knob}: {before[knob]!r} -> {now[knob]!r}" for knob in changed]

    def start(self, config: Config, step: int) -> None:
        """Write what makes the folder a run's folder; metrics continue after `step`.

        Lines of steps that a killed run had logged after its last checkpoint go: they come again.
        """
        _replace(self.config, to_json(config))
        if self.metrics.exists():
            lines = self.metrics.read_text(encoding="utf-8").splitlines()
            _replace(self.metrics, "".join(f"{line}\n" for line in lines if _logged_step(line) <= step))

    def read_metrics(self) -> list[dict[str, Any]]:
        """The logged steps; empty without a log."""
        if not self.metrics.exists():
            return []
        return [json.loads(line) for line in self.metrics.read_text(encoding="utf-8").splitlines()]


@contextmanager
def open_run_folder(workdir: str | os.PathLike[str]) -> Iterator[RunFolder]:
    """The folder, made if need be, and locked against other runs; in a run of several processes the first does that.

    If nothing but the lock was written by the end, folders made here are removed again. The lock is the kernel's: it
    goes with the process, however that ends.

    Raises:
        ValueError: the path cannot be written, is no folder, or a running process holds it.
    """
    with ExitStack() as stack:
        hosts.first_alone(lambda: stack.enter_context(_locked(Path(workdir))))
        yield RunFolder(Path(workdir))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    made = _make(path)
    lock = path / ".lock"
    try:
        descriptor = _lock(lock)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)
            os.close(descriptor)
    finally:
        for folder in reversed(made):
            if not any(folder.iterdir()):
                folder.rmdir()


def _make(path: Path) -> list[Path]:
    """Make the folder; the list of those that were not there, outermost first."""
    missing = [folder for folder in (*reversed(path.parents), path) if not folder.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"workdir {path}: a file is in the way; give a folder") from None
    except OSError as error:
        raise _unwritable(path, error) from None
    return missing


def _lock(lock: Path) -> int:
    """Descriptor of the locked file, which names our process."""
    while True:
        try:
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise _unwritable(lock.parent, error) from None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(descriptor, 64).decode(errors="replace").strip()
            if error.errno not in _NO_LOCKS:
                os.close(descriptor)
                raise ValueError(
                    f"workdir {lock.parent} is in use by process {holder or 'unknown'}; "
                    "wait for it to end, or give another --workdir"
                ) from None
            _LOG.warning("%s: this filesystem has no locks; make sure that no other process writes here", lock.parent)
        # whoever held it may have removed the file between our open and our lock
        if lock.exists() and os.path.samestat(os.fstat(descriptor), lock.stat()):
            os.truncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
            return descriptor
        os.close(descriptor)


def _unwritable(path: Path, error: OSError) -> ValueError:
    return ValueError(f"workdir {path} cannot be written: {error.strerror}; give another --workdir")


def _replace(file: Path, text: str) -> None:
    """Write a file whole or not at all."""
    fresh = file.with_name(file.name + ".new")
    with fresh.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    fresh.replace(file)


def _logged_step(line: str) -> float:
    """Step of a line of metrics; infinity for a line cut short."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")
