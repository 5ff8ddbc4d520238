"""A run's folder: one writer, one configuration, nothing half-written."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import jax.numpy as jnp
import pytest

from k3train.checkpoint.orbax import Checkpoints
from k3train.config.load import to_json
from k3train.config.schema import CheckpointConfig, Config, DataConfig, LogConfig, MeshConfig
from k3train.train.run_folder import RunFolder, open_run_folder


def a_run(path, config, step=10):
    """A folder as a run leaves it."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(to_json(config))
    with Checkpoints(path / "checkpoints") as checkpoints:
        checkpoints.save(step, {"model": {"w": jnp.zeros(2)}}, {})
    return RunFolder(path)


def test_a_folder_is_made_and_goes_again_if_nothing_was_written(tmp_path):
    with open_run_folder(tmp_path / "a" / "b") as folder:
        assert (folder.path / ".lock").read_text().strip() == str(os.getpid())
    assert not (tmp_path / "a").exists()
    with open_run_folder(tmp_path / "a" / "b") as folder:
        folder.start(Config(), 0)
    assert [p.name for p in (tmp_path / "a" / "b").iterdir()] == ["config.json"]
    assert folder.read_config() == Config()


def test_an_empty_folder_of_the_user_stays(tmp_path):
    with open_run_folder(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way(tmp_path):
    file = tmp_path / "file"
    file.write_text("mine")
    for path in (file, file / "run"):
        with pytest.raises(ValueError, match="a file is in the way"), open_run_folder(path):
            pass
    assert file.read_text() == "mine"


def test_a_read_only_folder(tmp_path):
    """Nobody, not even root, may make folders in /sys."""
    path = tmp_path
    if os.geteuid():
        path.chmod(0o500)
    else:
        path = type(tmp_path)("/sys")
    with pytest.raises(ValueError, match="cannot be written: .*another --workdir"), open_run_folder(path / "run"):
        pass


def test_a_folder_in_use_is_refused(tmp_path):
    with open_run_folder(tmp_path) as folder:
        with pytest.raises(ValueError, match=f"in use by process {os.getpid()}"), open_run_folder(tmp_path):
            pass
        assert (folder.path / ".lock").exists()
    with open_run_folder(tmp_path):
        pass


_HOLDER = """
import sys, time
from k3train.train.run_folder import open_run_folder
with open_run_folder(sys.argv[1]):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_lock_of_a_killed_process_does_not_count(tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER, str(tmp_path)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    with pytest.raises(ValueError, match=f"in use by process {holder.pid}"), open_run_folder(tmp_path):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    holder.stdout.close()
    assert (tmp_path / ".lock").exists()
    with open_run_folder(tmp_path):
        assert (tmp_path / ".lock").read_text().strip() == str(os.getpid())


def test_what_may_change_is_listed_and_the_rest_is_refused(tmp_path):
    before = Config()
    folder = a_run(tmp_path / "run", before)
    assert folder.changes(before) == []
    allowed = replace(
        before, num_steps=200, log=LogConfig(every=3), checkpoint=CheckpointConfig(keep=5), mesh=MeshConfig(data=8)
    )
    assert folder.changes(allowed) == [
        "mesh.data: 1 -> 8",
        "checkpoint.keep: 2 -> 5",
        "log.every: 10 -> 3",
        "num_steps: 100 -> 200",
    ]
    other = replace(allowed, seed=3, data=DataConfig(seq_len=128))
    with pytest.raises(ValueError) as error:
        folder.changes(other)
    assert "data.seq_len was 256, is 128" in str(error.value) and "seed was 0, is 3" in str(error.value)
    assert "num_steps" not in str(error.value)
    assert f"--config.init_from={folder.path}" in str(error.value)


def test_a_run_is_extended_never_shortened(tmp_path):
    folder = a_run(tmp_path, Config())
    with pytest.raises(ValueError, match="num_steps=50: .*set to 100 steps and has reached 10"):
        folder.changes(replace(Config(), num_steps=50))


def test_without_a_checkpoint_there_is_no_run_to_protect(tmp_path):
    (tmp_path / "config.json").write_text(to_json(Config()))
    assert RunFolder(tmp_path).changes(Config(seed=3)) == []


def test_metrics_beyond_the_restored_step_go(tmp_path):
    folder = RunFolder(tmp_path)
    lines = [json.dumps({"step": step, "loss": 0.1 * step}) for step in (1, 2, 4, 6)]
    folder.metrics.write_text("\n".join(lines) + '\n{"step": 8, "lo')
    folder.start(Config(), 4)
    assert folder.metrics.read_text() == "\n".join(lines[:3]) + "\n"
    assert [record["step"] for record in folder.read_metrics()] == [1, 2, 4]
    folder.start(Config(), 0)
    assert folder.read_metrics() == []


def test_a_folder_that_holds_no_run(tmp_path):
    with pytest.raises(ValueError, match="holds no config.json"):
        RunFolder(tmp_path / "nowhere").read_config()
