"""Several processes, one run: how they find each other, agree before they start, and end together.

A process joins when the environment says that there are others: `JAX_COORDINATOR_ADDRESS` with `JAX_NUM_PROCESSES` and
`JAX_PROCESS_ID` (launch/local_pod.sh), or whatever jax finds out by itself under Slurm, on a TPU slice or on GKE
(`--multihost`). Everything else asks jax: `jax.process_index()`, `jax.process_count()`.
"""

import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from orbax.checkpoint import multihost

from k3train.parallel.rules import spec

_ADDRESS, _COUNT, _INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
_COMPILING = 3600  # seconds that a process may compile longer than another
_TEXT = 2**16  # bytes of a text that processes exchange


def asked_for() -> tuple[int, int]:
    """(process index, number of processes) as the environment has them; (0, 1) if it says nothing.

    Raises:
        ValueError: it says it in part, or what it says does not fit.
    """
    given = [os.environ.get(name) for name in (_ADDRESS, _COUNT, _INDEX)]
    if not any(given):
        return 0, 1
    try:
        count, index = int(given[1] or ""), int(given[2] or "")
    except ValueError:
        count = index = 0
    if not given[0] or not 0 <= index < count:
        shown = ", ".join(f"{n}={v}" for n, v in zip((_ADDRESS, _COUNT, _INDEX), given, strict=True))
        raise ValueError(f"{shown}: expected an address host:port, a number of processes, and an index below it")
    return index, count


def join(*, discover: bool, join_timeout: int, heartbeat_timeout: int) -> None:
    """Wait for the other processes of the run; returns at once if there are none. Before jax first sees its devices.

    Args:
        discover: let jax find out about the others where the environment does not say (`--multihost`).
        join_timeout: seconds to wait for all of them.
        heartbeat_timeout: seconds of silence after which a process counts as lost, which ends the others.

    Raises:
        ValueError: not all came; names those that are missing.
    """
    index, count = asked_for()
    if count == 1 and not discover:
        return
    known: dict[str, Any] = {}
    if count > 1:
        address = os.environ[_ADDRESS]
        _call_the_roll(address, index, count, join_timeout)
        known = {"coordinator_address": address, "num_processes": count, "process_id": index}
    jax.distributed.initialize(
        **known,
        initialization_timeout=join_timeout,
        heartbeat_timeout_seconds=heartbeat_timeout,
        shutdown_timeout_seconds=heartbeat_timeout,
    )


def _call_the_roll(address: str, index: int, count: int, seconds: int) -> None:
    """Process 0 waits at the coordinator's address, before jax takes it, until every process has shown up.

    (jax itself does not say who is missing, and ends a process that waits in vain by a signal.)
    """
    host, _, port = address.rpartition(":")
    end = time.monotonic() + seconds
    verdict = _missing(int(port), count, end) if index == 0 else _show_up(host, int(port), index, end)
    if verdict:
        raise ValueError(f"after {seconds} s these of {count} processes are missing: {verdict} (coordinator {address})")


def _missing(port: int, count: int, end: float) -> str:
    """The processes that have not come to this port by then; tells those that have."""
    present: dict[int, socket.socket] = {}
    with socket.create_server(("", port)) as server:
        while len(present) < count - 1 and (left := end - time.monotonic()) > 0:
            server.settimeout(left)
            with suppress(TimeoutError, OSError, ValueError):
                visitor = server.accept()[0]
                visitor.settimeout(left)
                present[int(visitor.recv(16))] = visitor
    missing = ", ".join(str(other) for other in range(1, count) if other not in present)
    for visitor in present.values():
        with visitor, suppress(OSError):
            visitor.sendall(f"missing {missing}".encode())
    return missing


def _show_up(host: str, port: int, index: int, end: float) -> str:
    """What process 0 answers; itself if it is not there."""
    while (left := end - time.monotonic()) > 0:
        with suppress(OSError), socket.create_connection((host, port), timeout=left) as server:
            server.sendall(str(index).encode())
            server.settimeout(left + 5)  # process 0 may have begun to wait later
            if answer := server.recv(4096).decode():
                return answer.removeprefix("missing").strip()
        time.sleep(0.1)
    return "0"


def texts(text: str) -> list[str]:
    """The text of every process, in order; every process must call this."""
    if jax.process_count() == 1:
        return [text]
    data = text.encode()[:_TEXT]
    padded = np.zeros(_TEXT, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in rows]


def first_alone(action: Callable[[], Any]) -> None:
    """Process 0 does `action`, the others wait.

    Raises:
        ValueError: `action` did, on process 0; then on every process.
    """
    refusal: ValueError | None = None
    if jax.process_index() == 0:
        try:
            action()
        except ValueError as error:
            refusal = error
    message = texts(str(refusal) if refusal else "")[0]
    if message:
        raise refusal or ValueError(message)


class Together:
    """A jitted function whose first run begins on all processes at once, when each has compiled it.

    Collectives of CPU processes wait no longer than 30 seconds for one another when they first meet, and compiling may
    take one process minutes longer than the next. A process that is lost meanwhile ends the others by its heartbeat.

    Args:
        function: from `jax.jit`; always called with arguments of the same shapes.
        name: of the meeting.
    """

    def __init__(self, function: jax.stages.Wrapped, name: str):
        self._function, self._name = function, name
        self._ready: Callable[..., Any] | None = function if jax.process_count() == 1 else None

    def __call__(self, *args: Any) -> Any:
        if self._ready is None:
            self._ready = self._function.lower(*args).compile()
            multihost.get_barrier_sync_fn()(key=f"compiled {self._name}", timeout_ms=_COMPILING * 1000)
        return self._ready(*args)


def batch_share(mesh: Mesh, rows: int) -> tuple[int, int]:
    """(index, count): this process reads piece `index` of `count` equal pieces of a batch of `rows`.

    Processes whose devices hold the same rows, such as those that a tensor axis spans, read the same piece.

    Raises:
        ValueError: the rows of this process's devices are not one such piece.
    """
    if jax.process_count() == 1:
        return 0, 1
    sharding = NamedSharding(mesh, spec(("act_batch",)))
    pieces = sharding.addressable_devices_indices_map((rows,)).values()
    spans = sorted({piece[0].indices(rows)[:2] for piece in pieces if piece is not None})
    first, last = spans[0][0], spans[-1][1]
    size = last - first
    whole = all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False))
    if not whole or rows % size or first % size:
        raise ValueError(
            f"the devices of process {jax.process_index()} hold rows {spans} of {rows}, which is not one piece: "
            "choose mesh sizes so that the batch axes (data, expert) vary slowest over the processes"
        )
    return first // size, rows // size
