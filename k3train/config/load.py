"""Config file -> overrides from the command line -> frozen dataclasses.

A config file is Python of the user's own, with `get_config()` returning the differences from the schema. The
`config.json` of a run is data: it is read here too, and never executed. A run's folder may stand for a config file: the
configuration of a trained or imported run to start from.
"""

import json
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from ml_collections import ConfigDict, FieldReference

from k3train.config.check import ConfigError, lookup
from k3train.config.schema import PHASE_VALUES, SECTIONS, Config
from k3train.config.values import KNOBS, at, convert, flat_values, flatten, freeze, parse, unknown

COMMAND_LINE = "command line"
RUN_CONFIG = "config.json"
_REPOSITORY_CONFIGS = Path(__file__).resolve().parents[2] / "configs"


class Knobs(ConfigDict):
    """A locked ConfigDict that refuses unknown keys and wrong types at the line that writes them.

    It remembers in `given` which knobs were written, also those that got the value they had.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "", given: set[str] | None = None):
        super().__init__()
        object.__setattr__(self, "_prefix", prefix)
        object.__setattr__(self, "_given", set() if given is None else given)
        for name, value in values.items():
            self._fields[name] = Knobs(value, f"{name}.", self._given) if isinstance(value, dict) else value
        self.lock()

    @property
    def given(self) -> set[str]:
        return self._given

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        if name not in self._fields:
            raise unknown(self._prefix + name, "")
        return self[name]

    def __setitem__(self, key: str, value: Any) -> None:
        path = f"{self._prefix}{key}"
        if path in SECTIONS:
            self._replace_section(path, value)
        elif isinstance(value, FieldReference):
            convert(path, value.get(), "")
            super().__setitem__(key, value)
            self._given.add(path)
        else:
            super().__setitem__(key, convert(path, value, ""))
            self._given.add(path)

    def _replace_section(self, name: str, value: Any) -> None:
        if not isinstance(value, Mapping | ConfigDict):
            raise ConfigError(f"{name} is a section; set its values one by one, not {name}={value!r}")
        given = {f"{name}.{key}" for key in value}
        for path in sorted(given - KNOBS.keys()):
            raise unknown(path, "")
        missing = [path for path in KNOBS if path.startswith(f"{name}.") and path not in given]
        if missing:
            raise ConfigError(
                f"replacing the section {name} drops {', '.join(missing)}; "
                f"write cfg.{name}.update(...) to change some of its values"
            )
        self._fields[name].update(value)


def new_config() -> Knobs:
    """Every knob at its default; the start of a config file."""
    return Knobs(asdict(Config()))


@dataclass
class Recipe:
    """A config file as read, before overrides from the command line."""

    path: Path
    values: dict[str, Any]  # every knob
    sources: dict[str, str]  # where each value comes from
    given: set[str]  # knobs that a file wrote
    #: Released values that no knob holds: name -> (value, why nothing here depends on it).
    released: dict[str, tuple[Any, str]] = field(default_factory=dict)


@dataclass
class _Reading:
    """The config files being read: folders of the open ones, and what the finished ones said, base first."""

    folders: list[Path] = field(default_factory=list)
    finished: list[tuple[ModuleType, dict[str, Any]]] = field(default_factory=list)


_reading = _Reading()


def find(name: str | Path) -> Path:
    """Path of a config file given by its path, its bare name in a configs folder, or the folder of a run.

    Raises:
        ConfigError: there is no such file.
    """
    path = Path(name)
    if path.is_file():
        return path.resolve()
    if (path / RUN_CONFIG).is_file():
        return (path / RUN_CONFIG).resolve()
    folders = [*_reading.folders[-1:], Path("configs"), _REPOSITORY_CONFIGS]
    known = {p.stem: p for folder in reversed(folders) for p in sorted(folder.glob("*.py"))}
    if str(name) in known:
        return known[str(name)].resolve()
    close = get_close_matches(path.stem, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(_shown(known[stem]) for stem in close)}? " if close else ""
    raise ConfigError(f"config file {name} not found; {hint}config files here: {', '.join(sorted(known)) or 'none'}")


def _shown(path: Path) -> str:
    here = Path.cwd()
    return str(path.resolve().relative_to(here) if path.resolve().is_relative_to(here) else path)


def derive(name: str) -> Knobs:
    """The configuration of another config file, to be changed further; called inside `get_config()`."""
    return _execute(find(name))


def _execute(path: Path) -> Knobs:
    """Run a config file, or read that of a run, and note what it said."""
    module = ModuleType(f"k3train_config_{path.stem}")
    if path.name == RUN_CONFIG:
        resolved = from_json(path.read_text(encoding="utf-8"), _shown(path))
        config = Knobs(asdict(resolved))
        by_phase = {key for key, value in PHASE_VALUES[resolved.phase].items() if lookup(resolved, key) == value}
        config.given.update(KNOBS.keys() - by_phase)  # what its phase had set may change with the phase
        _reading.finished.append((module, flatten(config.to_dict(), _shown(path))))
        return config
    module.__file__ = str(path)
    _reading.folders.append(path.parent)
    try:
        exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)  # the user's own program
        config = module.get_config()
    except Exception as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else 1
        text = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{_shown(path)}:{line}: {text}") from error
    finally:
        _reading.folders.pop()
    if not isinstance(config, Knobs):
        raise ConfigError(f"{_shown(path)}: get_config() must return the config that new_config() or derive() gave it")
    _reading.finished.append((module, flatten(config.to_dict(), _shown(path))))
    return config


def read(name: str | Path) -> Recipe:
    """Read one config file, without the checks of a whole configuration.

    Raises:
        ConfigError: the file is missing, fails, or sets what does not exist.
    """
    path = find(name)
    _reading.finished.clear()
    given = _execute(path).given
    values = flat_values(freeze(_reading.finished[-1][1], _shown(path)))
    recipe = Recipe(path, values, {}, given)
    for module, _ in _reading.finished:
        tags = getattr(module, "SOURCES", {})
        for key in tags:
            if key not in KNOBS:
                raise unknown(key, f"{_shown(path)}: SOURCES")
        recipe.released |= getattr(module, "RELEASED", {})
    for key, value in values.items():
        recipe.sources[key] = _source(key, value, path)
    return recipe


def _source(key: str, value: Any, path: Path) -> str:
    """The tag of the file that gave the value, the file's name, or the schema's source of a default."""
    for module, said in reversed(_reading.finished):
        tags = getattr(module, "SOURCES", {})
        if key in tags and said[key] == value:
            return tags[key]
    if value != KNOBS[key].default:
        return path.name
    return f"default, {KNOBS[key].source}"


def split_overrides(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """(overrides as `--config.a.b=value`, the other arguments). The value may also be the next argument.

    Raises:
        ConfigError: an override without a value.
    """
    overrides, others = [], []
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("--config."):
            others.append(argument)
        elif "=" in argument:
            overrides.append(argument)
        else:
            value = next(rest, None)
            if value is None or value.startswith("--"):
                raise ConfigError(f"{argument} needs a value: {argument}=...")
            overrides.append(f"{argument}={value}")
    return overrides, others


def load(name: str | Path, overrides: Sequence[str] = ()) -> tuple[Config, dict[str, str]]:
    """(frozen configuration, where each value comes from) of a config file and `--config.a.b=value` overrides.

    Raises:
        ConfigError: see `read`; an override of an unknown key or with a value of the wrong type.
    """
    return override(read(name), overrides)


def override(recipe: Recipe, overrides: Sequence[str]) -> tuple[Config, dict[str, str]]:
    """The recipe with overrides applied, frozen; later overrides win. What nobody gave is as the phase has it."""
    values, sources, given = dict(recipe.values), dict(recipe.sources), set(recipe.given)
    for argument in split_overrides(overrides)[0]:
        key, text = argument.removeprefix("--config.").split("=", 1)
        values[key] = parse(key, text, COMMAND_LINE)
        sources[key] = COMMAND_LINE
        given.add(key)
    for key, value in PHASE_VALUES[values["phase"]].items():
        if key not in given and values[key] != value:
            values[key], sources[key] = value, f"phase={values['phase']}"
    return freeze(values, str(recipe.path)), sources


def to_json(config: Config) -> str:
    """The text of a run's `config.json`."""
    return json.dumps(asdict(config), indent=2) + "\n"


def read_run(folder: Path) -> Config:
    """The configuration of a run, from its folder.

    Raises:
        ConfigError: this is not a run's folder, or its config.json is damaged.
    """
    file = folder / RUN_CONFIG
    try:
        text = file.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{folder} is not the folder of a run: it holds no {RUN_CONFIG}") from None
    return from_json(text, str(file))


def from_json(text: str, where: str = "config.json") -> Config:
    """The configuration of a run's `config.json`.

    Raises:
        ConfigError: not JSON, unknown or missing keys, wrong types.
    """
    try:
        tree = json.loads(text)
    except json.JSONDecodeError as error:
        raise at(where, f"line {error.lineno} is not JSON ({error.msg})") from error
    if not isinstance(tree, dict):
        raise at(where, "must hold one JSON object")
    return freeze(flatten(tree, where), where)
