"""Cases of the parity certificate for the parts of published models: their presets, with few and small layers."""

from collections.abc import Iterator
from typing import Any

from gristmill_parity.small_models import SHRUNK, Preset
from training.experimental.parallel_config import ParallelConfig

_ONE = ParallelConfig()
_TP_PP = ParallelConfig(tp=2, sequence_parallel=True, pp=2, schedule="1f1b")
_TWO = (
    ParallelConfig(dp=2, zero=3), ParallelConfig(tp=2), ParallelConfig(tp=2, sequence_parallel=True),
    ParallelConfig(pp=2, schedule="1f1b"), ParallelConfig(dp=2, zero=1),
    ParallelConfig(pp=2, schedule="interleaved-1f1b"),
)  # fmt: skip
_3D = ParallelConfig(dp=2, zero=1, tp=2, sequence_parallel=True, pp=2, schedule="1f1b")
STEPS = 50
"""Of the cases that follow a training for longer."""


def family_cases(transformers: bool, full: bool) -> Iterator[tuple[Preset, ParallelConfig, dict[str, Any]]]:
    """Each preset in one process, beside transformers if that has it, and under tensor and pipeline parallelism.

    This with documents that do not see each other, every third with ZeRO too. In `full` every preset is under all
    kinds together, without documents too, and the kinds by themselves take turns; and it trains for longer with each.
    """
    apart = {"documents": True, "dropout": 0.0}
    for number, preset in enumerate(name for name in SHRUNK if full or SHRUNK[name].has_own_parts):
        if not SHRUNK[preset].in_transformers:
            yield preset, _ONE, {}
        elif transformers:
            yield preset, _ONE, {"reference": "transformers"}
        yield preset, _TP_PP if number % 3 else _3D, {**apart, "recompute": "selective"}
        if not full:
            continue
        yield preset, _3D, {"recompute": "selective"}
        yield preset, _TWO[number % len(_TWO)], apart
        for layout in (ParallelConfig(dp=2), ParallelConfig(tp=2), ParallelConfig(pp=2)):
            yield preset, layout, {"reference": "one process", "precision": "fp32", "steps": STEPS}
