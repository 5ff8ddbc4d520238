"""Metrics: their names, units and reductions, and where they go.

A step's numbers stay on the device until the next step has been started; only then are they read. The host never makes
the device wait, except where a run evaluates or saves.
"""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import jax
import numpy as np
from tensorboardX import SummaryWriter


class Metric(NamedTuple):
    """What a number means."""

    unit: str
    reduction: str  # over tokens, layers, devices or steps
    meaning: str


METRICS: dict[str, Metric] = {
    "step": Metric("optimizer steps", "-", "batches consumed, skipped steps included"),
    "loss": Metric("nats per token", "mean over the step's trained tokens, all micro-batches and devices", "loss"),
    "grad_norm": Metric("-", "L2 norm over all parameters", "gradient before clipping"),
    "learning_rate": Metric("-", "-", "of this step's update"),
    "tokens_per_second": Metric("tokens / s", "mean since the logged step before", "wall clock; training only"),
    "tokens_seen": Metric("tokens", "sum since the start of the run", "trained tokens"),
    "router/max_over_mean_load": Metric("-", "largest of all layers", "tokens of the fullest expert over the mean"),
    "router/min_over_mean_load": Metric("-", "smallest of all layers", "tokens of the emptiest expert over the mean"),
    "router/max_violation": Metric("-", "largest of all layers", "(largest load - mean load) / mean load"),
    "router/dropped_fraction": Metric("-", "over all layers", "assignments that reached no expert; 0 by design"),
    "mla/max_logit": Metric("-", "largest of all layers, heads and micro-batches", "attention logit before softmax"),
    "qk_clip/num_clipped": Metric("heads", "sum over layers", "heads whose weights QK-clip scaled in this step"),
    "nonfinite_steps": Metric("optimizer steps", "sum since the start of the run", "skipped steps"),
    "eval/loss": Metric("nats per token", "mean over the held-out tokens", "held-out loss"),
    "eval/tokens": Metric("tokens", "sum", "held-out tokens behind eval/loss"),
}  # fmt: skip

#: Depend on the machine and its load; everything else repeats exactly on the same machine.
WALL_CLOCK = ("tokens_per_second",)
#: What the step counts for the host, not logged as such.
INTERNAL = ("tokens", "nonfinite_streak", "stop")
#: int32 [MoE layers in order, experts], read when a step is logged: drawn as histograms, one a layer.
LOADS = "expert_loads"


class Writer:
    """Appends records to `metrics.jsonl` and TensorBoard.

    Args:
        file: metrics.jsonl; continued.
        tensorboard: folder of event files; None: none.
        step: last step already there; what TensorBoard holds beyond it is superseded.
    """

    def __init__(self, file: Path, tensorboard: Path | None, step: int):
        self._file: TextIO = file.open("a", encoding="utf-8")
        self._events = None
        if tensorboard is not None:
            self._events = SummaryWriter(str(tensorboard), purge_step=step + 1 if step else None)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._events is not None:
            self._events.close()

    def write(self, record: Mapping[str, float], loads: Mapping[int, np.ndarray] | None = None) -> None:
        """One logged step; names from `METRICS`. What is not finite becomes null.

        Args:
            loads: tokens of every expert in this step, by layer; TensorBoard shows how they spread around their mean.
        """
        unknown = record.keys() - METRICS.keys()
        assert not unknown, f"metrics without a line in the table: {sorted(unknown)}"
        ordered = {name: record[name] for name in METRICS if name in record}
        self._file.write(json.dumps({k: v if math.isfinite(v) else None for k, v in ordered.items()}) + "\n")
        self._file.flush()
        if self._events is not None:
            for name, value in ordered.items():
                if name != "step":
                    self._events.add_scalar(name, value, int(record["step"]))
            for layer, load in (loads or {}).items():
                spread = load / max(load.mean(), 1e-9)
                edges: Any = np.linspace(0, max(2.0, spread.max()), 41)
                name = f"router/load_over_mean/layer_{layer:02}"
                self._events.add_histogram(name, spread, int(record["step"]), edges)

    def sync(self) -> None:
        """Bring what was written to the disk; called before a checkpoint that relies on it."""
        os.fsync(self._file.fileno())


class Clock:
    """Tokens per second and time left, over the steps of this process; the first, which compiles, does not count."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._seconds = self._interval = 0.0
        self._steps = self._tokens = 0

    @property
    def started(self) -> bool:
        """Whether a step is over."""
        return self._last is not None

    def resume(self) -> None:
        """The time from here on counts again (after an evaluation, say)."""
        if self._last is not None:
            self._last = time.perf_counter()

    def arrived(self, tokens: int) -> None:
        """A step is over."""
        now = time.perf_counter()
        if self._last is not None:
            self._seconds += now - self._last
            self._interval += now - self._last
            self._steps += 1
            self._tokens += tokens
        self._last = now

    def rate(self) -> float | None:
        """Tokens per second since the last call; None if no step counted."""
        rate = self._tokens / self._interval if self._interval else None
        self._interval, self._tokens = 0.0, 0
        return rate

    def left(self, steps: int) -> float | None:
        """Seconds that many more steps will take."""
        return steps * self._seconds / self._steps if self._steps else None


def read(metrics: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Device scalars as Python numbers; waits for the step they come from."""
    return {name: value.item() for name, value in jax.device_get(dict(metrics)).items()}


def progress(record: Mapping[str, float], num_steps: int, seconds_left: float | None) -> str:
    """The line of a logged step."""
    width = len(str(num_steps))
    parts = [f"step {record['step']:>{width}}/{num_steps}", f"loss {record['loss']:.4f}"]
    if "eval/loss" in record:
        parts.append(f"held-out {record['eval/loss']:.4f}")
    parts.append(f"lr {record['learning_rate']:.2e}")
    if "router/max_over_mean_load" in record:
        parts.append(f"load {record['router/max_over_mean_load']:.2f}")
    if "tokens_per_second" in record:
        parts.append(f"{record['tokens_per_second']:,.0f} tokens/s")
    if seconds_left is not None and record["step"] < num_steps:
        parts.append(f"ETA {duration(seconds_left)}")
    return "  ".join(parts)


def collapsed_routing(record: Mapping[str, float], num_experts: int, num_selected: int) -> str:
    """What to say when nearly all tokens choose the same expert; empty otherwise, and when the step was not finite."""
    share = record.get("router/max_over_mean_load", 0.0) * num_selected / num_experts
    if share <= 0.9 or num_selected == num_experts or not math.isfinite(record["loss"]):
        return ""
    return f"one expert is chosen by {100 * share:.0f} % of the tokens, {num_selected} of {num_experts} experts a token"


def duration(seconds: float) -> str:
    """`7s`, `3m05s`, `2h07m`, `3d04h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
