"""StopSignals: records SIGINT and SIGTERM, so that training can finish its step and save a checkpoint."""

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAME_SECONDS = 3.0  # a launcher passes on what a terminal has sent already


class StopSignals:
    """Context manager: stores the number of the first SIGINT or SIGTERM in `received` (0: none) and does not exit.

    While `is_starting`, when there is nothing to save, the first one raises SystemExit(128 + signal). A later one ends
    the process as it would without this. With `says`, rank 0 answers the first one on standard error.
    """

    received: int = 0

    def __init__(self, says: bool = False, is_starting: bool = False) -> None:
        self.is_starting = is_starting
        self._says = says and os.environ.get("RANK", "0") == "0"

    def __enter__(self) -> Self:
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():  # other threads cannot set handlers
            self._before = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if not self.received:
            self.received = number
            self._since = time.monotonic()
            if self.is_starting:
                self._say("stopping before the first step")
                raise SystemExit(128 + number)
            self._say(
                "stopping with a checkpoint, after this step or within it; another signal ends the run without one"
            )
        elif time.monotonic() - self._since > _SAME_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _say(self, line: str) -> None:
        if self._says:
            os.write(2, f"{line}\n".encode())  # print may be what the signal has interrupted
