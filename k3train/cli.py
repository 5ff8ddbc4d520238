"""The command line: parses, calls, prints. What each subcommand does lives in the room it calls."""

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from k3train import __version__
from k3train.config import show
from k3train.config.check import ConfigError, check, mesh_size, mesh_text
from k3train.config.load import override, read, split_overrides
from k3train.config.schema import Config
from k3train.config.values import KNOBS
from k3train.core import log

QUANT_KINDS = KNOBS["quant.experts"].choices
DONE, OUR_FAULT, USER_MISTAKE = 0, 1, 2  # a training run also ends with 3 (non-finite) or 4 (steps not reached)

_EPILOG = """\
Any knob of a config file can be changed on the command line: --config.optim.peak_lr=3e-4. The knobs, their values and
where each comes from: k3train show-config --config FILE.
exit codes: 0 done; 1 a fault of k3train; 2 a mistake in what was asked for; 3 training went non-finite;
4 the asked-for steps were not reached
"""


class _Parser(argparse.ArgumentParser):
    """argparse whose refusals are one short message."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}\nusage: {self.prog} -h shows what is accepted")

    def known_options(self) -> list[str]:
        return [option for option in self._option_string_actions if option.startswith("--")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA's own warnings; read when jax is imported, below
    try:
        overrides, rest = split_overrides(arguments)
        parsed = _parse(rest, bool(overrides))
        if hasattr(parsed, "config"):
            parsed.overrides = overrides
        with log.shown("stdout" if parsed.command == "train" else "stderr"):  # elsewhere stdout is for the result
            return parsed.run(parsed)
    except SystemExit as request:  # argparse, after -h or --version
        return int(request.code or 0)
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone
        sys.stderr.close()
        return DONE
    except Exception as error:
        if not _users_mistake(error):
            traceback.print_exc()
            return OUR_FAULT
        print(f"k3train: {_message(error)}", file=sys.stderr)
        return USER_MISTAKE


def _users_mistake(error: BaseException) -> bool:
    """A refusal that k3train raises itself, or a file that is not there or not ours to use; the rest is our fault."""
    if isinstance(error, OSError):
        return error.filename is not None
    origin = traceback.extract_tb(error.__traceback__)[-1]
    refusal = Path(origin.filename).is_relative_to(Path(__file__).parent) and (origin.line or "raise").startswith(
        "raise"
    )
    return isinstance(error, ValueError) and refusal


def _message(error: BaseException) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror or error}"
    return str(error)


def _parse(arguments: list[str], overrides: bool) -> argparse.Namespace:
    parser = _parser()
    commands = parser.get_default("commands")
    named = next((a for a in arguments if not a.startswith("-")), None)
    if named is None and not arguments:
        parser.print_help()
        raise ConfigError(f"choose a command: {', '.join(commands)}")
    if named is not None and named not in commands:
        close = get_close_matches(named, commands, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(f"no command {named}; {hint}commands: {', '.join(commands)}")
    parsed, unknown = parser.parse_known_args(arguments)
    command = commands[parsed.command]
    if unknown:
        options = command.known_options()
        close = get_close_matches(unknown[0].split("=")[0], options, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(f"{parsed.command} does not know {unknown[0]}; {hint}options: {', '.join(options)}")
    if overrides and not hasattr(parsed, "config"):
        raise ConfigError(f"{parsed.command} takes no --config.* values: the run folder holds its configuration")
    return parsed


def _parser() -> _Parser:
    parser = _Parser(
        prog="k3train",
        description="Train models of the Kimi K3 family.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"k3train {__version__}")
    group = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    commands: dict[str, _Parser] = {}

    def command(name: str, run: Callable[[Any], int], text: str) -> _Parser:
        sub = commands[name] = group.add_parser(name, help=text, description=text, allow_abbrev=False)
        sub.set_defaults(run=run)
        return sub

    train = command("train", _train, "train; resumes by itself if the run folder holds a checkpoint")
    _config_option(train)
    train.add_argument("--workdir", type=Path, help="run folder; default runs/<name of the config file>")
    _devices_option(train)

    evaluate = command("eval", _eval, "held-out loss of a run")
    _run_options(evaluate)
    _devices_option(evaluate)

    generate = command("generate", _generate, "continue texts with a trained or imported run")
    _run_options(generate)
    _generate_options(generate)

    plan = command("plan", _plan, "parameters, operations and bytes of a configuration; needs no accelerator")
    _config_option(plan)
    plan.add_argument(
        "--devices", type=int, metavar="N",
        help="also compile the training step for so many devices (simulated, nothing is allocated): bytes, transfers, "
        "step time, whether it fits; minutes for large models",
    )  # fmt: skip
    plan.add_argument("--hardware", metavar="NAME", help="accelerator that --devices are of (h200)")
    plan.add_argument("--optimizer", action="store_true", help="also print which optimizer moves which parameter")
    plan.add_argument("--json", action="store_true", help="print one JSON object")

    import_hf = command("import-hf", _import_hf, "make a run folder from a released checkpoint")
    import_hf.add_argument("source", type=Path, metavar="SOURCE_DIR", help="folder with safetensors and config.json")
    import_hf.add_argument("--workdir", type=Path, required=True, help="run folder to make")
    import_hf.add_argument(
        "--ignore-fields", type=_names, default=(), metavar="NAMES",
        help="fields of config.json to pass over although they are not understood, with commas between",
    )  # fmt: skip

    import_hf.add_argument(
        "--quant", choices=QUANT_KINDS, metavar="KIND",
        help=f"how routed experts compute: {', '.join(QUANT_KINDS)}; default: mxfp4_mxfp8 if they are packed",
    )  # fmt: skip

    export_hf = command("export-hf", _export_hf, "write a checkpoint of a run as a released one")
    export_hf.add_argument("output", type=Path, metavar="OUTPUT_DIR", help="folder to make; must be empty if there")
    _run_options(export_hf)
    export_hf.add_argument("--experts", metavar="KIND", help="mxfp4, bf16 or f32; default: as trained or imported")
    export_hf.add_argument(
        "--layout", metavar="NAME", help="k3, kimi_linear or transformers; default: as imported, or what the model fits"
    )

    data = command("data", _data, "show rows as the model will see them")
    _config_option(data)
    data.add_argument("--examples", type=int, default=1, metavar="N", help="rows to show (1)")

    _config_option(command("show-config", _show_config, "every knob, its value and where the value comes from"))
    parser.set_defaults(commands=commands)
    return parser


def _generate_options(generate: argparse.ArgumentParser) -> None:
    asked = generate.add_mutually_exclusive_group(required=True)
    asked.add_argument("--prompt", help="text to continue")
    asked.add_argument(
        "--prompts", type=Path, metavar="FILE",
        help="texts to continue, one a line (.jsonl: JSON texts); what they begin with in common is computed once",
    )  # fmt: skip
    generate.add_argument(
        "--chat", action="store_true", help="each prompt is a user's message; print the reply in K3's chat template"
    )
    for name, knob in (("mode", KNOBS["data.chat_mode"]), ("effort", KNOBS["data.chat_effort"])):
        generate.add_argument(f"--chat-{name}", choices=knob.choices, help=f"{', '.join(knob.choices)}; as trained")
    generate.add_argument("--max-tokens", type=int, default=200, metavar="N", help="tokens to add at most (200)")
    generate.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0: always the likeliest (1.0)")
    generate.add_argument("--top-p", type=float, default=1.0, metavar="P", help="share of the probability kept (1.0)")
    generate.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the draws (0)")
    generate.add_argument("--report", action="store_true", help="print reused tokens, times and cache bytes of each")
    generate.add_argument("--cache-mib", type=int, default=1024, metavar="N", help="budget of the prefix cache (1024)")
    generate.add_argument("--cache-block", type=int, default=512, metavar="N", help="tokens of its blocks (512)")


def _config_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config", required=True, metavar="FILE", help="config file; --config.a.b=value changes one of its values"
    )


def _devices_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", type=int, metavar="N", help="CPU devices to simulate; default: as the mesh needs")
    parser.add_argument(
        "--multihost", action="store_true", help="find the other processes of this run (Slurm, TPU slice, GKE)"
    )
    parser.add_argument(
        "--join-timeout", type=_seconds, default=300, metavar="S", help="seconds that processes wait for all (300)"
    )
    parser.add_argument(
        "--heartbeat-timeout", type=_seconds, default=100, metavar="S",
        help="seconds of silence after which a process counts as lost, which ends the others (100)",
    )  # fmt: skip


def _run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workdir", type=Path, required=True, help="run folder")
    parser.add_argument("--step", type=int, metavar="N", help="checkpoint to use; default: the newest")


def _seconds(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of seconds above 0")
    return int(text)


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, text.split(",")))


def _load(parsed: argparse.Namespace) -> tuple[Config, dict[str, str]]:
    return override(read(parsed.config), parsed.overrides)


def _start_devices(config: Config, parsed: argparse.Namespace) -> None:
    """Refuse the configuration before anything is compiled, then have the devices of its mesh and all processes."""
    check(config, parsed.devices)
    import jax

    from k3train.parallel import hosts
    from k3train.parallel.devices import keep_compiled_programs, prepare_devices

    keep_compiled_programs()
    join = partial(
        hosts.join,
        discover=parsed.multihost,
        join_timeout=parsed.join_timeout,
        heartbeat_timeout=parsed.heartbeat_timeout,
    )
    processes = hosts.asked_for()[1]
    check(config, prepare_devices(mesh_size(config.mesh), parsed.devices, processes=processes, join=join))
    if jax.process_index():
        log.show_warnings_only()


def _train(parsed: argparse.Namespace) -> int:
    config, sources = _load(parsed)
    _start_devices(config, parsed)
    from k3train.audit import params
    from k3train.inference.run import load
    from k3train.train.loop import train

    workdir = parsed.workdir or Path("runs") / Path(parsed.config).stem
    prompt = config.log.sample

    def sample(_: Any) -> str:
        return prompt + load(workdir).generate([prompt], temperature=0.7)[0]

    table = params.table(params.count(config))
    return train(config, workdir, sources, header=table, sample=sample if prompt else None)


def _eval(parsed: argparse.Namespace) -> int:
    from k3train.train.evaluate import evaluate_run
    from k3train.train.run_folder import RunFolder

    _start_devices(RunFolder(parsed.workdir).read_config(), parsed)
    for name, value in evaluate_run(parsed.workdir, parsed.step).items():
        print(f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}")
    return DONE


def _generate(parsed: argparse.Namespace) -> int:
    from k3train.inference.answer import read_prompts, report
    from k3train.inference.prefix_cache import PrefixCache
    from k3train.inference.run import load
    from k3train.parallel.devices import keep_compiled_programs

    if not parsed.chat and (parsed.chat_mode or parsed.chat_effort):
        raise ConfigError("--chat-mode and --chat-effort are for --chat")
    prompts = read_prompts(parsed.prompts) if parsed.prompts else [parsed.prompt]
    cache = PrefixCache(parsed.cache_mib * 2**20, parsed.cache_block)
    keep_compiled_programs()
    run = load(parsed.workdir, parsed.step)
    options = {name: getattr(parsed, name) for name in ("max_tokens", "temperature", "top_p", "seed")}
    if parsed.chat:
        messages = [{"messages": [{"role": "user", "content": prompt}]} for prompt in prompts]
        answers = run.replies(messages, cache, mode=parsed.chat_mode, effort=parsed.chat_effort, **options)
    else:
        answers = run.answers(prompts, cache, **options)
    done = []
    for prompt, answer in zip(prompts, answers, strict=True):
        print(answer.text if parsed.chat else prompt + answer.text, flush=True)
        if answer.reply and answer.reply.fault:
            print(f"reply {len(done)} {answer.reply.fault}", file=sys.stderr)
        done.append(answer)
    if parsed.report:
        print(f"\n{report(done)}")
    return DONE


def _plan(parsed: argparse.Namespace) -> int:
    config, _ = _load(parsed)
    check(config, trainable=False)
    if parsed.devices is not None:
        return _plan_pod(parsed, config)
    if parsed.hardware is not None:
        raise ConfigError("--hardware has no effect without --devices N")
    from k3train.audit import flops, memory, params

    if parsed.json:
        head = {"config": parsed.config, "devices": mesh_size(config.mesh)}
        body = {**params.report(config), "flops_per_token": flops.report(config), **memory.report(config)}
        print(json.dumps({**head, **body}, indent=2))
        return DONE
    print(f"mesh: {mesh_text(config.mesh)}\n\n{params.table(params.count(config))}\n\n{params.CONVENTION}\n")
    print(params.bytes_text(config))
    print(f"{flops.text(config)}\n\n{memory.text(config)}")
    if parsed.optimizer:
        print(f"\n{params.optimizer_text(config)}")
    return DONE


def _plan_pod(parsed: argparse.Namespace, config: Config) -> int:
    import jax

    jax.config.update("jax_platforms", "cpu")  # whatever this machine has, the devices are simulated
    from k3train.audit import flops, pod
    from k3train.audit.hardware import hardware
    from k3train.parallel.devices import prepare_devices

    device = parsed.hardware or "h200"
    hardware(device)
    pod.fitted(config, parsed.devices)  # refused before minutes are spent
    prepare_devices(parsed.devices)
    found = pod.plan(config, parsed.devices, device)
    if parsed.json:
        head = {"config": parsed.config, "devices": parsed.devices}
        print(json.dumps({**head, **pod.report(found), "flops_per_token": flops.report(found.config)}, indent=2))
    else:
        print(pod.text(found))
    return DONE


def _import_hf(parsed: argparse.Namespace) -> int:
    from k3train.checkpoint.hf_import import import_hf

    import_hf(parsed.source, parsed.workdir, ignore=parsed.ignore_fields, quant=parsed.quant)
    return DONE


def _export_hf(parsed: argparse.Namespace) -> int:
    from k3train.checkpoint.hf_export import export_hf

    export_hf(parsed.workdir, parsed.output, experts=parsed.experts, layout=parsed.layout, step=parsed.step)
    return DONE


def _data(parsed: argparse.Namespace) -> int:
    config, _ = _load(parsed)
    check(config)
    from k3train.data.loader import make_train_loader
    from k3train.data.show import render_examples

    loader = make_train_loader(config.data, config.seed)
    print(render_examples(loader, parsed.examples, colour=sys.stdout.isatty()))
    return DONE


def _show_config(parsed: argparse.Namespace) -> int:
    recipe = read(parsed.config)
    config, sources = override(recipe, parsed.overrides)
    check(config, trainable=False)
    print(show.text(config, sources, recipe.released))
    return DONE
