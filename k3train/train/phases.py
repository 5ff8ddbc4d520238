"""Phases of training as one table (docs/k3.md section 3.5): what each turns on, carries over and resets.

Within a run folder nothing resets: a resumed run carries everything. The table says what happens between runs, when
`init_from` names the run that came before. Which knobs a phase sets: `config.schema.PHASE_VALUES`.
"""

from dataclasses import dataclass

from k3train.config.schema import PHASE_VALUES, Config
from k3train.model.k3 import blueprint
from k3train.model.quantise import described as quantised
from k3train.train.origin import Origin


@dataclass(frozen=True)
class Phase:
    """A row of the table.

    Attributes:
        purpose: what the phase is for.
        needs_init: it continues from the weights of another run.
        moments: the optimizer's moments come along with weights and router bias, as far as the run before has any.
        resets: what starts anew, whatever came before.
    """

    purpose: str
    needs_init: bool
    moments: bool
    resets: tuple[str, ...] = ("learning-rate schedule", "data position", "step")


PHASES: dict[str, Phase] = {
    "pretrain": Phase("next-token training", needs_init=False, moments=False),
    "long_context": Phase("the same objective on longer rows (data.seq_len)", needs_init=True, moments=True),
    "cooldown": Phase("the longest rows (data.seq_len), down to optim.final_lr", needs_init=True, moments=True),
    "sft": Phase("supervised fine-tuning, routed experts quantised in the loop", needs_init=True, moments=False),
}


def check(config: Config) -> None:
    """Raises ValueError where the phase needs what the configuration does not give."""
    if PHASES[config.phase].needs_init and not config.init_from:
        raise ValueError(f"phase={config.phase} continues another run: --config.init_from=DIR must name its folder")


def described(config: Config, origin: Origin | None) -> list[str]:
    """What the phase of `config` means for a new run, one line each, to be printed.

    Args:
        origin: the run of `config.init_from`, if it names one.
    """
    phase = PHASES[config.phase]
    turned_on = [f"{key}={value}" for key, value in PHASE_VALUES[config.phase].items() if value != "none"]
    carried, anew = ["weights", "router bias"], list(phase.resets)
    (carried if origin and phase.moments and origin.has_optimizer else anew).append("optimizer moments")
    lines = [f"phase {config.phase}: {phase.purpose}"]
    if turned_on:
        lines.append(f"  turns on, where the configuration does not say otherwise: {', '.join(turned_on)}")
    if origin is None:
        lines.append(f"  starts with: fresh weights from seed {config.seed}, router bias zero")
    else:
        lines.append(f"  carries over from {config.init_from}, step {origin.step}: {', '.join(carried)}")
        lines += [f"    {note}" for note in origin.notes]
        if phase.moments and not origin.has_optimizer:
            lines.append("    there are no moments: it was imported")
    lines.append(f"  starts anew: {', '.join(anew)}")
    balance = config.optim.balance
    lines.append(f"  router bias: {'frozen' if balance == 'none' else f'moved by optim.balance={balance}'}")
    return lines + quantisation(config)


def quantisation(config: Config) -> list[str]:
    """What is rounded in the forward pass, one line for each stack of layers, to be printed."""
    return quantised(blueprint(config.model).infos, config.quant)
