"""A configuration as a table: every knob, its value, where the value comes from."""

import json
from collections.abc import Mapping
from typing import Any

from k3train.config.schema import Config
from k3train.config.values import flat_values


def text(config: Config, sources: Mapping[str, str], released: Mapping[str, tuple[Any, str]]) -> str:
    """What `k3train show-config` prints.

    Args:
        sources: of the value of every knob.
        released: released values that no knob holds, and why nothing depends on them.
    """
    tables = [
        ("knob, value, source", [(k, _shown(value), sources[k]) for k, value in flat_values(config).items()]),
        (
            "released value that no knob holds, why nothing depends on it",
            [(name, _shown(value), why) for name, (value, why) in released.items()],
        ),
    ]
    return "\n\n".join(_table(title, rows) for title, rows in tables if rows)


def _table(title: str, rows: list[tuple[str, str, str]]) -> str:
    name_width = max(len(name) for name, _, _ in rows)
    value_width = min(24, max(len(value) for _, value, _ in rows))  # a long list pushes only its own line
    lines = (f"{name:<{name_width}}  {value:<{value_width}}  {note}" for name, value, note in rows)
    return "\n".join((f"# {title}", *lines))


def _shown(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)
