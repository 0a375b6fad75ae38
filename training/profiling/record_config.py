"""RecordConfig: the steps of a run whose tensors are recorded, for `gristmill check`."""

from dataclasses import dataclass
from pathlib import Path

from gristmill.errors import require

RECORDINGS = "recordings"
"""In a run's out_dir, of its recorded steps."""


@dataclass(frozen=True)
class RecordConfig:
    """Options for recording the tensors of steps. They do not change what is computed."""

    steps: tuple[int, ...] = ()
    """Steps whose tensors are recorded in out_dir/recordings, for gristmill check: of every module the inputs, outputs
    and their gradients, of every parameter the gradient, the weight and the moments. A recorded step takes about twice
    as long, and the first of a start, which measures rounding, ten to twenty times."""
    keep: tuple[str, ...] = ()
    """Patterns of the tensors whose values are kept, such as "blocks.0.* output"; of the others there are sketches. By
    default all of a model whose part on a rank has up to 32 MiB of parameters, and none of a larger one."""

    def check(self, last: int) -> None:
        """Raise UsageError for steps that a run of `last` steps does not take."""
        wrong = [step for step in self.steps if not 1 <= step <= last]
        require(
            not wrong,
            f"record.steps is {' '.join(map(str, self.steps))}; expected steps of the run, 1 to {last}; "
            f"try --record.steps {last if wrong and wrong[0] > last else 1}",
        )
        require(
            not self.keep or bool(self.steps),
            "record.keep is given without record.steps: no step is recorded; try --record.steps 1",
        )


def recording_of(out_dir: Path, step: int) -> Path:
    """Return the folder of the recording of a step."""
    return out_dir / RECORDINGS / f"step-{step:08d}"
