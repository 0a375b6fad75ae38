"""StallWatch: notices that a rank's GPU waits for another rank, which under NCCL no call of the rank says.

A collective of NCCL only joins the GPU's queue. If another rank does not take part, the main thread blocks later, in
any call that needs the GPU or finds its queue full, and NCCL's own watch aborts the process without naming a rank.
"""

import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import CodeType

import torch

Place = tuple[tuple[CodeType, int], ...]  # instruction of each frame; no frame is kept, which would keep its tensors


class StallWatch:
    """Watches the thread that makes it; another thread asks `stalled` from time to time.

    A stall is `seconds` without a call of `beat`, in which the thread stays at one instruction and `busy` stays True.
    """

    def __init__(self, seconds: float, busy: Callable[[], bool]) -> None:
        """`busy`: whether the device has unfinished work."""
        self.seconds = seconds
        self.busy = busy
        self._thread = threading.get_ident()
        self._beats = 0
        self._seen: tuple[int, Place] = (-1, ())
        self._since = time.monotonic()

    def beat(self) -> None:
        """Say that a step begins."""
        self._beats += 1

    def stalled(self) -> bool:
        """Return whether the thread has stalled; as exact as the calls are frequent."""
        stack = traceback.walk_stack(sys._current_frames()[self._thread])
        seen = self._beats, tuple((frame.f_code, frame.f_lasti) for frame, _ in stack)
        if seen != self._seen or not self.busy():
            self._seen = seen
            self._since = time.monotonic()
        return time.monotonic() - self._since >= self.seconds


def gpu_busy(device: torch.device) -> bool:
    """Return True if a GPU has unfinished work of this process.

    Never on a CPU, where the collectives themselves time out.
    """
    try:
        return device.type == "cuda" and not torch.cuda.default_stream(device).query()
    except RuntimeError:  # an error of the GPU, which the main thread meets as well
        return False
