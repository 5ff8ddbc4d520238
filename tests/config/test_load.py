"""Reading config files, overrides and config.json."""

import json
from dataclasses import FrozenInstanceError, replace

import pytest

from k3train.config import load as load_module
from k3train.config.check import ConfigError
from k3train.config.load import COMMAND_LINE, derive, find, from_json, load, new_config, read, split_overrides, to_json
from k3train.config.schema import CheckpointConfig, Config
from k3train.config.values import KNOBS, flat_values, nearest, parse


def write(folder, body, name="mine.py", head=""):
    path = folder / name
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    path.write_text(
        f"from k3train.config.load import derive, new_config\n{head}\n"
        f"def get_config():\n    cfg = new_config()\n{lines}\n    return cfg\n"
    )
    return path


def test_a_file_holds_the_differences_from_the_schema(tmp_path):
    path = write(tmp_path, "cfg.optim.update(peak_lr=1, final_lr=0.5)\ncfg.num_steps = 7\ncfg.model.mla_layers = [3]")
    config, sources = load(path)
    assert config.optim.peak_lr == 1.0 and isinstance(config.optim.peak_lr, float)
    assert config.num_steps == 7 and config.model.mla_layers == (3,)
    assert config.optim.adam_b1 == Config().optim.adam_b1
    assert sources["num_steps"] == "mine.py"
    assert sources["optim.warmup_fraction"] == "default, [report 3.3]"
    with pytest.raises(FrozenInstanceError):
        config.num_steps = 3  # type: ignore[misc]


def test_overrides_win_and_are_named_as_the_source(tmp_path):
    path = write(tmp_path, "cfg.num_steps = 7")
    overrides = ["--config.num_steps=8", "--config.num_steps=9", "--config.log.tensorboard", "false"]
    config, sources = load(path, overrides)
    assert config.num_steps == 9 and config.log.tensorboard is False
    assert sources["num_steps"] == sources["log.tensorboard"] == COMMAND_LINE


def test_derived_values_follow_their_reference(tmp_path):
    path = write(tmp_path, "cfg.checkpoint.every = cfg.get_ref('num_steps') * 2\ncfg.num_steps = 5")
    assert load(path)[0].checkpoint.every == 10


def test_derive_changes_another_file_and_keeps_its_sources_where_the_value_stays(tmp_path):
    tags = 'SOURCES = {"num_steps": "confirmed [report 9]", "seed": "undisclosed: our choice"}'
    write(tmp_path, "cfg.num_steps = 50\ncfg.seed = 3\ncfg.log.every = 2", "base.py", tags)
    child = tmp_path / "child.py"
    child.write_text(
        "from k3train.config.load import derive\n"
        "def get_config():\n    cfg = derive('base')\n    cfg.seed = 4\n    return cfg\n"
    )
    config, sources = load(child)
    assert (config.num_steps, config.seed, config.log.every) == (50, 4, 2)
    assert sources["num_steps"] == "confirmed [report 9]"
    assert sources["seed"] == "child.py"


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        ("cfg.num_stpes = 3", ["mine.py:5", "num_stpes", "did you mean num_steps"]),
        ("cfg.model.num_steps = 3", ["model.num_steps", "did you mean num_steps"]),
        ("cfg.modl.hidden_size = 3", ["unknown key modl", "model"]),
        ("cfg.model.hiden_size += 3", ["model.hiden_size", "did you mean model.hidden_size"]),
        ("cfg.optim.update(paek_lr=1.0)", ["optim.paek_lr", "did you mean optim.peak_lr"]),
        ("cfg.update({'mesh': {'dta': 2}})", ["mesh.dta", "mesh.data"]),
        ("cfg.mesh = dict(pipeline=1, data=2, context=1, exprt=1, tensor=1)", ["did you mean mesh.expert"]),
        ("cfg.mesh = dict(data=2)", ["drops mesh.pipeline", "mesh.tensor", "cfg.mesh.update"]),
        ("cfg.mesh = (2, 4)", ["mesh is a section", "(2, 4)"]),
        ("cfg.num_steps = 3.5", ["num_steps=3.5", "a whole number"]),
        ("cfg.num_steps = True", ["num_steps=True", "a whole number"]),
        ("cfg.log.tensorboard = 1", ["log.tensorboard=1", "true or false"]),
        ("cfg.optim.peak_lr = '3e-4'", ["optim.peak_lr='3e-4'", "a number"]),
        ("cfg.model.kda_layers = (0, '1')", ["model.kda_layers=(0, '1')", "whole numbers"]),
        ("cfg.model.attn_res = 'blok'", ["model.attn_res='blok'", "none, block, full"]),
        ("cfg.seed = 1 / 0", ["mine.py:5", "ZeroDivisionError"]),
        ("del cfg.seed", ["mine.py:5", "locked"]),
        ("return {'num_steps': 3}", ["get_config() must return"]),
    ],
)  # fmt: skip
def test_mistakes_in_a_file_are_refused_with_the_line(tmp_path, body, parts):
    with pytest.raises(ConfigError) as refusal:
        load(write(tmp_path, body))
    for part in parts:
        assert part in str(refusal.value)


def test_a_run_stands_for_a_config_file(tmp_path):
    """Its configuration is read as data, by `--config` and by `derive`."""
    run = tmp_path / "runs" / "imported"
    run.mkdir(parents=True)
    config, _ = load("tiny", ["--config.seed=7"])
    (run / "config.json").write_text(to_json(config))
    for name in (run, run / "config.json"):
        got, sources = load(name, ["--config.num_steps=3"])
        assert got == replace(config, num_steps=3)
        assert sources["seed"] == "config.json" and sources["num_steps"] == COMMAND_LINE
    file = tmp_path / "more.py"
    file.write_text(f"from k3train.config.load import derive\ndef get_config():\n    return derive({str(run)!r})\n")
    assert load(file)[0] == config
    (run / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="config.json: line 1 is not JSON"):
        load(run)


@pytest.mark.parametrize(
    ("body", "overrides", "wanted", "source"),
    [
        ("cfg.phase = 'sft'", [], "mxfp4_mxfp8", "phase=sft"),
        ("cfg.phase = 'sft'", ["--config.quant.experts=mxfp4"], "mxfp4", COMMAND_LINE),
        ("cfg.phase = 'sft'", ["--config.phase=cooldown"], "none", "default, [report 4.1.4]"),
        ("cfg.phase = 'sft'\ncfg.quant.experts = 'none'", [], "none", "default, [report 4.1.4]"),
        ("cfg.phase = 'sft'\ncfg.quant.update(experts='none')", [], "none", "default, [report 4.1.4]"),
        ("cfg.quant.experts = 'mxfp4'", ["--config.phase=sft"], "mxfp4", "mine.py"),
        ("", ["--config.phase=sft"], "mxfp4_mxfp8", "phase=sft"),
    ],
)
def test_what_nobody_gave_is_as_the_phase_has_it(tmp_path, body, overrides, wanted, source):
    """Given is what was written, even if it is what was there."""
    path = write(tmp_path, body)
    config, sources = load(path, overrides)
    assert (config.quant.experts, sources["quant.experts"]) == (wanted, source)
    (tmp_path / "config.json").write_text(to_json(config))
    assert load(tmp_path)[0] == config
    if config.phase != "sft":  # a run before fine-tuning, as the configuration of the fine-tuning
        assert load(tmp_path, ["--config.phase=sft"])[0].quant.experts == "mxfp4_mxfp8"


def test_a_whole_section_may_be_replaced(tmp_path):
    path = write(tmp_path, "cfg.checkpoint = dict(every=5, keep=3)\ncfg.checkpoint.keep = 4")
    assert load(path)[0].checkpoint == CheckpointConfig(every=5, keep=4)


def test_a_file_that_is_not_python(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("def get_config(:\n")
    with pytest.raises(ConfigError, match=r"broken\.py:1: SyntaxError"):
        load(path)
    path.write_text("x = 1\n")
    with pytest.raises(ConfigError, match="get_config"):
        load(path)


def test_tags_of_unknown_knobs_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="SOURCES: unknown key optim.peek_lr; did you mean optim.peak_lr"):
        load(write(tmp_path, "pass", head="SOURCES = {'optim.peek_lr': 'x'}"))


def test_a_missing_file_lists_the_near_ones():
    with pytest.raises(ConfigError, match=r"configs/tinny\.py not found; did you mean .*configs/tiny\.py"):
        load("configs/tinny.py")
    assert find("tiny").name == "tiny.py"


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("num_steps=1_000", 1000), ("num_steps=1e3", 1000), ("num_steps=+3", 3), ("model.pad_token_id=-1", -1),
        ("optim.peak_lr=3", 3.0), ("optim.peak_lr=3e-4", 3e-4), ("log.tensorboard=False", False),
        ("model.kda_layers=0,1,2", (0, 1, 2)), ("model.kda_layers=(0, 1)", (0, 1)), ("model.kda_layers=[4]", (4,)),
        ("model.kda_layers=4,", (4,)), ("model.kda_layers=()", ()), ("data.path=a=b c", "a=b c"),
        ("model.kda_gate=softplus", "softplus"),
    ],
)  # fmt: skip
def test_values_on_the_command_line(override, value):
    path, text = override.split("=", 1)
    got = parse(path, text, "test")
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("num_steps=3.0", ["num_steps='3.0'", "a whole number"]),
        ("num_steps=", ["num_steps=''", "a whole number"]),
        ("num_steps=1e-3", ["a whole number"]),
        ("optim.peak_lr=nan", ["optim.peak_lr=nan", "a number"]),
        ("optim.peak_lr=fast", ["optim.peak_lr='fast'", "a number"]),
        ("log.tensorboard=1", ["log.tensorboard='1'", "true or false"]),
        ("model.kda_layers=1.5", ["'1.5'", "whole numbers"]),
        ("model.kda_layers=kda,mla", ["'kda,mla'", "whole numbers"]),
        ("model.kda_layers=", ["whole numbers"]),
        ("model.activation=gelu", ["model.activation='gelu'", "situ, swiglu"]),
        ("num_stpes=3", ["unknown key num_stpes", "did you mean num_steps"]),
        ("model.mla.num_heads=3", ["unknown key model.mla.num_heads", "model.mla_num_heads"]),
        ("mesh={'data': 2}", ["mesh is a section", "mesh.data"]),
    ],
)
def test_mistakes_on_the_command_line(override, parts):
    with pytest.raises(ConfigError) as refusal:
        load("tiny", [f"--config.{override}"])
    assert str(refusal.value).startswith("command line: ")
    for part in parts:
        assert part in str(refusal.value)


def test_overrides_are_taken_out_of_the_other_arguments():
    arguments = ["train", "--config", "a.py", "--config.seed=3", "--config.num_steps", "4", "--workdir", "w"]
    assert split_overrides(arguments) == (
        ["--config.seed=3", "--config.num_steps=4"],
        ["train", "--config", "a.py", "--workdir", "w"],
    )
    for rest in ([], ["--workdir"]):
        with pytest.raises(ConfigError, match="--config.seed needs a value"):
            split_overrides(["--config.seed", *rest])


def test_every_knob_finds_itself_and_has_a_meaning_and_a_source():
    for path, knob in KNOBS.items():
        assert nearest(path)[0] == path
        assert knob.doc and knob.source
        assert not knob.choices or knob.default in knob.choices


def test_json_round_trip_is_data():
    config, _ = load("tiny", ["--config.model.kda_gate=softplus"])
    text = to_json(config)
    assert from_json(text) == config
    assert json.loads(text)["model"]["kda_layers"] == list(config.model.kda_layers)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tree: tree["model"].update(hiden_size=3),
            "unknown key model.hiden_size; did you mean model.hidden_size",
        ),
        (lambda tree: tree.update(modle={}), "unknown key modle"),
        (lambda tree: tree["mesh"].pop("data"), "missing mesh.data"),
        (lambda tree: tree.pop("optim"), "missing optim.peak_lr"),
        (lambda tree: tree.update(seed="3"), "seed='3'"),
        (lambda tree: tree.update(optim=[1]), "optim is a section"),
    ],
)
def test_json_is_strict(change, message):
    tree = json.loads(to_json(Config()))
    change(tree)
    with pytest.raises(ConfigError, match="run/config.json: ") as refusal:
        from_json(json.dumps(tree), "run/config.json")
    assert message in str(refusal.value)


def test_json_that_is_cut_short():
    with pytest.raises(ConfigError, match="config.json: line 2 is not JSON"):
        from_json('{"seed": 3,\n')
    with pytest.raises(ConfigError, match="must hold one JSON object"):
        from_json("[]")


def test_new_config_is_locked_and_complete():
    cfg = new_config()
    assert cfg.is_locked and cfg.model.is_locked
    assert flat_values(Config()).keys() == KNOBS.keys()
    assert not hasattr(cfg, "_private")
    cfg.model.hidden_size = 64
    assert new_config().model.hidden_size == Config().model.hidden_size


def test_reading_leaves_nothing_behind(tmp_path):
    with pytest.raises(ConfigError):
        read(write(tmp_path, "derive('nowhere')"))
    assert load_module._reading.folders == []
    assert derive("tiny").mesh.expert == 4
