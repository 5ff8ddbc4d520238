"""The run that another one starts from: found and compared before anything is compiled, read afterwards."""

from pathlib import Path
from typing import Any, NamedTuple

from k3train.checkpoint.orbax import Checkpoints
from k3train.config.check import ConfigError
from k3train.config.load import find as find_config
from k3train.config.schema import Config
from k3train.config.values import flat_values
from k3train.core.tree import Tree
from k3train.train.run_folder import RunFolder

#: Knobs of the model that may differ between the runs: none says what the weights are or what is computed with them.
MAY_DIFFER = (
    "model.remat", "model.compute_dtype", "model.init_std", "model.embedding_init_std", "model.init_fan_in",
    "model.kda_chunk_size", "model.kda_a_log_length",
)  # fmt: skip


class Origin(NamedTuple):
    """A run to start from.

    Attributes:
        step: its newest checkpoint.
        has_optimizer: that holds an optimizer's state; an imported one does not.
        notes: what a person should know of it, one line each.
    """

    folder: RunFolder
    step: int
    has_optimizer: bool
    notes: list[str]


def find(config: Config) -> Origin | None:
    """The run of `config.init_from`; None: the configuration names none.

    Raises:
        ValueError: no such run, none with a complete checkpoint, or one of another architecture (names the knobs).
    """
    if not config.init_from:
        return None
    folder = RunFolder(Path(config.init_from))
    try:
        before = folder.read_config()
        with Checkpoints(folder.checkpoints) as checkpoints:
            step = checkpoints.resolve(None)
            has_optimizer = bool(checkpoints.leaves(step, "optimizer"))
    except ValueError as error:
        raise ValueError(f"init_from={config.init_from}: {error}{_made_by(folder.path)}") from error
    old, new = flat_values(before), flat_values(config)
    changed = {knob: f"{knob} was {old[knob]!r}, is {new[knob]!r}" for knob in new if old[knob] != new[knob]}
    other = [text for knob, text in changed.items() if knob.startswith("model.") and knob not in MAY_DIFFER]
    if other:
        lines = "".join(f"\n  {text}" for text in other)
        raise ValueError(f"init_from={config.init_from} holds another model:{lines}")
    seen = ("data.tokenizer", "data.seq_len", "quant.experts", *MAY_DIFFER)
    notes = [text for knob, text in changed.items() if knob in seen]
    if step < before.num_steps:
        notes.append(f"it has not reached its {before.num_steps} steps")
    return Origin(folder, step, has_optimizer, notes)


def read(origin: Origin, abstract: dict[str, Any], *, moments: bool) -> dict[str, Tree]:
    """The parts of its checkpoint: the model, and if asked for and there, the optimizer.

    Args:
        abstract: shapes and shardings of all parts.

    Raises:
        ValueError: the checkpoint is not of this model or optimizer (names the leaves).
    """
    parts = {name: abstract[name] for name in ("model", *(["optimizer"] if moments and origin.has_optimizer else []))}
    with Checkpoints(origin.folder.checkpoints) as checkpoints:
        return checkpoints.restore(origin.step, parts)


def _made_by(path: Path) -> str:
    """The command that makes a run in its default folder, if there is a configuration of that name."""
    if path.parent.name != "runs":
        return ""
    try:
        file = find_config(path.name)
    except ConfigError:
        return ""
    shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    return f"\nThis makes it: k3train train --config {shown} --workdir {path}"
