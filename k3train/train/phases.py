"""Phases of training as one table (docs/k3.md section 3.5): what each turns on, carries over and resets.

Within a run folder nothing resets: a resumed run carries everything. The table says what happens between runs, when
`init_from` names the run that came before.
"""

from dataclasses import dataclass

from k3train.config.schema import Config


@dataclass(frozen=True)
class Phase:
    """A row of the table.

    Attributes:
        purpose: what the phase is for.
        needs_init: it continues from the weights of another run.
        carries: what `init_from` brings along.
        resets: what starts anew.
        lacks: what the phase turns on and this version does not have; such a phase is refused.
    """

    purpose: str
    needs_init: bool
    carries: tuple[str, ...] = ("weights", "router bias")
    resets: tuple[str, ...] = ("optimizer state", "learning-rate schedule", "data position", "step")
    lacks: tuple[str, ...] = ()


PHASES: dict[str, Phase] = {
    "pretrain": Phase("next-token training from fresh weights", needs_init=False),
    "long_context": Phase("the same objective on longer rows", needs_init=True),
    "cooldown": Phase("the longest rows, learning rate to its end", needs_init=True),
    "sft": Phase(
        "supervised fine-tuning, routed experts quantised in the loop",
        needs_init=True,
        lacks=("chat data with a loss mask", 'quant.experts="mxfp4_mxfp8"'),
    ),
}


def resolve(config: Config) -> list[str]:
    """What the phase of `config` means for a new run, one line each, to be printed.

    Raises:
        ValueError: the phase needs what is not there.
    """
    phase = PHASES[config.phase]
    if phase.lacks:
        usable = ", ".join(name for name, row in PHASES.items() if not row.lacks)
        lacks = " and ".join(phase.lacks)
        raise ValueError(f"phase={config.phase} needs {lacks}, not available yet; accepted: {usable}")
    if phase.needs_init and not config.init_from:
        raise ValueError(f"phase={config.phase} continues another run: --config.init_from=DIR must name its folder")
    balance = config.optim.balance
    if config.init_from:
        origin = f"{' and '.join(phase.carries)} from {config.init_from}"
    else:
        origin = f"fresh weights from seed {config.seed}, router bias zero"
    return [
        f"phase {config.phase}: {phase.purpose}",
        f"  starts with: {origin}",
        f"  starts anew: {', '.join(phase.resets)}",
        f"  router bias: {'frozen' if balance == 'none' else f'moved by optim.balance={balance}'}",
        f"  routed experts: {'not quantised' if config.quant.experts == 'none' else config.quant.experts}",
    ]
