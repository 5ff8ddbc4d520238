"""What a program says while it works: plain lines on a terminal stream, with the time in the run's `log.txt`.

Modules log through `logging.getLogger(__name__)`; nothing but the command line turns it on.
"""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LOGGER = logging.getLogger("k3train")


class _Terminal(logging.Handler):
    """Writes to what `sys.stdout` or `sys.stderr` is at the time of the message."""

    def __init__(self, stream: str):
        super().__init__()
        self.stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        prefix = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        print(prefix + record.getMessage(), file=getattr(sys, self.stream), flush=True)


@contextmanager
def shown(stream: str) -> Iterator[None]:
    """Messages go to `stdout` or `stderr` while the context is open."""
    handler = _Terminal(stream)
    _LOGGER.addHandler(handler)
    _LOGGER.setLevel(logging.INFO)
    _LOGGER.propagate = False  # libraries put handlers of their own on the root
    try:
        yield
    finally:
        _LOGGER.propagate = True
        _LOGGER.removeHandler(handler)


def show_warnings_only() -> None:
    """For processes beside the first, which says everything."""
    for handler in _LOGGER.handlers:
        if isinstance(handler, _Terminal):
            handler.setLevel(logging.WARNING)


@contextmanager
def to_file(path: Path) -> Iterator[None]:
    """Append messages to `path`, with the time, while the context is open."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    _LOGGER.addHandler(handler)
    _LOGGER.setLevel(logging.INFO)
    try:
        yield
    finally:
        _LOGGER.removeHandler(handler)
        handler.close()
