"""The host side of a run, without maths: batches in, steps, metrics, evaluations, checkpoints, and a clean end."""

import json
import logging
import os
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from k3train.checkpoint.orbax import Checkpoints, SaveError
from k3train.config.check import mesh_text
from k3train.config.load import from_json, to_json
from k3train.config.schema import Config
from k3train.config.values import flat_values
from k3train.core import log
from k3train.data import loader as data
from k3train.data.loader import Corpora, EvalLoader, TrainLoader
from k3train.optim.build import restarted
from k3train.parallel import hosts
from k3train.parallel.mesh import make_mesh
from k3train.train import metrics, phases
from k3train.train import origin as origins
from k3train.train.evaluate import evaluate
from k3train.train.run_folder import RunFolder, open_run_folder
from k3train.train.state import TrainState
from k3train.train.step import Program
from k3train.train.stop import Stop

_LOG = logging.getLogger(__name__)

DONE, NONFINITE, UNFINISHED = 0, 3, 4  # exit codes


class _NonFinite(Exception):
    """Too many steps in a row were not finite."""


def train(
    config: Config,
    workdir: str | os.PathLike[str],
    sources: Mapping[str, str] | None = None,
    *,
    header: str = "",
    sample: Callable[[TrainState], str] | None = None,
) -> int:
    """Train, or go on training, the run in `workdir`.

    Args:
        config: the whole run.
        workdir: folder of the run, made if need be; if it holds a checkpoint, the run continues there.
        sources: where each knob's value comes from, to print those of the command line.
        header: printed after the mesh, such as a table of parameters.
        sample: generates a text to print at the end.

    Returns:
        Exit code: 0 all steps done; 3 too many non-finite steps in a row; 4 asked-for steps not reached.

    Raises:
        ValueError: the configuration, the data or the folder cannot be used; nothing was written.
    """
    began = time.perf_counter()
    _check_same_everywhere(config)
    phases.check(config)
    with (
        Stop() as stop,
        open_run_folder(workdir) as folder,
        Checkpoints(folder.checkpoints, keep=config.checkpoint.keep) as checkpoints,
    ):
        changes = folder.changes(config)
        if (latest := checkpoints.latest()) is not None and latest >= config.num_steps:
            _say_complete(folder, latest)
            return DONE
        origin = origins.find(config) if latest is None else None
        mesh = make_mesh(asdict(config.mesh))
        program = Program(config, mesh)
        corpora = data.read_corpora(config.data)
        _check_vocabulary(config, corpora)
        share = hosts.batch_share(mesh, config.data.batch_size)
        loaders = _loader(config, corpora, share), _heldout(config, corpora, share)
        run = _Run(config, folder, checkpoints, program, stop, *loaders, began)
        state = run.restore() if latest is not None else _initial(program, config, origin)
        hosts.first_alone(lambda: folder.start(config, run.step))
        with log.to_file(folder.log) if run.first else nullcontext():
            devices = _devices(mesh)
            _say(f"mesh: {mesh_text(config.mesh)} ({devices})", header)
            _say(*([program.sharing.described()] if config.mesh.expert > 1 else ()))
            _say(*_command_line(config, sources or {}))
            _say(*(_continued(run, changes) if latest is not None else phases.described(config, origin)))
            run.baselines = _say_data(config, corpora)
            if not run.first:
                return run.go(state, None)
            tensorboard = folder.tensorboard if config.log.tensorboard else None
            with metrics.Writer(folder.metrics, tensorboard, run.step) as run.writer:
                return run.go(state, sample if jax.process_count() == 1 else None)


@dataclass
class _Run:
    """A run under way: its parts, and the host's counters."""

    config: Config
    folder: RunFolder
    checkpoints: Checkpoints
    program: Program
    stop: Stop
    loader: TrainLoader
    heldout: EvalLoader | None
    began: float  # by the clock of `time.perf_counter`
    step: int = 0
    tokens: int = 0  # trained tokens of all steps whose metrics have been read
    baselines: dict[str, float] = field(default_factory=dict)
    writer: metrics.Writer | None = None  # of the first process
    clock: metrics.Clock = field(default_factory=metrics.Clock)
    last: dict[str, Any] = field(default_factory=dict)  # the newest record
    first: bool = field(default_factory=lambda: jax.process_index() == 0)  # of several processes the one that writes
    stopped: bool = False  # some process was asked to stop

    def restore(self) -> TrainState:
        """State, counters and data position of the newest checkpoint."""
        step = self.checkpoints.resolve(None)
        if not self.checkpoints.leaves(step, "optimizer"):
            raise ValueError(
                f"{self.folder.path} holds weights without an optimizer (imported); give another --workdir and start "
                f"from them with --config.init_from={self.folder.path}"
            )
        record = self.checkpoints.record(step)
        self.loader.set_state(record["data"])
        self.step, self.tokens = step, record["tokens_seen"]
        return _joined(self.checkpoints.restore(step, _parts(self.program.abstract_state)))

    def go(self, state: TrainState, sample: Callable[[TrainState], str] | None) -> int:
        """All steps that are left; the exit code."""
        try:
            code = self._go(state, sample)
            self.checkpoints.wait()
            return code
        except SaveError as error:
            _LOG.error("%s. Run the same command again once this is put right.", error)
            return UNFINISHED

    def _go(self, state: TrainState, sample: Callable[[TrainState], str] | None) -> int:
        try:
            state, reason = self._steps(state)
        except _NonFinite as error:
            self.checkpoints.wait()
            _LOG.error("%s. Newest checkpoint: step %s.", error, self.checkpoints.latest())
            return NONFINITE
        self.checkpoints.wait()
        if reason:
            _LOG.warning("%s after step %d of %d", reason, self.step, self.config.num_steps)
            if self.checkpoints.latest() is not None:
                _say(f"saved in {self.folder.checkpoints}; the same command again continues from there")
            return UNFINISHED
        self.stop.close()  # there is nothing left to save
        self._say_done()
        if sample is not None:
            _say(f"sample:\n{sample(state)}")
        _say_places(self.folder, self.step, tensorboard=self.config.log.tensorboard)
        return DONE

    def _steps(self, state: TrainState) -> tuple[TrainState, str]:
        """(state, why it ended before `num_steps`, or "")."""
        waiting: dict[str, jax.Array] | None = None  # metrics of the step before, still on the device
        saved = self.step
        reason = ""
        _say("compiling the training step ...")
        while self.step < self.config.num_steps:
            if self._asked_to_stop():
                reason = f"stopped by {self.stop.signal or 'another process'}"
                break
            batch = next(self.loader, None)
            if batch is None:
                reason = "the data ended"
                break
            if jax.process_count() > 1:
                batch["stop"] = np.full((len(batch["tokens"]), 1), bool(self.stop.signal), np.int32)
            state, started = self.program.train_step(state, self.program.put_batch(batch))
            if waiting is not None:
                self._arrived(self.step, waiting, state)
            self.step += 1
            waiting = started
            if self._evaluates(self.step) or self._saves(self.step):
                self._arrived(self.step, waiting, state)
                waiting = None
            if self._saves(self.step):
                self._save(state)
                saved = self.step
                self.clock.resume()
        if waiting is not None:
            self._arrived(self.step, waiting, state)
        if self.step > saved:
            self._save(state)
        return state, reason

    def _asked_to_stop(self) -> bool:
        """Processes stop together, so with several of them only what all have read from a step's metrics counts."""
        return self.stopped if jax.process_count() > 1 else bool(self.stop.signal)

    def _evaluates(self, step: int) -> bool:
        every = self.config.eval.every
        return self.heldout is not None and (step == self.config.num_steps or (every > 0 and step % every == 0))

    def _saves(self, step: int) -> bool:
        return step == self.config.num_steps or step % self.config.checkpoint.every == 0

    def _logs(self, step: int) -> bool:
        return step in (1, self.config.num_steps) or step % self.config.log.every == 0 or self._evaluates(step)

    def _arrived(self, step: int, values: dict[str, jax.Array], state: TrainState) -> None:
        """Read the metrics of `step`, and log them if it is their turn; `state` is the one after it if it evaluates."""
        loads = values.get(metrics.LOADS)
        numbers = metrics.read({name: value for name, value in values.items() if name != metrics.LOADS})
        self.tokens += int(numbers["tokens"])
        self.stopped |= bool(numbers.get("stop", 0))
        if not self.clock.started:
            _say(f"first step after {metrics.duration(time.perf_counter() - self.began)}")
        self.clock.arrived(int(numbers["tokens"]))
        self._check_finite(step, numbers)
        if not self._logs(step):
            return
        record = {name: number for name, number in numbers.items() if name not in metrics.INTERNAL}
        record |= {"step": step, "tokens_seen": self.tokens}
        if (rate := self.clock.rate()) is not None:
            record["tokens_per_second"] = rate
        if self._evaluates(step):
            assert self.heldout is not None
            record |= evaluate(self.program, state.params, state.bias, self.heldout)
            self.clock.resume()
        self.last = record
        if self.writer is not None:
            self.writer.write(record, self._by_layer(loads))
        model = self.config.model
        if collapsed := metrics.collapsed_routing(record, model.num_experts, model.num_experts_per_token):
            _LOG.warning("step %d: %s (optim.balance=%s)", step, collapsed, self.config.optim.balance)
        num_steps = self.config.num_steps
        _say(metrics.progress(record, num_steps, self.clock.left(num_steps - step)))
        self.checkpoints.check()

    def _by_layer(self, loads: jax.Array | None) -> dict[int, np.ndarray]:
        """Tokens of every expert, by MoE layer."""
        return {} if loads is None else dict(zip(sorted(self.config.model.moe_layers), np.asarray(loads), strict=True))

    def _check_finite(self, step: int, numbers: Mapping[str, Any]) -> None:
        streak, limit = numbers["nonfinite_streak"], self.config.optim.max_consecutive_nonfinite
        if streak:
            seen = f"step {step}: loss {numbers['loss']}, gradient norm {numbers['grad_norm']}"
            _LOG.warning("%s: skipped, nothing was updated (%d in a row)", seen, streak)
        if streak >= limit:
            raise _NonFinite(
                f"stopped at step {step}: {streak} steps in a row were not finite "
                f"(optim.max_consecutive_nonfinite={limit}); a lower optim.peak_lr may help"
            )

    def _save(self, state: TrainState) -> None:
        if self.writer is not None:
            self.writer.sync()
        config = json.loads(to_json(self.config))
        record = {"data": self.loader.get_state(), "tokens_seen": self.tokens, "config": config}
        self.checkpoints.save(self.step, _parts(state), record)

    def _say_done(self) -> None:
        took = metrics.duration(time.perf_counter() - self.began)
        _say(f"done: {self.step} steps, {self.tokens:,} tokens, in {took} since this start")
        if "eval/loss" in self.last:
            counted = ", ".join(f"{name} {value:.3f}" for name, value in self.baselines.items())
            counted = f" (counting alone: {counted})" if counted else ""
            _say(f"held-out loss {self.last['eval/loss']:.3f} nats per token{counted}")


def _initial(program: Program, config: Config, origin: origins.Origin | None) -> TrainState:
    """Fresh state, with what the phase carries over from another run."""
    fresh = program.init()
    if origin is None:
        return fresh
    carried = origins.read(origin, _parts(program.abstract_state), moments=phases.PHASES[config.phase].moments)
    moments = {"opt_state": restarted(carried["optimizer"]["opt_state"])} if "optimizer" in carried else {}
    return fresh._replace(**carried["model"], **moments)


def _parts(state: TrainState) -> dict[str, Any]:
    """The state as the parts of a checkpoint: what evaluation needs, and the rest."""
    rest = {name: value for name, value in state._asdict().items() if name not in ("params", "bias")}
    return {"model": {"params": state.params, "bias": state.bias}, "optimizer": rest}


def _joined(parts: dict[str, Any]) -> TrainState:
    return TrainState(**parts["model"], **parts["optimizer"])


def _check_same_everywhere(config: Config) -> None:
    """Every process of a run must have the same configuration."""
    values = [flat_values(from_json(text, "config")) for text in hosts.texts(to_json(config))]
    lines = [
        f"\n  {knob}: " + ", ".join(f"{each[knob]!r} on process {i}" for i, each in enumerate(values))
        for knob in values[0]
        if any(each[knob] != values[0][knob] for each in values)
    ]
    if lines:
        raise ValueError(f"the processes of this run have different configurations:{''.join(lines)}")


def _devices(mesh: Mesh) -> str:
    text = f"{mesh.size} {mesh.devices.flat[0].platform} device{'s' if mesh.size > 1 else ''}"
    return text if jax.process_count() == 1 else f"{text} of {jax.process_count()} processes"


def _loader(config: Config, corpora: Corpora, share: tuple[int, int]) -> TrainLoader:
    return data.make_train_loader(config.data, config.seed, *share, corpora=corpora)


def _heldout(config: Config, corpora: Corpora, share: tuple[int, int]) -> EvalLoader | None:
    if corpora.heldout is None:
        return None
    return data.make_eval_loader(config.data, *share, corpora=corpora)


def _check_vocabulary(config: Config, corpora: Corpora) -> None:
    needed, rows = corpora.tokenizer.vocab_size, config.model.vocab_size
    if needed > rows:
        raise ValueError(
            f"model.vocab_size={rows}: data.tokenizer={config.data.tokenizer} has {needed} ids; "
            f"set --config.model.vocab_size to {needed} or more"
        )


# ---- what a run says


def _say(*lines: str) -> None:
    for line in lines:
        if line:
            _LOG.info("%s", line)


def _command_line(config: Config, sources: Mapping[str, str]) -> list[str]:
    values = flat_values(config)
    given = [f"{knob}={values[knob]}" for knob, source in sources.items() if source == "command line"]
    return [f"set on the command line: {', '.join(given)}"] if given else []


def _continued(run: _Run, changes: list[str]) -> list[str]:
    lines = [f"continues at step {run.step} of {run.config.num_steps} with all that {run.folder.checkpoints} holds"]
    lines += [f"  changed since: {change}" for change in changes]
    lines += phases.quantisation(run.config)
    if cut := run.checkpoints.incomplete():
        lines.append(f"  passed over, cut short while being saved: {', '.join(cut)}")
    return lines


def _say_data(config: Config, corpora: Corpora) -> dict[str, float]:
    """Say where the data comes from; the losses that counting alone would reach."""
    where = f"{config.data.source} {config.data.path}".strip()
    parts = [("training", corpora.train), ("held out", corpora.heldout)]
    sizes = [f"{name} {len(c):,} documents, {len(c.tokens):,} tokens" for name, c in parts if c is not None]
    _say(f"data: {where}, tokenizer {config.data.tokenizer}: {'; '.join(sizes)}", *(f"  {n}" for n in corpora.notes))
    if corpora.heldout is None:
        _say("  nothing is held out (data.eval_fraction=0): no evaluation")
    counted = data.baselines(corpora.train, corpora.tokenizer.vocab_size)
    if counted:
        shown = ", ".join(f"{name} {value:.3f}" for name, value in counted.items())
        _say(f"baselines from counts of the training tokens, nats per token: {shown}")
    return counted


def _say_complete(folder: RunFolder, step: int) -> None:
    held_out = [r["eval/loss"] for r in folder.read_metrics() if r.get("eval/loss") is not None]
    loss = f", held-out loss {held_out[-1]:.3f} nats per token" if held_out else ""
    _say(f"this run is complete: {step} steps{loss}")
    _say_places(folder, step, tensorboard=folder.tensorboard.exists())
    _say(f"continue it further: the same command with --config.num_steps={2 * step}")


def _say_places(folder: RunFolder, step: int, *, tensorboard: bool) -> None:
    _say(f"checkpoint   {folder.checkpoints / str(step)}")
    _say(f"metrics      {folder.metrics}")
    if tensorboard:
        _say(f"TensorBoard  tensorboard --logdir {folder.tensorboard}")
    _say(f"config       {folder.config}")
    example = '--chat --prompt "What is a list?"' if folder.read_config().data.is_chat else '--prompt "def "'
    _say(f"next         k3train generate --workdir {folder.path} {example}")
