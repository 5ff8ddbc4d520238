"""The knobs as one flat table, and what a value of each may look like in a file, in JSON or on the command line."""

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple, get_type_hints

from k3train.config.check import ConfigError
from k3train.config.schema import SECTIONS, Config

Path = str  # dotted: "optim.peak_lr"


class Knob(NamedTuple):
    """One line of the schema."""

    kind: Any  # int, float, bool, str or tuple[int, ...]
    default: Any
    doc: str
    source: str
    choices: tuple[str, ...]


def _knobs(owner: type, prefix: str = "") -> dict[Path, Knob]:
    kinds = get_type_hints(owner)
    found = {}
    for f in fields(owner):
        if f.name in SECTIONS and not prefix:
            found |= _knobs(kinds[f.name], f"{f.name}.")
        else:
            meta = f.metadata
            found[prefix + f.name] = Knob(kinds[f.name], f.default, meta["doc"], meta["source"], meta["choices"])
    return found


#: Every knob in the order of the schema.
KNOBS: dict[Path, Knob] = _knobs(Config)
KIND_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    tuple[int, ...]: "whole numbers separated by commas",
}


def nearest(path: Path) -> list[Path]:
    """Up to three knobs whose dotted name is close to `path`, best first; a right name in the wrong section counts."""
    leaf = path.rsplit(".", 1)[-1]

    def score(known: Path) -> float:
        whole = difflib.SequenceMatcher(None, path, known).ratio()
        return max(whole, 0.98 * difflib.SequenceMatcher(None, leaf, known.rsplit(".", 1)[-1]).ratio())

    best = sorted(((score(known), known) for known in KNOBS), key=lambda pair: (-pair[0], pair[1]))[:3]
    return [known for value, known in best if value >= max(0.6, best[0][0] - 0.1)]


def at(where: str, message: str) -> ConfigError:
    """A refusal that says first where the value stands."""
    return ConfigError(f"{where}: {message}" if where else message)


def unknown(path: Path, where: str) -> ConfigError:
    """The refusal of a key that does not exist."""
    if path in SECTIONS:
        inside = ", ".join(known for known in KNOBS if known.startswith(path + "."))
        return at(where, f"{path} is a section, not a value; it holds {inside}")
    close = nearest(path)
    if close:
        hint = f"did you mean {' or '.join(close)}?"
    else:
        section = path.split(".")[0]
        names = [known for known in KNOBS if known.startswith(section + ".")] or [*SECTIONS, "num_steps", "seed"]
        hint = f"known here: {', '.join(names)}"
    return at(where, f"unknown key {path}; {hint}")


def _expected(knob: Knob) -> str:
    return f"one of {', '.join(knob.choices)}" if knob.choices else KIND_NAMES[knob.kind]


def _close(value: Any, knob: Knob) -> str:
    near = difflib.get_close_matches(str(value), knob.choices, n=1)
    return f"did you mean {near[0]}? " if near else ""


def convert(path: Path, value: Any, where: str) -> Any:
    """`value` from a Python file or JSON as the knob's type: an int does for a float, never the other way round.

    Raises:
        ConfigError: unknown knob or wrong type.
    """
    if path not in KNOBS:
        raise unknown(path, where)
    knob = KNOBS[path]
    whole = isinstance(value, int) and not isinstance(value, bool)
    if knob.kind is float and (whole or isinstance(value, float)) and math.isfinite(value):
        return float(value)
    if knob.kind is int and whole:
        return int(value)
    if knob.kind is bool and isinstance(value, bool):
        return value
    if knob.kind is str and isinstance(value, str) and (not knob.choices or value in knob.choices):
        return value
    if knob.kind == tuple[int, ...] and isinstance(value, list | tuple):
        items = list(value)
        if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            return tuple(items)
    raise at(where, f"{path}={value!r} is not accepted; {_close(value, knob)}expected {_expected(knob)}")


def parse(path: Path, text: str, where: str) -> Any:
    """A value typed on the command line.

    Whole numbers may be written `1_000` or `1e3`, lists `0,1,2`, `(0,1,2)` or `[0,1,2]`.

    Raises:
        ConfigError: unknown knob, or text that is not of its type.
    """
    if path not in KNOBS:
        raise unknown(path, where)
    knob = KNOBS[path]
    value: Any = text
    if knob.kind is bool:
        value = {"true": True, "false": False}.get(text.lower(), text)
    elif knob.kind is int:
        value = _whole(text)
    elif knob.kind is float:
        try:
            value = float(text)
        except ValueError:
            value = text
    elif knob.kind == tuple[int, ...]:
        value = _whole_numbers(text)
    return convert(path, value, where)


def _whole(text: str) -> int | str:
    """The number, or the text itself if it is not a whole number."""
    if re.fullmatch(r"[+-]?\d[\d_]*", text):
        return int(text)
    if re.fullmatch(r"[+-]?\d+[eE]\+?\d{1,3}", text):
        digits, exponent = re.split("[eE]", text)
        return int(digits) * 10 ** int(exponent)
    return text


def _whole_numbers(text: str) -> list[int] | str:
    """The list, or the text itself if it is not a list of whole numbers. An empty list is written `()`."""
    inner = text.strip()
    if (inner[:1], inner[-1:]) in (("(", ")"), ("[", "]")):
        inner = inner[1:-1].strip()
        if not inner:
            return []
    numbers = [_whole(part.strip()) for part in inner.removesuffix(",").split(",")]
    whole = [number for number in numbers if isinstance(number, int)]
    return whole if len(whole) == len(numbers) else text


def flatten(tree: Mapping[str, Any], where: str) -> dict[Path, Any]:
    """Dotted keys of nested mappings. Values are left as they are; unknown keys are refused."""
    flat: dict[Path, Any] = {}
    for name, value in tree.items():
        if name in SECTIONS and isinstance(value, Mapping):
            for inner, leaf in value.items():
                flat[f"{name}.{inner}"] = leaf
        else:
            flat[str(name)] = value
    for path in flat:
        if path not in KNOBS:
            raise unknown(path, where)
    return flat


def flat_values(config: Config) -> dict[Path, Any]:
    """Every knob of a configuration."""
    values = {}
    for path in KNOBS:
        section, _, name = path.rpartition(".")
        values[path] = getattr(getattr(config, section) if section else config, name)
    return values


def freeze(flat: Mapping[Path, Any], where: str) -> Config:
    """The frozen configuration of exactly these knobs.

    Raises:
        ConfigError: unknown or missing knobs, wrong types.
    """
    values = {path: convert(path, value, where) for path, value in flat.items()}
    missing = [path for path in KNOBS if path not in values]
    if missing:
        raise at(where, f"missing {', '.join(missing)}")
    kinds = get_type_hints(Config)
    sections = {
        name: kinds[name](**{p.split(".")[1]: v for p, v in values.items() if p.startswith(name + ".")})
        for name in SECTIONS
    }
    return Config(**sections, **{path: value for path, value in values.items() if "." not in path})
