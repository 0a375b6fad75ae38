"""RunClock: the wall time of a run over all its starts, what it costs in hours of devices, and when it ends."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from training.reporting.metrics_file import finite


@dataclass(frozen=True)
class RunTime:
    """When a report was made, and how long its run has taken.

    `time`: seconds since 1970. `elapsed_seconds`: wall time of all starts of the run, `device_hours`: that of all
    processes. `remaining_seconds`: of the steps to come, at the speed since the last start; None after the last step.
    """

    time: float
    elapsed_seconds: float
    device_hours: float
    remaining_seconds: float | None

    def describe(self) -> str:
        """Return the time of the report, the time that the run has taken, and when it ends, by the local clock.

        >>> RunTime(0.0, 61.4, 0.1, None).describe().partition(" ")[2]
        'after 0:01:01'
        """
        now = datetime.fromtimestamp(self.time)
        words = f"{now:%H:%M:%S} after {timedelta(seconds=round(self.elapsed_seconds))}"
        if self.remaining_seconds is None:
            return words
        end = now + timedelta(seconds=self.remaining_seconds)
        day = "" if end.date() == now.date() else f"{end:%a %d %b} "
        return f"{words}, ends {day}{end:%H:%M}"


class RunClock:
    """Measures the wall time of a run from its first start on, evaluations and checkpoints included."""

    def __init__(
        self, processes: int, now: Callable[[], float] = time.monotonic, date: Callable[[], float] = time.time
    ) -> None:
        """The clock of this start runs from now on; `processes` have a device each.

        `now` measures durations in seconds, `date` is in seconds since 1970.
        """
        self.processes = processes
        self.now = now
        self.date = date
        self._started = now()
        self._elapsed = 0.0  # of earlier starts
        self._device_hours = 0.0
        self.begin_steps(0)

    def begin_steps(self, step: int, earlier: Mapping[str, Any] | None = None) -> None:
        """Steps begin after `step`; `earlier` is the last record of an earlier start that has its times."""
        self._step = step
        self._steps_began = self.now()
        if earlier is not None:
            self._elapsed = finite(earlier.get("elapsed_seconds")) or 0.0
            self._device_hours = finite(earlier.get("device_hours")) or 0.0

    def read(self, step: int, total_steps: int) -> RunTime:
        """Return the times after `step`, of a run of `total_steps`."""
        now = self.now()
        here = now - self._started
        steps = step - self._step
        remaining = None
        if steps > 0 and step < total_steps:
            remaining = round((now - self._steps_began) / steps * (total_steps - step), 3)
        hours = self._device_hours + here * self.processes / 3600
        return RunTime(round(self.date(), 3), round(self._elapsed + here, 3), round(hours, 6), remaining)
