"""Write a small real chat set without network: questions about the standard library of the running Python.

python scripts/prepare_data.py FOLDER [--eval-fraction 0.05]

FOLDER/train.jsonl and FOLDER/heldout.jsonl hold what data.source=stdlib_chat makes on the spot, a conversation a line
in the OpenAI messages form, split by hash of its name as the loader does. The same Python writes the same bytes.
"""

import argparse
import json
import sys
from pathlib import Path

from k3train.data.sources import held_out, standard_library
from k3train.data.stdlib_chat import conversations


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--eval-fraction", type=float, default=0.05, help="share of the conversations held out")
    asked = parser.parse_args()
    found = conversations(*standard_library())
    out = held_out([name for name, _ in found], asked.eval_fraction)
    asked.folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for file, side in (("train.jsonl", False), ("heldout.jsonl", True)):
        chosen = [{"id": name, **record} for (name, record), held in zip(found, out, strict=True) if held == side]
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in chosen]
        paths.append(asked.folder / file)
        paths[-1].write_text("".join(lines), encoding="utf-8")
        print(f"{paths[-1]}: {len(lines):,} conversations")
    train, heldout = paths
    print(f"to use: --config.data.source=chat --config.data.path={train} --config.data.eval_path={heldout}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
