"""The plan for N devices: what it says, formula against compiler, what it advises."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from k3train.audit import pod
from k3train.audit.budget import budget, rows_per_device
from k3train.audit.collectives import Collective
from k3train.audit.hardware import HARDWARE, transfer_seconds
from k3train.audit.program import Compiled
from k3train.audit.roofline import roofline
from k3train.config.check import ConfigError
from k3train.config.load import load
from k3train.config.schema import Config, DataConfig, MeshConfig, ModelConfig

SMALL = ModelConfig(
    vocab_size=512, hidden_size=64, num_layers=2, kda_layers=(), mla_layers=(0, 1), dense_layers=(0,), moe_layers=(1,),
    intermediate_size=256, kda_num_heads=2, kda_head_dim=32, kda_gate_rank=16, mla_num_heads=2, mla_q_lora_rank=32,
    mla_kv_lora_rank=32, mla_qk_nope_head_dim=16, mla_qk_rope_head_dim=8, mla_v_head_dim=16, attn_res_block_size=2,
    num_experts=16, num_experts_per_token=4, moe_intermediate_size=64, moe_latent_size=32, remat="sublayer",
    compute_dtype="bfloat16",
)  # fmt: skip
ROOT = Path(__file__).parents[2]
RUN = """
import json, jax
jax.config.update("jax_num_cpu_devices", 8)
from dataclasses import replace
from k3train.audit import pod
from k3train.config.schema import Config, DataConfig, MeshConfig, OptimConfig
from tests.audit.test_pod import SMALL
data = DataConfig(seq_len=64, batch_size=32, micro_batches=2)
optim = OptimConfig(matrices="adamw")
config = Config(model=SMALL, mesh=MeshConfig(data=2, expert=4), data=data, optim=optim)
found = pod.plan(config, 8, "tpu7x")
print(json.dumps({**pod.report(found), "text": pod.text(found)}))
"""


@pytest.fixture(scope="module")
def compiled():
    """The plan of a small model on 8 devices, in a process of its own: its programs must not come from a cache."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_formula_against_compiler(compiled):
    held = compiled["bytes_per_device"]
    formula, compiler = held["formula"], held["compiler"]
    state = formula["master"] + formula["momentum"]
    assert state < compiler["arguments"] < 1.05 * state  # and the batch, the router's bias, counters
    # beside the state: the CPU computes in float32 and keeps more of an update at once, never less than the gradients
    rest = formula["total"] - state
    assert formula["gradients"] < compiler["temporaries"] and 0.5 * rest < compiler["temporaries"] < 3 * rest
    assert sum(compiler["temporaries_by_shape"].values()) == compiler["temporaries"]


def test_what_is_reported(compiled):
    assert compiled["mesh"]["choice"] == "mesh as configured" and compiled["rows_per_device"] == 2
    assert compiled["fits"] and "to spare" in compiled["advice"][0]
    kept = compiled["bytes_per_device"]["activations_by_policy"]
    assert kept["none"] > kept["attention_residuals"] > kept["sublayer"] > kept["block"]
    axes = {row["axes"] for row in compiled["collectives"]}
    assert {"data", "expert", "data+expert"} <= axes, axes
    # in bfloat16 as the program says, not in float32 as the CPU does it: w1 of 4 experts, brought together over data
    flops = compiled["flops_per_device"]
    assert 0.8 * flops["model"] < flops["products"] + flops["routed_experts"] < 4 * flops["model"]
    assert 0 < compiled["roofline"]["mfu_in_turn"] < compiled["roofline"]["mfu_overlapped"] < 1
    assert compiled["hardware"]["name"] == "tpu7x" and compiled["cost"]["compile_seconds"] > 0
    for part in ("8 devices (tpu7x): data 2 x expert 4", "collectives of a step", "fits: yes", "all at once"):
        assert part in compiled["text"]


def judged(config: Config, device: str, kept: int) -> pod.Plan:
    """A plan whose program was not compiled."""
    program = Compiled(0, 0, {}, 0, 0, [], 0, 0.0, 0.0, 0)
    amounts = {"none": 40 * kept, "attention_residuals": 30 * kept, "sublayer": kept, "block": kept // 3}
    formula = budget(config, amounts[config.model.remat])
    roof = roofline(config, formula, program, HARDWARE[device])
    return pod.Plan(config, "", device, HARDWARE[device], formula, amounts, program, roof)


def test_k3_does_not_fit_64_devices_and_fits_2048():
    config, choice = pod.fitted(load("k3")[0], 64)
    assert choice == "mesh as configured" and rows_per_device(config) == 1
    found = judged(config, "b200", 33 * 10**9)
    assert not found.fits
    # 2.78e12 parameters: 4 bytes of weights, 4 of momentum, 4 of gradients over 64 devices, whatever the mesh
    assert found.formula.master + found.formula.momentum + found.formula.gradients > 12 * 2.78e12 / 64
    lines = pod.advice(found)
    assert lines[0].startswith("too large by") and "remat=block" in lines[1] and "does not fit either" in lines[1]
    assert any("the smallest mesh of as many devices" in line for line in lines)
    assert lines[-1].startswith("more devices: 512 as data")
    large, choice = pod.fitted(config, 2048)
    assert choice.startswith("mesh chosen: data 128 x expert 16") and large.data.micro_batches == 4
    assert judged(large, "b200", 33 * 10**9).fits


def test_a_mesh_that_no_number_of_devices_has():
    config = Config(model=SMALL, mesh=MeshConfig(expert=2), data=DataConfig(batch_size=16))
    with pytest.raises(ConfigError, match=r"--devices 7: .* near: 4, 8"):
        pod.fitted(config, 7)


def test_transfers_inside_a_node_and_between_nodes():
    h200, pod_of_chips = HARDWARE["h200"], HARDWARE["tpu-v5p"]
    size = 10**9

    def seconds(kind, members, device):
        each = Collective(kind, size, len(members), ("data",), 3, members)
        return transfer_seconds([each], device)["data",]

    inside, across = tuple(range(8)), tuple(range(0, 64, 8))
    assert seconds("all-gather", inside, h200) == pytest.approx(3 * size * 7 / 8 / 450e9)
    assert seconds("all-gather", across, h200) == pytest.approx(3 * size * 7 / 8 / 50e9)
    # 64 devices in 8 nodes: what the 56 others have comes in once per node, over the adapters of all eight
    both = seconds("all-gather", tuple(range(64)), h200)
    assert both == pytest.approx(3 * size * 63 / 64 * (1 / 450e9 + 56 / 63 / 8 / 50e9))
    assert seconds("all-to-all", tuple(range(64)), h200) > both
    assert seconds("all-gather", across, pod_of_chips) == pytest.approx(3 * size * 7 / 8 / 600e9)
