"""A peer measured turn by turn with ours, in a process and an environment of its own.

The peer's process runs the same script with `--serve-peer`; it computes only when asked, so both see the same machine.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any


def milliseconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - start)


def serve(make: Callable[[dict], Callable[[], Any]]) -> None:
    """Reads JSON lines that describe a case, answers each with the milliseconds of one run."""
    key, run = None, None
    for line in sys.stdin:
        if line != key:
            key, run = line, make(json.loads(line))
            run()
        assert run is not None
        print(json.dumps(milliseconds(run)), flush=True)


class Peer:
    """The other process.

    Args:
        python: interpreter that has what the peer needs.
        script: the calling script, which must call `serve` when started with `--serve-peer`.
    """

    def __init__(self, python: str, script: str):
        command = [python, script, "--serve-peer"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def time(self, case: dict) -> float:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


def compare(run: Callable[[], Any], peer: Peer | None, case: dict, rounds: int) -> tuple[float, float, float]:
    """(median of ours, median of the peer's, median of ours / peer per turn), milliseconds; NaN without a peer."""
    run()
    turns = [(milliseconds(run), peer.time(case) if peer else float("nan")) for _ in range(rounds)]
    mine, theirs = zip(*turns, strict=True)
    return median(mine), median(theirs), median(a / b for a, b in turns)
