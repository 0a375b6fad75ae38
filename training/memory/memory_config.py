"""What a run trades for memory: activations computed again, optimizer states and parameters kept elsewhere."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gristmill.errors import UsageError

Recompute = Literal["none", "selective", "full"]
Place = Literal["device", "cpu", "disk"]


@dataclass(frozen=True)
class MemoryConfig:
    """What is computed again instead of kept, and what is kept elsewhere than on the device."""

    recompute: Recompute = "none"
    """Activations computed again in the backward pass: none, all but matrix products and attention, or whole blocks."""
    optimizer: Place = "device"
    """Where AdamW's two moments are. cpu: in the machine's memory, which saves nothing where the device is the CPU;
    disk: in files, of which a few buckets at a time are in memory."""
    parameters: Place = "device"
    """Where the parameters are between uses, with parallel.zero 3. cpu saves nothing where the device is the CPU."""
    folder: Path | None = None
    """Where the files of "disk" are, a folder a process; None: offload in out_dir. They are scratch: begun anew by
    every run and removed at its end; a run goes on from a checkpoint, never from them."""

    def check(self, zero: int) -> None:
        """Raise UsageError for what a layout with this ZeRO stage cannot do."""
        if self.parameters != "device" and zero != 3:
            raise UsageError(
                f"memory.parameters is {self.parameters} and parallel.zero {zero}: only parameters that are gathered "
                f"block by block can be elsewhere between uses; try --parallel.zero 3, or --memory.optimizer "
                f"{self.parameters} alone"
            )

    def remarks(self, device: str) -> list[str]:
        """What a user who runs on this type of device should be told."""
        idle = [key for key in ("optimizer", "parameters") if getattr(self, key) == "cpu"]
        if device != "cpu":
            return []
        return [
            f"memory.{key} cpu saves nothing here: the device is the CPU; --memory.{key} disk would" for key in idle
        ]
