"""Launch scripts for real machines, run dry; nothing here has the machines."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "launch").glob("*.sh"))
ARGUMENTS = ["--config", "configs/k3.py", "--workdir", "/shared/my run", "--config.mesh.data=8"]


def run(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")} | variables
    command = [str(ROOT / "launch" / script), *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shell_syntax(script):
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    assert os.access(script, os.X_OK)


def test_slurm_submits_itself_then_starts_the_processes():
    outside = run("slurm.sh", "--dry-run", *ARGUMENTS, NODES="4", GPUS="2")
    assert outside.returncode == 0, outside.stderr
    assert outside.stdout.startswith("sbatch --job-name=k3train --nodes=4 --ntasks-per-node=2 --gpus-per-node=2 ")
    assert "launch/slurm.sh --config configs/k3.py --workdir /shared/my\\ run --config.mesh.data=8" in outside.stdout
    inside = run("slurm.sh", "--dry-run", *ARGUMENTS, SLURM_JOB_ID="7", SLURM_SUBMIT_DIR=str(ROOT))
    wanted = "srun --kill-on-bad-exit=1 k3train train --multihost --config configs/k3.py --workdir /shared/my\\ run "
    assert inside.stdout.startswith(wanted), inside.stdout


def test_tpu_pod_copies_installs_and_starts_on_every_host():
    done = run("tpu_pod.sh", "--dry-run", *ARGUMENTS, TPU="slice", ZONE="zone")
    copy, start = done.stdout.splitlines()
    assert (
        copy.startswith("gcloud compute tpus tpu-vm scp ") and "slice:k3train.tar.gz --zone=zone --worker=all" in copy
    )
    assert start.startswith("gcloud compute tpus tpu-vm ssh slice --zone=zone --worker=all --command=")
    assert "prepare_environment" in start and "k3train" in start and "--multihost" in start


@pytest.mark.parametrize(("script", "variables"), [("slurm.sh", {}), ("tpu_pod.sh", {"TPU": "a", "ZONE": "b"})])
def test_without_a_config_the_usage_is_shown(script, variables):
    done = run(script, "--dry-run", **variables)
    assert done.returncode == 2 and f"./launch/{script} [--dry-run] --config FILE" in done.stderr


def test_tpu_pod_needs_to_know_the_slice():
    done = run("tpu_pod.sh", "--dry-run", *ARGUMENTS, TPU="", ZONE="")
    assert done.returncode == 2 and "set TPU" in done.stderr


@pytest.mark.parametrize("arguments", [[], ["4"], ["0", "2"], ["two", "2"]])
def test_local_pod_needs_two_numbers(arguments):
    done = run("local_pod.sh", *arguments)
    assert done.returncode == 2 and "PROCESSES DEVICES" in done.stderr


def test_jobset_is_a_jobset_for_one_slice():
    manifest = yaml.safe_load((ROOT / "launch/gke_jobset.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = manifest["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert spec["parallelism"] == spec["completions"] and pod["restartPolicy"] == "Never"
    chips = container["resources"]["limits"]["google.com/tpu"] * spec["parallelism"]
    x, y, z = map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
    assert chips == x * y * z
    assert container["command"] == ["k3train", "train", "--multihost"] and "--config" in container["args"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
