"""Held-out loss: every row once, averaged by token; nothing of the run changes."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Protocol, TypeVar

import jax

from k3train.checkpoint.orbax import Checkpoints
from k3train.core.tree import Tree
from k3train.data.loader import Batch, make_eval_loader
from k3train.parallel import hosts
from k3train.parallel.mesh import make_mesh
from k3train.train.run_folder import RunFolder
from k3train.train.step import Program

T = TypeVar("T")


class Evaluates(Protocol):
    """The part of a program that evaluation needs."""

    def eval_step(self, params: Tree, bias: Tree, batch: dict[str, jax.Array]) -> dict[str, jax.Array]: ...

    def put_batch(self, batch: Batch) -> dict[str, jax.Array]: ...


def evaluate(program: Evaluates, params: Tree, bias: Tree, batches: Iterable[Batch]) -> dict[str, float]:
    """Mean loss in nats over all tokens that carry loss (`eval/loss`) and their number (`eval/tokens`).

    Rows of padding that fill the last batch carry none.

    Raises:
        ValueError: no held-out token carries loss.
    """
    loss = tokens = 0.0
    for sums in _one_behind(program.eval_step(params, bias, program.put_batch(batch)) for batch in batches):
        loss, tokens = loss + float(sums["loss_sum"]), tokens + float(sums["tokens"])
    if not tokens:
        raise ValueError("the held-out rows hold no token that carries loss; raise data.eval_fraction")
    return {"eval/loss": loss / tokens, "eval/tokens": int(tokens)}


def _one_behind(started: Iterator[T]) -> Iterator[T]:
    """The same elements, each after the next has been started: the device never waits for the host."""
    waiting = next(started, None)
    for element in started:
        assert waiting is not None
        yield waiting
        waiting = element
    if waiting is not None:
        yield waiting


def evaluate_run(workdir: str | os.PathLike[str], step: int | None = None) -> dict[str, float]:
    """Loss of a run's checkpoint over all its held-out rows, whatever `data.eval_batches` says.

    Args:
        workdir: folder of the run; the devices at hand must fit its mesh.
        step: which checkpoint; None: the newest.

    Raises:
        ValueError: no such run or checkpoint, or nothing is held out.
    """
    folder = RunFolder(Path(workdir))
    config = folder.read_config()
    with Checkpoints(folder.checkpoints) as checkpoints:
        step = checkpoints.resolve(step)
        program = Program(config, make_mesh(asdict(config.mesh)))
        abstract = program.abstract_state
        wanted = {"params": abstract.params, "bias": abstract.bias}
        model = checkpoints.restore(step, {"model": wanted})["model"]
    share = hosts.batch_share(program.mesh, config.data.batch_size)
    loader = make_eval_loader(replace(config.data, eval_batches=0), *share)
    return {"step": step, **evaluate(program, model["params"], model["bias"], loader)}
