"""Two processes with two devices each train as one process with four; killed, the run goes on with one process."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

CONFIG = """
from k3train.config.load import new_config

MODEL = dict(
    vocab_size=264, hidden_size=32, num_layers=2, kda_layers=(0,), mla_layers=(1,), dense_layers=(0,), moe_layers=(1,),
    intermediate_size=32, kda_num_heads=2, kda_head_dim=16, kda_gate_rank=8, mla_num_heads=2, mla_q_lora_rank=8,
    mla_kv_lora_rank=8, mla_qk_nope_head_dim=8, mla_qk_rope_head_dim=8, mla_v_head_dim=8, num_experts=8,
    num_experts_per_token=2, moe_latent_size=16, moe_intermediate_size=16, attn_res_block_size=1,
)
SECTIONS = dict(
    model=MODEL,
    mesh=dict(data=2, expert=2),
    data=dict(source="text", path=PATH, seq_len=128, batch_size=16, eval_fraction=0.2, eval_batches=2),
    checkpoint=dict(every=20),
    eval=dict(every=25),
    log=dict(every=1, tensorboard=False),
)

def get_config():
    config = new_config()
    for section, values in SECTIONS.items():
        config[section].update(values)
    config.num_steps = 50
    return config
"""
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pod")
    (folder / "texts").mkdir()
    for i in range(30):
        (folder / f"texts/{i}.txt").write_text(f"text number {i} says {i * i} and then ends. " * 5)
    file = folder / "small.py"
    file.write_text(CONFIG.replace("PATH", repr(str(folder / "texts"))))
    return file


def start(config: Path, workdir: Path, *per_process: list[str], count: int = 0) -> list:
    """One process for each list of further arguments, of a pod of `count` (default: of all that are started)."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    count = count or len(per_process)
    command = [sys.executable, "-m", "k3train", "train", "--config", str(config), "--workdir", str(workdir)]
    command += ["--heartbeat-timeout", "10"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(config.parent / "compiled")}
    env["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    started = []
    for index, arguments in enumerate(per_process):
        pod = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count), "JAX_PROCESS_ID": str(index)}
        output = (config.parent / f"{workdir.name}-{index}.log").open("w+")
        environment = env | (pod if count > 1 else {})
        started.append(
            subprocess.Popen([*command, *arguments], env=environment, stdout=output, stderr=output, cwd=ROOT)
        )
        started[-1].output = output
    return started


def finish(processes: list, seconds: float = 240) -> list[tuple[int, str]]:
    """(exit code, what it said) of each."""
    end = time.monotonic() + seconds
    try:
        codes = [process.wait(timeout=max(0.1, end - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(code, Path(process.output.name).read_text()) for code, process in zip(codes, processes, strict=True)]


def logged(workdir: Path) -> dict[int, tuple[float, float | None]]:
    file = workdir / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return {record["step"]: (record["loss"], record.get("eval/loss")) for record in records}


def wait_for_step(workdir: Path, step: int, processes: list) -> None:
    while not any(number >= step for number in logged(workdir)):
        assert all(process.poll() is None for process in processes), finish(processes)
        time.sleep(0.02)


def check_same(run: Path, reference: Path, *, whole: bool) -> None:
    got, wanted = logged(run), logged(reference)
    assert not whole or got.keys() == wanted.keys()
    for step, pair in got.items():
        for x, y in zip(pair, wanted[step], strict=True):
            assert (x is None) == (y is None) and (x is None or abs(x - y) < 2e-5 * abs(y)), (step, pair, wanted[step])


def test_pod_equals_one_process_and_survives_a_kill(config, tmp_path):
    reference, run = tmp_path / "one", tmp_path / "pod"
    ((code, text),) = finish(start(config, reference, []))
    assert code == 0, text

    processes = start(config, run, [], [])
    wait_for_step(run, 4, processes)
    processes[1].send_signal(signal.SIGTERM)  # asked of one, done by all
    (code, text), (other, words) = finish(processes)
    assert (code, other) == (4, 4), text + words
    assert "stopped by another process" in text and "loss" not in words, text + words
    check_same(run, reference, whole=False)
    stopped = max(logged(run))

    processes = start(config, run, [], [])
    wait_for_step(run, stopped + 4, processes)
    processes[1].kill()
    began = time.monotonic()
    (code, text), _ = finish(processes, 60)
    assert code not in (0, None) and time.monotonic() - began < 40, text

    ((code, text),) = finish(start(config, run, []))
    assert code == 0 and "continues at step" in text, text
    check_same(run, reference, whole=True)


def test_processes_with_different_configurations_are_refused(config, tmp_path):
    ended = finish(start(config, tmp_path / "run", [], ["--config.seed=3"]))
    for code, text in ended:
        assert code == 2 and "seed: 0 on process 0, 3 on process 1" in text, text
    assert not (tmp_path / "run").exists()


def test_missing_process_is_named(config, tmp_path):
    soon = "--join-timeout=8"
    for code, text in finish(start(config, tmp_path / "run", [soon], [soon], count=4)):
        assert code == 2 and "after 8 s these of 4 processes are missing: 2, 3" in text, text
