"""MemoryConfig: the options for activation recomputation and offloading."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from gristmill.errors import UsageError

Recompute = Literal["none", "selective", "full"]
OffloadTarget = Literal["device", "cpu", "disk"]


@dataclass(frozen=True)
class MemoryConfig:
    """Activations to recompute, and optimizer states and parameters to offload."""

    recompute: Recompute = "none"
    """Activations recomputed in the backward pass: none; selective: all but the outputs of matrix products and
    attention; full: whole blocks."""
    optimizer: OffloadTarget = "device"
    """Storage of AdamW's two moments. cpu: CPU memory (saves nothing if the device is the CPU); disk: files, with a
    few buckets in memory at a time."""
    parameters: OffloadTarget = "device"
    """Storage of parameters between uses; cpu and disk need parallel.zero 3. cpu saves nothing if the device is
    the CPU."""
    folder: Path | None = None
    """Folder for the files of "disk", with a subfolder per rank; by default out_dir/offload. They are scratch files:
    each run creates new ones and removes them at its end, and resuming does not need them."""
    force: bool = False
    """Start even if parameters, gradients and optimizer state alone need more memory than is free."""

    @property
    def on_disk(self) -> bool:
        """Return whether the optimizer's state or the parameters are on disk."""
        return "disk" in (self.optimizer, self.parameters)

    def resolve(self, out_dir: Path) -> "MemoryConfig":
        """Return a copy with `folder` filled in."""
        return replace(self, folder=self.folder or out_dir / "offload")

    def check(self, zero: int) -> None:
        """Raise UsageError if parameters are to be offloaded without ZeRO stage 3."""
        if self.parameters != "device" and zero != 3:
            raise UsageError(
                f"memory.parameters is {self.parameters} and parallel.zero {zero}: only ZeRO-3, which gathers "
                f"parameters block by block, can offload them; try --parallel.zero 3, or --memory.optimizer "
                f"{self.parameters} alone"
            )

    def warnings(self, device: str) -> list[str]:
        """Return the warnings about options that have no effect on this type of device ("cpu", "cuda")."""
        idle = [key for key in ("optimizer", "parameters") if getattr(self, key) == "cpu"]
        if device != "cpu":
            return []
        return [
            f"memory.{key} cpu saves nothing here: the device is the CPU; --memory.{key} disk would" for key in idle
        ]
