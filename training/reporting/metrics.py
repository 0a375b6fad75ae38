"""What a run tells of itself: a line in the terminal, metrics.jsonl, TensorBoard; and what a GPU could do.

Every record of metrics.jsonl has `kind` (run, step, eval) and `step`, the number of steps done.
"""

import json
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gristmill.errors import writing
from gristmill.io.files import atomic_write_bytes

METRICS = "metrics.jsonl"

# Peak dense 10^12 operations a second: bfloat16 tensor cores, float32; from NVIDIA's data sheets
_PEAKS = {
    "B200": (2250.0, 75.0),
    "H200": (989.0, 67.0),
    "H100 PCIe": (756.0, 51.0),
    "H100": (989.0, 67.0),
    "A100": (312.0, 19.5),
    "L40S": (362.0, 91.6),
    "L4": (121.0, 30.3),
    "A10": (125.0, 31.2),
    "RTX 4090": (165.0, 82.6),
    "RTX 3090": (71.0, 35.6),
}


@dataclass(frozen=True)
class MetricsConfig:
    """What is told of the run, and where."""

    log_every: int = 10
    """Steps between lines in the terminal. metrics.jsonl and TensorBoard receive every step."""
    tensorboard: bool = True
    peak_tflops: float = 0.0
    """One device's peak in 10^12 operations a second, for the model FLOPs utilisation; 0: from a table of GPUs."""


def peak_tflops(device: torch.device, precision: str) -> float | None:
    """The peak of one device in 10^12 operations a second, None where it is not known (every CPU)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    found = next((peaks for key, peaks in _PEAKS.items() if key in name), None)
    return found and found[0 if precision == "bf16" else 1]


def memory_bytes(device: torch.device) -> int:
    """The most memory this process has used so far, in bytes: of the GPU, or of the CPU where there is none."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics.jsonl; a last line that was being written when the run ended is left out."""
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                return


class Reporter:
    """Writes the records of a run; of all ranks, only the main one's reporter does anything."""

    def __init__(self, out_dir: Path, active: bool, tensorboard: bool) -> None:
        self.path = out_dir / METRICS
        self.active, self.tensorboard = active, tensorboard

    def start(self, step: int) -> None:
        """Begin after `step` steps: forget what an interrupted run recorded of later ones."""
        if not self.active:
            return
        with writing(self.path):
            kept = [json.dumps(record) + "\n" for record in read_metrics(self.path) if 0 < record["step"] <= step]
            atomic_write_bytes(self.path, "".join(kept).encode())
            self._file = self.path.open("a", encoding="utf-8")
            if self.tensorboard:
                from torch.utils.tensorboard import SummaryWriter  # a second's import, not for every rank

                self._board = SummaryWriter(str(self.path.parent / "tensorboard"), purge_step=step + 1)

    def close(self) -> None:
        if hasattr(self, "_file"):
            self._file.close()
        if hasattr(self, "_board"):
            self._board.close()

    def say(self, line: str) -> None:
        if self.active:
            print(line, flush=True)

    def record(self, kind: str, step: int, **values: Any) -> None:
        """Add a record; numbers go to TensorBoard too, as `kind/name`."""
        if not self.active:
            return
        with writing(self.path):
            self._file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
            self._file.flush()
        if self.tensorboard:
            for name, value in values.items():
                if isinstance(value, int | float):
                    self._board.add_scalar(f"{kind}/{name}", value, step)
                elif isinstance(value, str):
                    self._board.add_text(f"{kind}/{name}", value, step)
