"""A small real set of conversations without network: questions about the standard library, answered from its sources.

Every public function, class and method with a docstring makes one conversation, of one of four kinds chosen by hash of
its name: what it does, how it is declared, both one after the other, and looking it up with a tool. Answers are the
first sentence of the docstring and the signature, as they stand in the source.
"""

import ast
import hashlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

#: Characters of name, signature and first sentence together; more would not fit in the rows of a small model.
_LONGEST = 200

#: Programs, tables and packages that newer versions of Python no longer have.
_APART = {"distutils", "encodings", "idlelib", "lib2to3", "turtledemo"}

_LOOK_UP = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
}


class _Entry(NamedTuple):
    """One public name of a module."""

    name: str  # dotted, from the module on
    kind: str  # function, class or method
    module: str
    summary: str
    signature: str


def conversations(files: list[Path], root: Path) -> list[tuple[str, dict[str, Any]]]:
    """(name, record in the OpenAI messages form) of each conversation, in order of the files.

    Args:
        files: Python sources; those that do not parse, private modules and `_APART` give nothing.
        root: module names are relative to it.
    """
    found, seen = [], set()
    for path in files:
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if parts[0] in _APART or any(part.startswith("_") for part in module.split(".")):
            continue
        for entry in _entries(path, module):
            # The same sentence about another name would be a held-out question with a known answer.
            if entry.summary not in seen and entry.name not in seen:
                seen |= {entry.summary, entry.name}
                found.append((entry.name, _record(entry)))
    return found


def _entries(path: Path, module: str) -> Iterator[_Entry]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in strings
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):  # templates and examples of broken code
        return
    for node in tree.body:
        yield from _entry(node, module, module, "function")
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for member in node.body:
                yield from _entry(member, f"{module}.{node.name}", module, "method")


def _entry(node: ast.stmt, owner: str, module: str, kind: str) -> Iterator[_Entry]:
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
        return
    summary = _first_sentence(ast.get_docstring(node) or "")
    if isinstance(node, ast.ClassDef):
        kind = "class"
        bases = ", ".join(map(ast.unparse, node.bases))
        signature = f"class {node.name}({bases})" if bases else f"class {node.name}"
    else:
        signature = f"{node.name}({ast.unparse(node.args)})"
    name = f"{owner}.{node.name}"
    if summary and len(name) + len(signature) + len(summary) <= _LONGEST:
        yield _Entry(name, kind, module, summary, signature)


def _first_sentence(docstring: str) -> str:
    """The first sentence, on one line; empty where it says nothing."""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    sentence = paragraph.partition(". ")[0].rstrip(".")
    return f"{sentence}." if len(sentence) >= 15 and " " in sentence else ""


def _record(entry: _Entry) -> dict[str, Any]:
    kind = hashlib.sha256(entry.name.encode()).digest()[-1] % 8
    what = [
        {"role": "user", "content": f"What does `{entry.name}` do?"},
        {
            "role": "assistant",
            "reasoning_content": f"A {entry.kind} of the module {entry.module}.",
            "content": entry.summary,
        },
    ]
    how = [
        {"role": "user", "content": f"How is `{entry.name}` declared?"},
        {"role": "assistant", "content": f"`{entry.signature}`"},
    ]
    if kind < 4:
        return {"messages": what}
    if kind < 6:
        return {"messages": how}
    return {"messages": what + how} if kind < 7 else _looked_up(entry)


def _looked_up(entry: _Entry) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": {"name": entry.name}}}
    messages = [
        {"role": "user", "content": f"Look up `{entry.name}`."},
        {"role": "assistant", "reasoning_content": "The tool knows.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": f"{entry.signature}\n{entry.summary}"},
        {"role": "assistant", "content": entry.summary},
    ]
    return {"messages": messages, "tools": [_LOOK_UP]}
