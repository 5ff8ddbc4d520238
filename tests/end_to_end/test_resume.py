"""A run that was stopped, or killed, and continued is the run that was left alone, bit for bit."""

import functools
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace

import jax
import numpy as np
import pytest

from k3train.checkpoint.orbax import Checkpoints
from k3train.config.schema import CheckpointConfig, Config, DataConfig, EvalConfig, LogConfig
from k3train.train import evaluate, loop, metrics
from k3train.train.evaluate import evaluate_run
from k3train.train.loop import train
from k3train.train.run_folder import RunFolder
from k3train.train.step import Program
from tests.train import micro

STEPS = 8
MODEL = replace(micro.TWO_LAYERS, vocab_size=264, pad_token_id=257)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    words = "the quick brown fox jumps over a lazy dog while seven wizards box".split()
    draw = random.Random(0)
    for i in range(30):
        (folder / f"{i}.txt").write_text(" ".join(draw.choices(words, k=40 + i)))
    return folder


def configuration(texts, micro_batches: int = 1) -> Config:
    """Every mechanism on a mesh of eight devices; saves, evaluations and log lines fall on different steps."""
    config = micro.config(mesh={"data": 4, "expert": 2}, micro_batches=micro_batches)
    data = DataConfig(
        source="text", path=str(texts), seq_len=32, batch_size=16, micro_batches=micro_batches, eval_fraction=0.2,
        eval_batches=0,
    )  # fmt: skip
    return replace(
        config,
        model=MODEL,
        data=data,
        checkpoint=CheckpointConfig(every=5, keep=2),
        eval=EvalConfig(every=4),
        log=LogConfig(every=3, tensorboard=False),
        num_steps=STEPS,
    )


@functools.cache
def compiled(model, mesh, micro_batches, num_steps):
    """One program for all starts in this process that compile to the same."""
    config = micro.config(mesh=asdict(mesh), micro_batches=micro_batches)
    return Program(replace(config, model=model, num_steps=num_steps), loop.make_mesh(asdict(mesh)))


def program_of(config, mesh=None):
    return compiled(config.model, config.mesh, config.data.micro_batches, config.num_steps)


class Watched:
    """A program that notes which batches it was given, in order; asks the process to stop during one of them."""

    def __init__(self, program, stop_at, batches):
        self._program, self._stop_at, self._batches = program, stop_at, batches

    def __getattr__(self, name):
        return getattr(self._program, name)

    def train_step(self, state, batch):
        rows = b"".join(np.asarray(batch[name]).tobytes() for name in sorted(batch))
        self._batches.append(hashlib.sha256(rows).hexdigest())
        if len(self._batches) == self._stop_at:
            signal.raise_signal(signal.SIGTERM)
        return self._program.train_step(state, batch)


def run(config, folder, stop_at=0, restore=loop._Run.restore):
    """(exit code, hashes of the batches) of one start."""
    batches = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "Program", lambda config, mesh: Watched(program_of(config), stop_at, batches))
        patch.setattr(loop._Run, "restore", restore)
        return train(config, folder), batches


def logged(folder):
    """Metrics without what depends on the clock, as text: equal text is equal to the last bit."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert lines
    records = RunFolder(folder).read_metrics()
    return [repr({k: v for k, v in record.items() if k not in metrics.WALL_CLOCK}) for record in records]


def saved(config, folder):
    """(every array of the newest checkpoint by name, its record)."""
    abstract = program_of(config).abstract_state
    with Checkpoints(folder / "checkpoints") as checkpoints:
        step = checkpoints.resolve(None)
        parts = checkpoints.restore(step, loop._parts(abstract))
        arrays = {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(parts)}
        return arrays, checkpoints.record(step)


def differing(a, b):
    """Names of arrays that are not equal bit for bit."""
    assert a.keys() == b.keys()
    return [name for name in a if a[name].tobytes() != b[name].tobytes()]


@pytest.fixture(scope="module")
def undisturbed(texts, tmp_path_factory):
    """Folder and batches of a run that nobody touched."""
    folder = tmp_path_factory.mktemp("undisturbed")
    code, batches = run(configuration(texts), folder)
    assert code == 0 and len(batches) == STEPS
    return folder, batches


def test_stopped_and_continued(texts, undisturbed, tmp_path):
    config = configuration(texts)
    code, first = run(config, tmp_path, stop_at=3)
    assert code == 4 and len(first) == 3
    code, rest = run(config, tmp_path)
    assert code == 0
    assert first + rest == undisturbed[1]
    assert logged(tmp_path) == logged(undisturbed[0])
    (arrays, record), (wanted, wanted_record) = saved(config, tmp_path), saved(config, undisturbed[0])
    assert differing(arrays, wanted) == []
    assert record == wanted_record
    assert any("opt_state" in name for name in arrays) and any("router" in name for name in arrays)


def test_losing_the_optimizer_state_would_be_noticed(texts, undisturbed, tmp_path):
    config = configuration(texts)
    run(config, tmp_path, stop_at=3)
    restore = loop._Run.restore

    def without_momentum(self):
        state = restore(self)
        zeros = jax.tree.map(lambda x: jax.device_put(np.zeros_like(x), x.sharding), state.opt_state)
        return state._replace(opt_state=zeros)

    run(config, tmp_path, restore=without_momentum)
    assert differing(saved(config, tmp_path)[0], saved(config, undisturbed[0])[0])
    assert logged(tmp_path) != logged(undisturbed[0])


def test_stopped_and_continued_with_accumulation(texts, tmp_path):
    config = configuration(texts, micro_batches=2)
    _, whole = run(config, tmp_path / "whole")
    code, first = run(config, tmp_path / "parts", stop_at=5)
    assert code == 4
    code, rest = run(config, tmp_path / "parts")
    assert code == 0
    assert first + rest == whole
    assert logged(tmp_path / "parts") == logged(tmp_path / "whole")
    assert differing(saved(config, tmp_path / "parts")[0], saved(config, tmp_path / "whole")[0]) == []


def test_evaluation_is_repeatable_and_changes_nothing(texts, undisturbed, tmp_path, monkeypatch):
    config = replace(configuration(texts), eval=EvalConfig(every=0))
    run(config, tmp_path)
    assert differing(saved(config, tmp_path)[0], saved(config, undisturbed[0])[0]) == []
    last = RunFolder(undisturbed[0]).read_metrics()[-1]
    monkeypatch.setattr(evaluate, "Program", program_of)
    again = evaluate_run(undisturbed[0])
    assert again == {"step": STEPS, "eval/loss": last["eval/loss"], "eval/tokens": last["eval/tokens"]}
    with pytest.raises(ValueError, match="no checkpoint of step 4"):
        evaluate_run(undisturbed[0], 4)


_START = """
import sys
from k3train.config.load import from_json
from k3train.parallel.devices import prepare_devices
from k3train.train.loop import train
prepare_devices(8)
sys.exit(train(from_json(sys.stdin.read()), sys.argv[1]))
"""


def test_killed_at_a_random_moment(texts, undisturbed, tmp_path):
    """kill -9 somewhere between the first logged step and the end."""
    config = configuration(texts)
    settings = {
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
        "JAX_DEFAULT_MATMUL_PRECISION": "float32",
    }
    process = subprocess.Popen(
        [sys.executable, "-c", _START, str(tmp_path)], stdin=subprocess.PIPE, text=True, env=os.environ | settings
    )
    assert process.stdin is not None
    process.stdin.write(loop.to_json(config))
    process.stdin.close()
    log = tmp_path / "metrics.jsonl"
    while process.poll() is None and not (log.exists() and log.read_text()):
        time.sleep(0.02)
    time.sleep(random.random())  # the moment may differ from test to test: what counts must not
    process.kill()
    assert process.wait() in (0, -signal.SIGKILL)
    code, _ = run(config, tmp_path)
    assert code == 0
    assert logged(tmp_path) == logged(undisturbed[0])
    assert differing(saved(config, tmp_path)[0], saved(config, undisturbed[0])[0]) == []
