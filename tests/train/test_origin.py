"""The run that another one starts from: refused with what is wrong with it, before anything is compiled."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest

from k3train import cli
from k3train.checkpoint.orbax import Checkpoints
from k3train.config.load import to_json
from k3train.config.schema import Config
from k3train.optim import build
from k3train.train import origin
from tests.train import micro


def save(folder, config, steps=(3,), parts=("model", "optimizer")):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(to_json(config))
    with Checkpoints(folder / "checkpoints") as checkpoints:
        for step in steps:
            checkpoints.save(step, {part: {"w": jnp.ones(2)} for part in parts}, {})
    return str(folder)


def test_the_newest_checkpoint_and_what_differs(tmp_path):
    first = micro.config()
    config = replace(first, data=replace(first.data, seq_len=80), model=replace(first.model, remat="none"))
    config = replace(config, init_from=save(tmp_path / "a", first, steps=(3, 7)))
    found = origin.find(config)
    assert found is not None and (found.step, found.has_optimizer) == (7, True)
    assert found.notes == [
        "model.remat was 'sublayer', is 'none'", "data.seq_len was 40, is 80", "it has not reached its 10 steps",
    ]  # fmt: skip
    imported = replace(config, init_from=save(tmp_path / "b", first, parts=("model",)))
    found = origin.find(imported)
    assert found is not None and not found.has_optimizer
    assert origin.find(first) is None


def test_another_architecture_is_refused_by_its_knobs(tmp_path):
    first = micro.config()
    other = replace(first, model=replace(first.model, hidden_size=64, num_experts_per_token=2, remat="none"))
    other = replace(other, init_from=save(tmp_path / "a", first))
    with pytest.raises(ValueError) as error:
        origin.find(other)
    assert str(error.value) == (
        f"init_from={tmp_path}/a holds another model:\n"
        "  model.hidden_size was 32, is 64\n  model.num_experts_per_token was 4, is 2"
    )


def test_an_absent_or_unfinished_run_is_named_with_the_command_that_makes_it(tmp_path, monkeypatch, capfd):
    with pytest.raises(ValueError, match="init_from=.*/x: .*it holds no config.json$"):
        origin.find(Config(init_from=str(tmp_path / "x")))
    empty = save(tmp_path / "empty", Config(), steps=())
    with pytest.raises(ValueError, match="init_from=.*/empty: no complete checkpoint in"):
        origin.find(Config(init_from=empty))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", "--config", "tiny_sft"]) == 2
    said = capfd.readouterr().err
    assert "init_from=runs/tiny: runs/tiny is not the folder of a run" in said
    assert "This makes it: k3train train --config " in said and "configs/tiny.py --workdir runs/tiny" in said
    assert not (tmp_path / "runs").exists()


def test_moments_come_along_but_the_schedule_starts_again():
    state = optax.chain(optax.scale_by_adam(), optax.scale_by_schedule(lambda n: n)).init({"w": jnp.ones(2)})
    again = build.restarted(jax.tree.map(lambda x: x + 5, state))
    assert again[1].count == 0 and again[0].count == 5 and (again[0].mu["w"] == 5).all()
