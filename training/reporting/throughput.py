"""Throughput: seconds per step, tokens/s, model FLOPs utilization (MFU) and peak memory."""

import re
import resource
import sys
import time
from dataclasses import dataclass

import torch

# Peak dense TFLOP/s per device, from NVIDIA's data sheets: 16-bit tensor cores, which take bfloat16 and float16 at the
# same rate, and float32
_PEAK_TFLOPS = {
    "B200": (2250.0, 75.0),
    "GH200": (989.0, 67.0),
    "H200": (989.0, 67.0),
    "H100 PCIe": (756.0, 51.0),
    "H100": (989.0, 67.0),
    "A100": (312.0, 19.5),
    "L40S": (362.0, 91.6),
    "L40": (181.0, 90.5),
    "L4": (121.0, 30.3),
    "A10": (125.0, 31.2),
    "RTX 4090": (165.0, 82.6),
    "RTX 3090": (71.0, 35.6),
}


@dataclass(frozen=True)
class Throughput:
    """Averages over the steps since the last report.

    `step_seconds`: seconds per step. `tokens_per_second`: over all ranks. `mfu`: model FLOPs utilization, 0 to 1; None
    where the device's peak is unknown. `memory_bytes`: this rank's peak memory so far.
    """

    step_seconds: float
    tokens_per_second: float
    mfu: float | None
    memory_bytes: int


class ThroughputMeter:
    """Times the training steps between two reports; `restart` excludes evaluation and checkpoints."""

    def __init__(self, flops_per_token: float, peak_flops: float | None, device: torch.device) -> None:
        """`flops_per_token` of the model, forward and backward; `peak_flops`: FLOP/s of all ranks, if known."""
        self.flops_per_token = flops_per_token
        self.peak_flops = peak_flops
        self.device = device
        self.restart()

    def restart(self) -> None:
        """Start timing now."""
        self._started = time.perf_counter()

    def measure(self, steps: int, tokens: int) -> Throughput:
        """Return the throughput of `steps` steps of `tokens` in all since the last restart."""
        seconds = (time.perf_counter() - self._started) / steps
        rate = tokens / steps / seconds
        mfu = self.flops_per_token * rate / self.peak_flops if self.peak_flops else None
        return Throughput(seconds, rate, mfu, memory_bytes(self.device))


def peak_flops(device: torch.device, precision: str, given_tflops: float, ranks: int) -> float | None:
    """Return the peak FLOP/s of all ranks from `given_tflops` per device, or if 0 from the table; None if unknown."""
    tflops = given_tflops or peak_tflops(device, precision)
    return tflops * 1e12 * ranks if tflops else None


def peak_tflops(device: torch.device, precision: str) -> float | None:
    """Return one device's peak in TFLOP/s, or None where it is unknown: every CPU, and float64."""
    if device.type != "cuda" or precision == "fp64":
        return None
    name = torch.cuda.get_device_name(device)
    # as words: an A10G is no A10. The longest: an H100 PCIe is slower than other H100s
    named = [key for key in _PEAK_TFLOPS if re.search(rf"\b{key}\b", name)]
    return _PEAK_TFLOPS[max(named, key=len)][precision == "fp32"] if named else None


def memory_bytes(device: torch.device) -> int:
    """Return this process's peak memory so far in bytes: GPU memory, or resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
