"""The table of phases: what is there is explained, what is not there is refused."""

from dataclasses import fields, replace

import pytest

from k3train.config.schema import Config, OptimConfig
from k3train.train.phases import PHASES, resolve


def test_every_phase_of_the_schema_has_a_row():
    choices = next(f for f in fields(Config) if f.name == "phase").metadata["choices"]
    assert tuple(PHASES) == choices


def test_pretrain_starts_fresh_or_from_another_run():
    fresh = "\n".join(resolve(Config(seed=7)))
    assert "pretrain" in fresh and "fresh weights from seed 7" in fresh
    assert "routed experts: not quantised" in fresh
    continued = "\n".join(resolve(Config(init_from="runs/a")))
    assert "weights and router bias from runs/a" in continued
    assert "starts anew: optimizer state, learning-rate schedule, data position, step" in continued
    assert "router bias: moved by optim.balance=quantile" in continued
    frozen = Config(init_from="runs/a", optim=OptimConfig(balance="none"))
    assert "router bias: frozen" in "\n".join(resolve(frozen))


@pytest.mark.parametrize("phase", ["long_context", "cooldown"])
def test_later_phases_need_a_run_before_them(phase):
    config = Config(phase=phase)
    with pytest.raises(ValueError, match=f"phase={phase} .*--config.init_from=DIR"):
        resolve(config)
    assert "from runs/a" in "\n".join(resolve(replace(config, init_from="runs/a")))


def test_a_phase_that_needs_what_is_not_there_is_refused():
    with pytest.raises(ValueError, match="phase=sft needs .*accepted: pretrain, long_context, cooldown"):
        resolve(Config(phase="sft", init_from="runs/a"))
