"""ProfileConfig: the options for looking into a run."""

import re
from dataclasses import dataclass
from typing import ClassVar

from gristmill.config import INT64, Range
from gristmill.errors import require

FOLDER = "profile"
"""In a run's out_dir, of its traces."""
_SPAN = re.compile(r"(\d{1,18}):(\d{1,18})")


@dataclass(frozen=True)
class ProfileConfig:
    """Options for profiling. They do not change what is computed; without them nothing is measured."""

    RANGES: ClassVar[dict[str, Range]] = {
        **dict.fromkeys(("times", "norms"), Range(0, INT64)),
        "ranks": Range(0, 2**31 - 1),
    }

    steps: str = ""
    """START:STOP: trace these steps, both included, with torch's profiler, into out_dir/profile; on a GPU also a
    snapshot of its memory. By default no step is traced."""
    ranks: tuple[int, ...] = (0,)
    """Ranks that write a trace."""
    times: int = 0
    """Steps between records of how long the parts of a step take; 0: none. A measured step waits for the GPU between
    its parts. The communication of a step that is also traced is only in the trace."""
    norms: int = 0
    """Steps between records of the norms of each layer's gradients, weights and updates; 0: none."""

    @property
    def is_on(self) -> bool:
        """Return whether anything is to be traced or measured."""
        return bool(self.steps or self.times or self.norms)

    @property
    def span(self) -> tuple[int, int] | None:
        """First and last step to trace."""
        match = _SPAN.fullmatch(self.steps)
        return (int(match[1]), int(match[2])) if match else None

    def traces(self, step: int) -> bool:
        """Return whether a rank traces the step; on every rank the same."""
        return bool(self.ranks) and self.span is not None and self.span[0] <= step <= self.span[1]

    def notes(self, step: int) -> list[str]:
        """Return a line for a run that continues after `step`, if its steps to trace are over."""
        over = self.span is not None and self.span[1] <= step
        return [f"profile.steps {self.steps}: the run is at step {step}, and traces none of them now"] * over

    def check(self, last: int) -> None:
        """Raise UsageError for steps that are no span, or that end after the run's `last`."""
        span = self.span or (0, 0)
        require(
            not self.steps or 1 <= span[0] <= span[1],
            f"profile.steps is {self.steps!r}; expected START:STOP, from step 1 on; try --profile.steps 10:12",
        )
        require(
            span[1] <= last,
            f"profile.steps is {self.steps!r}, and the run ends at step {last}; a trace is written at its end; "
            f"try --profile.steps {min(span[0], last)}:{last}",
        )
