"""The host loop on a stand-in model: what a run writes, says and ends with, however it ends."""

import itertools
import resource
import signal
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3train.checkpoint.orbax import Checkpoints
from k3train.config.load import to_json
from k3train.config.schema import CheckpointConfig, Config, DataConfig, EvalConfig, LogConfig, MeshConfig, ModelConfig
from k3train.core import log
from k3train.train import loop, metrics
from k3train.train.loop import train
from k3train.train.run_folder import RunFolder, open_run_folder
from k3train.train.state import TrainState

WIDTH = 3


class StandIn:
    """Weights that remember every batch they have seen, in order."""

    signal_at: int | None = None  # step during which SIGTERM comes
    nonfinite_from = 10**9

    def __init__(self, config, mesh):
        self.config = config
        self._train = jax.jit(self._step, donate_argnums=0)
        self._eval = jax.jit(self._loss)
        self._started = 0

    def _fresh(self):
        zero = jnp.zeros((), jnp.int32)
        params = {"w": jnp.full((WIDTH,), self.config.seed, jnp.float32)}
        return TrainState(params, (jnp.zeros(WIDTH),), {"b": jnp.zeros(2)}, zero, zero, zero)

    @property
    def abstract_state(self):
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), jax.eval_shape(self._fresh)
        )

    def init(self):
        return jax.jit(self._fresh)()

    def put_batch(self, batch):
        return {name: jnp.asarray(rows) for name, rows in batch.items()}

    def train_step(self, state, batch):
        self._started += 1
        if self._started == self.signal_at:
            signal.raise_signal(signal.SIGTERM)
        return self._train(state, batch)

    def eval_step(self, params, bias, batch):
        loss, tokens = self._eval(params, batch)
        return {"loss_sum": loss, "tokens": tokens}

    def _loss(self, params, batch):
        mask = batch["loss_mask"]
        return jnp.sum(mask * batch["targets"]) / 100 + jnp.sum(params["w"]), jnp.sum(mask)

    def _step(self, state, batch):
        loss, tokens = self._loss(state.params, batch)
        seen = jnp.sum(batch["tokens"] * jnp.arange(batch["tokens"].size).reshape(batch["tokens"].shape)) / 1e4
        ok = (state.step + 1 < self.nonfinite_from).astype(jnp.int32)
        moment = jnp.where(ok, 0.9 * state.opt_state[0] + seen, state.opt_state[0])
        params = {"w": jnp.where(ok, 0.99 * state.params["w"] + moment / 1000, state.params["w"])}
        new = TrainState(
            params, (moment,), {"b": state.bias["b"] + ok}, state.step + 1, state.nonfinite + 1 - ok,
            (state.nonfinite_streak + 1) * (1 - ok),
        )  # fmt: skip
        found = {name: jnp.float32(0.5) for name in ("learning_rate", "grad_norm", "router/max_over_mean_load")}
        found |= {"loss": jnp.where(ok, loss / tokens, jnp.nan), "tokens": tokens}
        return new, found | {"nonfinite_steps": new.nonfinite, "nonfinite_streak": new.nonfinite_streak}


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    """A stand-in that a test may set up without others noticing."""
    program = type("StandIn", (StandIn,), {})
    monkeypatch.setattr(loop, "Program", program)
    with log.shown("stdout"):
        yield program


@pytest.fixture
def config(tmp_path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(12):
        (texts / f"{i}.txt").write_text(f"document {i} " * (8 + i))
    return Config(
        model=ModelConfig(vocab_size=264),
        mesh=MeshConfig(data=8),
        data=DataConfig(source="text", path=str(texts), seq_len=32, batch_size=8, eval_fraction=0.3),
        checkpoint=CheckpointConfig(every=5, keep=2),
        eval=EvalConfig(every=4),
        log=LogConfig(every=3),
        num_steps=10,
    )


def repeatable(folder):
    """Metrics without what depends on the clock."""
    records = RunFolder(folder).read_metrics()
    return [{name: value for name, value in r.items() if name not in metrics.WALL_CLOCK} for r in records]


def saved(folder, step=None):
    """Every array of a checkpoint, and its record."""
    program = loop.Program(Config(), None)
    with Checkpoints(folder / "checkpoints") as checkpoints:
        step = checkpoints.resolve(step)
        parts = checkpoints.restore(step, loop._parts(program.abstract_state))
        return [np.asarray(x) for x in jax.tree.leaves(parts)], checkpoints.record(step)


def same(a, b):
    return a[1] == b[1] and all(np.array_equal(x, y) for x, y in zip(a[0], b[0], strict=True))


def test_a_run_from_start_to_end(config, tmp_path, capsys):
    run = tmp_path / "run"
    assert train(config, run, header="HEADER", sample=lambda state: f"SAMPLE {int(state.step)}") == 0
    files = ["checkpoints", "config.json", "log.txt", "metrics.jsonl", "tensorboard"]
    assert sorted(p.name for p in run.iterdir()) == files
    assert RunFolder(run).read_config() == config
    assert Checkpoints(run / "checkpoints").steps() == [5, 10]
    records = RunFolder(run).read_metrics()
    assert [r["step"] for r in records] == [1, 3, 4, 6, 8, 9, 10]
    assert [r["step"] for r in records if "eval/loss" in r] == [4, 8, 10]
    assert all(r.keys() <= metrics.METRICS.keys() for r in records)
    assert records[-1]["tokens_per_second"] > 0 and "tokens_per_second" not in records[0]
    assert records[-1]["tokens_seen"] == saved(run)[1]["tokens_seen"]
    said = capsys.readouterr().out
    for text in (
        "mesh: data 8 (8 cpu devices)", "HEADER", "phase pretrain", "training 10 documents", "held out 2 documents",
        "unigram", "bigram", "step 10/10", "held-out loss", "SAMPLE 10", "tensorboard --logdir",
        str(run / "checkpoints" / "10"), str(run / "config.json"), "k3train generate --workdir",
    ):  # fmt: skip
        assert text in said, text
    assert "step 10/10" in (run / "log.txt").read_text()


def test_a_complete_run_says_so_and_is_left_alone(config, tmp_path, capsys):
    run = tmp_path / "run"
    train(config, run)
    before = (run / "metrics.jsonl").read_text()
    capsys.readouterr()
    assert train(config, run) == 0
    said = capsys.readouterr().out
    assert "complete: 10 steps, held-out loss" in said and "--config.num_steps=20" in said
    assert (run / "metrics.jsonl").read_text() == before
    assert not (run / ".lock").exists()


def test_a_run_is_extended(config, tmp_path, capsys):
    run = tmp_path / "run"
    train(config, run)
    assert train(replace(config, num_steps=14, log=LogConfig(every=2)), run) == 0
    said = capsys.readouterr().out
    assert "continues at step 10 of 14" in said and "num_steps: 10 -> 14" in said and "log.every: 3 -> 2" in said
    assert [r["step"] for r in RunFolder(run).read_metrics()][-4:] == [9, 10, 12, 14]
    assert RunFolder(run).read_config().num_steps == 14
    train(replace(config, num_steps=14, log=LogConfig(every=2)), tmp_path / "straight")
    assert same(saved(run), saved(tmp_path / "straight"))  # nothing in the stand-in depends on the schedule


@pytest.mark.parametrize("stop", [1, 3, 5, 9])
def test_stopped_and_continued_equals_undisturbed(config, tmp_path, capsys, stand_in, stop):
    train(config, tmp_path / "straight")
    run = tmp_path / "run"
    stand_in.signal_at = stop
    capsys.readouterr()
    assert train(config, run) == 4
    said = capsys.readouterr().out
    assert f"stopped by SIGTERM after step {stop} of 10" in said and "the same command again" in said
    assert Checkpoints(run / "checkpoints").latest() == stop
    stand_in.signal_at = None
    assert train(config, run) == 0
    assert repeatable(run) == repeatable(tmp_path / "straight")
    assert same(saved(run), saved(tmp_path / "straight"))


def test_metrics_logged_after_the_newest_checkpoint_come_again_once(config, tmp_path, stand_in):
    """As after kill -9 between two checkpoints."""
    train(config, tmp_path / "straight")
    run = tmp_path / "run"
    stand_in.signal_at = 5
    train(config, run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "loss": 1.0}\n{"step": 8, "lo')
    stand_in.signal_at = None
    assert train(config, run) == 0
    assert repeatable(run) == repeatable(tmp_path / "straight")


def test_evaluation_changes_nothing(config, tmp_path):
    train(config, tmp_path / "often")
    train(replace(config, eval=EvalConfig(every=0)), tmp_path / "seldom")
    (often, _), (seldom, _) = saved(tmp_path / "often"), saved(tmp_path / "seldom")
    assert all(np.array_equal(x, y) for x, y in zip(often, seldom, strict=True))
    assert [r["step"] for r in RunFolder(tmp_path / "seldom").read_metrics() if "eval/loss" in r] == [10]


def test_nothing_held_out_means_no_evaluation(config, tmp_path, capsys):
    config = replace(config, data=replace(config.data, eval_fraction=0.0))
    assert train(config, tmp_path / "run") == 0
    assert "no evaluation" in capsys.readouterr().out
    assert not any("eval/loss" in r for r in RunFolder(tmp_path / "run").read_metrics())


def test_skipped_steps_are_counted_and_too_many_in_a_row_stop_the_run(config, tmp_path, capsys, stand_in):
    stand_in.nonfinite_from = 4
    config = replace(config, optim=replace(config.optim, max_consecutive_nonfinite=3))
    assert train(config, tmp_path / "run") == 3
    said = capsys.readouterr().out
    assert "step 4: loss nan" in said and "(1 in a row)" in said
    assert "stopped at step 6: 3 steps in a row were not finite (optim.max_consecutive_nonfinite=3)" in said
    assert "Newest checkpoint: step 5" in said
    record = RunFolder(tmp_path / "run").read_metrics()[-1]
    assert record["step"] == 4 and record["nonfinite_steps"] == 1 and record["loss"] is None


def test_data_that_ends_is_not_success(config, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(loop.TrainLoader, "__next__", _ends_after(7, loop.TrainLoader.__next__))
    assert train(config, tmp_path / "run") == 4
    assert "the data ended after step 7 of 10" in capsys.readouterr().out
    assert Checkpoints(tmp_path / "run" / "checkpoints").latest() == 7


def _ends_after(count, original):
    counter = itertools.count()

    def limited(loader):
        if next(counter) >= count:
            raise StopIteration
        return original(loader)

    return limited


def test_a_failed_save_stops_the_run(config, tmp_path, capsys, stand_in):
    """No file may grow beyond a few bytes from the first step on; the checkpoint before stays."""
    run = tmp_path / "run"
    stand_in.signal_at = 2
    train(config, run)
    stand_in.signal_at = None
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    original = loop._Run._save

    def on_a_full_disk(self, state):
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
        try:
            original(self, state)
            self.checkpoints.wait()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop._Run, "_save", on_a_full_disk)
        assert train(config, run) == 4
    said = capsys.readouterr().out
    for text in ("checkpoint of step 5", "File too large", "newest complete checkpoint is step 2"):
        assert text in said, text
    assert train(config, run) == 0
    said = capsys.readouterr().out
    assert "continues at step 2" in said and "cut short while being saved: 5.orbax-checkpoint-tmp" in said
    assert Checkpoints(run / "checkpoints").incomplete() == []


def test_another_runs_weights_as_a_start(config, tmp_path, capsys):
    first = tmp_path / "first"
    train(replace(config, seed=5), first)
    second = replace(config, init_from=str(first), phase="long_context", num_steps=5)
    second = replace(second, data=replace(config.data, seq_len=16))
    assert train(second, tmp_path / "second") == 0
    said = capsys.readouterr().out
    assert f"carries over from {first}, step 10: weights, router bias, optimizer moments" in said
    assert "data.seq_len was 32, is 16" in said
    (old, _), (new, record) = saved(first), saved(tmp_path / "second")
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(loop._parts(_abstract()))]
    values, before = dict(zip(names, new, strict=True)), dict(zip(names, old, strict=True))
    bias = "['model']['bias']['b']"
    np.testing.assert_array_equal(values[bias], before[bias] + 5)  # carried, then moved by five steps
    assert values["['optimizer']['step']"] == 5 and record["data"]["next_batch"] == 5
    moments = "['optimizer']['opt_state'][0]"
    assert (values[moments] > 0.9**5 * before[moments]).all()  # what came along has decayed, more has been added
    assert train(replace(second, phase="pretrain"), tmp_path / "anew") == 0
    assert (saved(tmp_path / "anew")[0][names.index(moments)] < values[moments]).all()
    with pytest.raises(ValueError, match="holds no config.json"):
        train(replace(second, init_from=str(tmp_path / "nowhere")), tmp_path / "third")
    assert not (tmp_path / "third").exists()


def _abstract():
    return loop.Program(Config(), None).abstract_state


def test_imported_weights_are_a_start_not_a_run_to_continue(config, tmp_path):
    run = tmp_path / "imported"
    run.mkdir()
    (run / "config.json").write_text(to_json(config))
    with Checkpoints(run / "checkpoints") as checkpoints:
        checkpoints.save(0, {"model": loop._parts(loop.Program(config, None).init())["model"]}, {})
    with pytest.raises(ValueError, match="without an optimizer .*--config.init_from="):
        train(config, run)
    assert train(replace(config, init_from=str(run)), tmp_path / "run") == 0


def _another_vocabulary(config):
    return replace(config, model=replace(config.model, vocab_size=200))


def _no_data(config):
    return replace(config, data=replace(config.data, path="/nonexistent"))


def _mesh(config):
    return replace(config, mesh=MeshConfig(data=4))


@pytest.mark.parametrize(
    "change, message",
    [(_another_vocabulary, "model.vocab_size=200.* 264"), (_no_data, "/nonexistent"), (_mesh, "needs 4 devices")],
)
def test_mistakes_leave_nothing_behind(config, tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        train(change(config), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_another_configuration_is_refused_before_anything_is_written(config, tmp_path, stand_in):
    run = tmp_path / "run"
    stand_in.signal_at = 2
    train(config, run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="seed was 0, is 1"):
        train(replace(config, seed=1), run)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_checkpoint_of_another_model_is_refused_before_anything_is_written(config, tmp_path, stand_in, monkeypatch):
    run = tmp_path / "run"
    stand_in.signal_at = 2
    train(config, run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    monkeypatch.setitem(globals(), "WIDTH", 4)
    with pytest.raises(ValueError, match=r"params/w: checkpoint has float32\[3\], expected float32\[4\]"):
        train(config, run)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_workdir_in_use_is_refused(config, tmp_path):
    with open_run_folder(tmp_path / "run"), pytest.raises(ValueError, match="in use by process"):
        train(config, tmp_path / "run")


def test_signal_handlers_are_put_back(config, tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    train(config, tmp_path / "run")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
