"""Asked to stop: a run that is ends its step, saves and leaves."""

import os
import signal
import threading
from typing import Any


class Stop:
    """While open, Ctrl-C and SIGTERM ask for a clean stop; a second Ctrl-C stops at once.

    Outside of the main thread signals are left alone.

    Attributes:
        signal: name of the signal that asked; empty as long as none did.
    """

    def __init__(self) -> None:
        self.signal = ""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Stop":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Signals do again what they did before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _ask(self, number: int, _: object) -> None:
        if self.signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = signal.Signals(number).name
        # not print: the signal may have come in the middle of one
        os.write(2, f"\n{self.signal}: finishing the step, then saving\n".encode())
