"""The table of phases: what each turns on, carries over and resets is said before a run starts."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from k3train.config.load import load
from k3train.config.schema import PHASE_VALUES, Config, OptimConfig
from k3train.train.origin import Origin
from k3train.train.phases import PHASES, check, described
from k3train.train.run_folder import RunFolder

ORIGIN = Origin(RunFolder(Path("runs/a")), 120, True, ["data.seq_len was 32, is 64"])


def said(config: Config, origin: Origin | None = None) -> str:
    check(config)
    return "\n".join(described(config, origin))


def test_every_phase_of_the_schema_has_a_row():
    choices = next(f for f in fields(Config) if f.name == "phase").metadata["choices"]
    assert tuple(PHASES) == tuple(PHASE_VALUES) == choices


def test_pretrain_starts_fresh_or_from_another_run():
    fresh = said(Config(seed=7))
    assert "phase pretrain" in fresh and "fresh weights from seed 7" in fresh and "quantised: nothing" in fresh
    assert "turns on" not in fresh
    config = Config(init_from="runs/a")
    continued = said(config, ORIGIN)
    assert "carries over from runs/a, step 120: weights, router bias\n    data.seq_len was 32, is 64" in continued
    assert "starts anew: learning-rate schedule, data position, step, optimizer moments" in continued
    assert "router bias: moved by optim.balance=quantile" in continued
    assert "router bias: frozen" in said(replace(config, optim=OptimConfig(balance="none")), ORIGIN)


@pytest.mark.parametrize("phase", ["long_context", "cooldown", "sft"])
def test_later_phases_need_a_run_before_them(phase):
    config = Config(phase=phase)
    with pytest.raises(ValueError, match=f"phase={phase} .*--config.init_from=DIR"):
        check(config)
    check(replace(config, init_from="runs/a"))


@pytest.mark.parametrize("phase", ["long_context", "cooldown"])
def test_longer_rows_go_on_with_the_moments(phase):
    config = Config(phase=phase, init_from="runs/a")
    assert "step 120: weights, router bias, optimizer moments" in said(config, ORIGIN)
    assert "starts anew: learning-rate schedule, data position, step\n" in said(config, ORIGIN)
    imported = said(config, ORIGIN._replace(has_optimizer=False))
    assert "step, optimizer moments\n" in imported and "there are no moments: it was imported" in imported


def test_sft_quantises_unless_the_configuration_says_otherwise():
    config, sources = load("tiny_sft")
    assert (config.phase, config.quant.experts, sources["quant.experts"]) == ("sft", "mxfp4_mxfp8", "phase=sft")
    text = said(config, ORIGIN)
    assert "turns on, where the configuration does not say otherwise: quant.experts=mxfp4_mxfp8" in text
    assert "weights in MXFP4" in text and "inputs" not in text
    assert "starts anew: learning-rate schedule, data position, step, optimizer moments" in text
    for kind, words in (("none", "quantised: nothing"), ("mxfp4", "what they are multiplied with as they are")):
        config, sources = load("tiny_sft", [f"--config.quant.experts={kind}"])
        assert (config.quant.experts, sources["quant.experts"]) == (kind, "command line")
        assert words in said(config, ORIGIN)
