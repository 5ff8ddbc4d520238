"""The command line: exit codes, short messages, and what is handed to the rooms below."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import jax
import pytest

import k3train
from k3train import cli
from k3train.audit.params import local_size
from k3train.config.load import load, to_json
from k3train.config.values import KNOBS
from k3train.data.chat_reply import Reply
from k3train.inference.answer import Answer
from k3train.parallel.devices import prepare_devices

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / "configs" / "tiny.py")


@pytest.fixture
def room(monkeypatch):
    """Puts a stand-in for a module below; calls are noted."""

    def put(name, **functions):
        module = ModuleType(name)
        for key, function in functions.items():
            setattr(module, key, function)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        monkeypatch.setattr(sys.modules[parent], child, module, raising=False)

    import k3train.checkpoint
    import k3train.inference
    import k3train.train  # noqa: F401

    return put


@pytest.fixture
def run_folder(tmp_path):
    (tmp_path / "config.json").write_text(to_json(load(TINY)[0]))
    return tmp_path


def refused(capsys, *arguments, code=2):
    """The message of a refusal: short, no traceback."""
    assert cli.main(arguments) == code
    out, err = capsys.readouterr()
    assert "Traceback" not in out + err
    assert len(err.splitlines()) <= 4
    return err


def test_a_misspelt_knob(capsys):
    err = refused(capsys, "train", "--config", TINY, "--config.num_stpes=3")
    assert err == "k3train: command line: unknown key num_stpes; did you mean num_steps?\n"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["trian"], ["no command trian", "did you mean train?", "show-config"]),
        (["export"], ["no command export", "export-hf"]),
        (["export-hf", "--workdir", "nowhere", "out"], ["nowhere is not the folder of a run", "config.json"]),
        (["train"], ["required: --config"]),
        (["train", "--config", TINY, "--worksdir", "x"], ["does not know --worksdir", "did you mean --workdir?"]),
        (["train", "--config", TINY, "--devices", "many"], ["--devices", "'many'"]),
        (["train", "--config", TINY, "--devices", "6"], ["mesh data 2 x expert 4 needs 8 devices, there are 6"]),
        (["train", "--config", TINY, "--config.mesh.expert=3"], ["model.num_experts=16", "mesh.expert=3"]),
        (["train", "--config", TINY, "--config.mesh.context=2"], ["mesh.context=2", "only 1 is accepted"]),
        (["train", "--config", TINY, "--config.seed"], ["--config.seed needs a value"]),
        (["train", "--config", "configs/tinny.py"], ["configs/tinny.py not found", "configs/tiny.py"]),
        (["train", "--config", str(ROOT / "configs" / "k3.py")], ["the vision tower can be counted"]),
        (["plan", "--config", TINY, "--config.model.num_layers=9"], ["must name layers 0 to 8", "missing: 6, 7, 8"]),
        (["plan", "--config", TINY, "--devices", "7"], ["--devices 7", "near: 4, 8"]),
        (["plan", "--config", TINY, "--devices", "8", "--hardware", "h20"], ["did you mean h200?", "b200", "tpu7x"]),
        (["plan", "--config", TINY, "--hardware", "h200"], ["without --devices"]),
        (["eval", "--workdir", "nowhere"], ["nowhere is not the folder of a run", "config.json"]),
        (["eval", "--workdir", "nowhere", "--config.seed=3"], ["eval takes no --config.* values"]),
        (["generate", "--workdir", "nowhere"], ["--prompt --prompts is required"]),
        (["generate", "--workdir", "x", "--prompt", "a", "--cache-block", "0"], ["blocks of 0 tokens"]),
        (["generate", "--workdir", "x", "--prompt", "a", "--chat-mode", "instruct"], ["are for --chat"]),
        (["generate", "--workdir", "x", "--prompt", "a", "--chat", "--chat-effort", "medium"], ["'high', 'max'"]),
        (["show-config", "--config", TINY, "--config.log.tensorboard=1"], ["log.tensorboard='1'", "true or false"]),
    ],
)  # fmt: skip
def test_mistakes_end_with_2(capsys, arguments, parts):
    err = refused(capsys, *arguments)
    for part in parts:
        assert part in err


def test_without_a_command_the_help_is_shown(capsys):
    assert cli.main([]) == 2
    out, err = capsys.readouterr()
    assert "import-hf" in out and "exit codes" in out and "choose a command" in err


@pytest.mark.parametrize("arguments", [["-h"], ["train", "-h"], ["--version"]])
def test_help_and_version_end_with_0(capsys, arguments):
    assert cli.main(arguments) == 0
    assert "k3train" in capsys.readouterr().out


@pytest.mark.parametrize("code", [0, 3, 4])
def test_train_hands_over_and_returns_the_code_of_the_loop(room, code):
    calls = []

    def train(config, workdir, sources, *, header, sample):
        assert "routed experts" in header
        assert sample(None) == config.log.sample + "main():"
        calls.append((config, workdir, sources))
        return code

    class Run:
        def generate(self, prompts, **options):
            return ["main():"]

    room("k3train.train.loop", train=train)
    room("k3train.inference.run", load=lambda workdir: Run())
    assert cli.main(["train", "--config", TINY, "--config.num_steps=3", "--config.seed", "5"]) == code
    config, workdir, sources = calls[0]
    assert (config.num_steps, config.seed) == (3, 5)
    assert workdir == Path("runs/tiny")
    assert sources["seed"] == "command line" and sources.keys() == KNOBS.keys()
    assert cli.main(["train", "--config", TINY, "--workdir", "elsewhere"]) == code
    assert calls[1][1] == Path("elsewhere")


def test_eval_and_generate_use_the_run(room, run_folder, tmp_path, capsys):
    class Run:
        def answers(self, prompts, cache, **options):
            assert options == {"max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "seed": 1}
            assert (cache.budget, cache.block) == ((2**30, 512) if len(prompts) == 1 else (3 * 2**20, 64))
            return (Answer([1], 4, 2, 0.5, 0.25, 100, 0, text=f" world {n}") for n, _ in enumerate(prompts))

    asked = []
    room("k3train.train.evaluate", evaluate_run=lambda workdir, step: {"eval/loss": 1.25, "step": step})
    room("k3train.inference.run", load=lambda workdir, step: asked.append((workdir, step)) or Run())
    assert cli.main(["eval", "--workdir", str(run_folder), "--step", "7"]) == 0
    assert capsys.readouterr().out == "eval/loss 1.25\nstep 7\n"
    options = ["--prompt", "hello", "--max-tokens", "5", "--temperature", "0.5", "--top-p", "0.9", "--seed", "1"]
    assert cli.main(["generate", "--workdir", str(run_folder), *options]) == 0
    assert capsys.readouterr().out == "hello world 0\n"
    assert asked == [(run_folder, None)]

    file = tmp_path / "prompts"
    file.write_text("hello\nwell\n")
    options = ["--prompts", str(file), "--report", *options[2:], "--cache-mib", "3", "--cache-block", "64"]
    assert cli.main(["generate", "--workdir", str(run_folder), *options]) == 0
    one, two, empty, head, *rows = capsys.readouterr().out.splitlines()
    assert (one, two, empty) == ("hello world 0", "well world 1", "")
    assert "hit rate" in head and [row.split()[0] for row in rows] == ["0", "1", "all"]
    assert "/nowhere" in refused(capsys, "generate", "--workdir", "x", "--prompts", "/nowhere")


def test_chat_prints_replies(room, run_folder, capsys):
    class Run:
        def replies(self, conversations, cache, **options):
            assert conversations == [{"messages": [{"role": "user", "content": "hello"}]}]
            assert options.pop("mode") is None and options.pop("effort") == "low" and len(options) == 4
            reply = Reply({"role": "assistant", "content": "world"}, "cut off in response")
            return iter([Answer([1], 4, 2, 0.5, 0.25, 100, 0, text=reply.text, reply=reply)])

    room("k3train.inference.run", load=lambda workdir, step: Run())
    options = ["--prompt", "hello", "--chat", "--chat-effort", "low"]
    assert cli.main(["generate", "--workdir", str(run_folder), *options]) == 0
    assert capsys.readouterr() == ("world\n", "reply 0 cut off in response\n")


def test_import_hands_over(room, tmp_path):
    calls = []
    room("k3train.checkpoint.hf_import", import_hf=lambda *paths, ignore, quant: calls.append((*paths, ignore, quant)))
    assert cli.main(["import-hf", "model", "--workdir", str(tmp_path)]) == 0
    options = ["--ignore-fields", "a,text_config.b", "--quant", "mxfp4"]
    assert cli.main(["import-hf", "model", "--workdir", str(tmp_path), *options]) == 0
    assert calls == [(Path("model"), tmp_path, (), None), (Path("model"), tmp_path, ("a", "text_config.b"), "mxfp4")]


def test_export_hands_over(room, tmp_path):
    calls = []
    room("k3train.checkpoint.hf_export", export_hf=lambda *paths, **options: calls.append((*paths, options)))
    assert cli.main(["export-hf", "--workdir", str(tmp_path), "out", "--experts", "mxfp4", "--step", "3"]) == 0
    assert calls == [(tmp_path, Path("out"), {"experts": "mxfp4", "layout": None, "step": 3})]


def raise_ours(*_, **__):
    prepare_devices(0)


def raise_missing(*_, **__):
    Path("/nowhere/at/all").read_text()


@pytest.mark.parametrize(("fail", "part"), [(raise_ours, "--devices 0"), (raise_missing, "/nowhere/at/all: No such")])
def test_refusals_from_below_end_with_2(room, capsys, fail, part):
    room("k3train.train.loop", train=fail)
    assert part in refused(capsys, "train", "--config", TINY)


def raise_in_a_library(*_, **__):
    jax.make_mesh((3, 5), ("data", "expert"))


def raise_by_accident(*_, **__):
    local_size(SimpleNamespace(axes=("embed",), shape=()), None)  # type: ignore[arg-type]


def raise_bug(*_, **__):
    raise KeyError("layers")


@pytest.mark.parametrize(
    ("fail", "last"),
    [
        (raise_in_a_library, "ValueError: Number of devices"),
        (raise_by_accident, "ValueError: zip() argument"),
        (raise_bug, "KeyError: 'layers'"),
    ],
)
def test_our_faults_end_with_1_and_a_traceback(room, capsys, fail, last):
    room("k3train.train.loop", train=fail)
    assert cli.main(["train", "--config", TINY]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err and err.splitlines()[-1].startswith(last)


def test_a_damaged_run_folder(run_folder, capsys):
    (run_folder / "config.json").write_text('{"seed": 3}')
    assert "config.json: missing model.vocab_size" in refused(capsys, "eval", "--workdir", str(run_folder))


def test_plan_prints_the_counts(capsys):
    assert cli.main(["plan", "--config", TINY, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"] == 8
    assert found["parameters"].keys() == {"stored", "total", "activated", "routed", "always_on"}
    assert found["bytes_per_device"]["parameters"] > 0
    assert found["flops_per_token"]["training"] == 3 * found["flops_per_token"]["forward"] > 0
    assert found["weight_bytes"].keys() == {"float32", "bfloat16", "mxfp4"}
    assert found["decode"]["contexts"][2]["tokens"] == 2**20
    assert cli.main(["plan", "--config", TINY]) == 0
    out = capsys.readouterr().out
    for number in (found["parameters"]["total"], found["weight_bytes"]["mxfp4"], found["decode"]["kda_state_bytes"]):
        assert f"{number:,}" in out


def test_plan_prints_the_optimizer_of_every_parameter(capsys):
    ablation = "--config.optim.muon_heads=whole"
    assert cli.main(["plan", "--config", TINY, "--json", ablation]) == 0
    rows = json.loads(capsys.readouterr().out)["optimizer"]
    assert cli.main(["plan", "--config", TINY, "--optimizer", ablation]) == 0
    said = capsys.readouterr().out
    assert "one learning rate for all" in said and "5 simple Newton-Schulz steps" in said
    for row in rows:
        line = next(line for line in said.splitlines() if line.startswith(row["path"] + " "))
        assert row["route"] in line and line.endswith(row["source"])
    assert any(row["source"] == "[ablation] optim.muon_heads=whole" for row in rows)


def test_show_config_prints_every_knob_with_its_source(capsys):
    assert cli.main(["show-config", "--config", str(ROOT / "configs" / "k3.py"), "--config.seed=9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line for line in lines if line and not line.startswith("#")}
    assert KNOBS.keys() <= rows.keys()
    assert rows["model.num_experts"].split() == ["model.num_experts", "896", "confirmed", "[config]"]
    assert rows["seed"].split() == ["seed", "9", "command", "line"]
    assert rows["optim.peak_lr"].endswith("lineage guess [K2]")
    assert "163586" in rows["eos_token_id"]


@pytest.mark.parametrize("name", ["k3", "kimi_linear_48b"])
def test_every_value_of_a_released_model_has_a_source_tag(name):
    _, sources = load(name)
    tags = ("confirmed [", "lineage guess [", "undisclosed: our choice", "unused by this model")
    for key, source in sources.items():
        if key.split(".")[0] in ("model", "mesh", "optim") or (key.startswith("vision.") and name == "k3"):
            assert source.startswith(tags) or key == "optim.max_consecutive_nonfinite", (key, source)


def test_importing_the_package_loads_nothing():
    code = "import sys, k3train; print([m for m in ('jax', 'flax', 'numpy') if m in sys.modules], k3train.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split("]")[0] == "["
    with pytest.raises(AttributeError, match="no attribute 'laod'"):
        _ = k3train.laod  # type: ignore[attr-defined]


def test_devices_are_simulated_as_the_mesh_needs():
    code = "from k3train.core import log; from k3train.parallel.devices import *\n"
    code += "with log.shown('stdout'): print(prepare_devices(3))"
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=env, check=True)
    assert done.stdout.splitlines() == ["no accelerator found: simulating 3 devices on the CPU", "3"]
    assert prepare_devices(8) == 8
