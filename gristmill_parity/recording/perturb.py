"""Perturb: noise of the size of a precision's rounding, whose effect on each tensor is the tensor's tolerance."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

Precision = Literal["fp64", "fp32", "bf16", "fp16"]
EPSILON: dict[str, float] = {"fp64": 2.0**-52, "fp32": 2.0**-23, "bf16": 2.0**-7, "fp16": 2.0**-10}
"""Distance of 1 and the next larger number."""
PRECISION_OF = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Perturb:
    """Every output of a module, and every gradient of one, is multiplied by 1 + noise of a precision's rounding."""

    precision: Precision
    seed: int


class Noise:
    """The noise of one run."""

    def __init__(self, perturb: Perturb) -> None:
        self._scale = EPSILON[perturb.precision] / 2
        self._generator = torch.Generator().manual_seed(perturb.seed)

    def rounded(self, x: Tensor) -> Tensor:
        """Return `x` with each element off by up to half an epsilon."""
        noise = torch.rand(x.shape, generator=self._generator, dtype=torch.float64).mul_(2).sub_(1)
        exact = x.double() * (1 + self._scale * noise).to(x.device)
        return exact.to(x.dtype)


@dataclass(frozen=True)
class ReferenceRun:
    """One run of the reference: where its recording goes, and what is perturbed in it."""

    folder: Path
    perturb: Perturb | None


BASE = "base"
PERTURBED = "perturbed"


def reference_runs(folder: str | Path, precision: Precision, count: int = 3) -> Iterator[ReferenceRun]:
    """Yield the runs of a reference: one as it is, then `count` whose rounding is perturbed, from the same weights.

    `precision` is that of the run to compare: the reference itself may be, and best is, in float64.
    """
    if precision not in EPSILON:
        raise ValueError(f"precision is {precision!r}; expected one of {', '.join(EPSILON)}")
    yield ReferenceRun(Path(folder) / BASE, None)
    for seed in range(1, count + 1):
        yield ReferenceRun(Path(folder) / f"{PERTURBED}-{seed}", Perturb(precision, seed))
