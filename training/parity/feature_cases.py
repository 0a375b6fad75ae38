"""Cases of the parity certificate that are compared with an independent reference: precisions, AdamW, offload, compile.

Layouts are compared with one process of our own code (cases.py); here that code, and each feature that changes what is
computed, is compared with the plain decoder and with transformers.
"""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from training.distributed.layout import ParallelConfig
from training.memory.memory_config import OffloadTarget, Recompute
from training.parity.cases import SEQ_LEN, Case, Preset, small_model
from training.parity.reference import transformers_is_installed

HEADS = 8  # of 12 features: several rotary frequencies, halves that differ from neighbours
INIT_STD = 0.1  # about 1 / sqrt(width): features keep their size, and rounding errors theirs
_ONE = ParallelConfig()
_3D = ParallelConfig(dp=2, zero=1, tp=2, sequence_parallel=True, pp=2, schedule="1f1b")


def feature_cases(device: Literal["cpu", "cuda"]) -> tuple[list[Case], list[str]]:
    """All cases with an independent reference; also a line for each group that this machine cannot run."""
    cases, skipped = [*_single_cases(), *_adamw_cases(device), *_half_precision_cases()], []
    if transformers_is_installed():
        cases += [feature_case(preset, _ONE, reference="transformers", dropout=0.0) for preset in ("llama", "gpt2")]
    else:
        skipped.append(
            "transformers is not installed: its Llama and GPT-2 were not compared; try pip install transformers"
        )
    if any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        cases.append(feature_case("llama", ParallelConfig(dp=2, zero=3), compiled=True))
    else:
        skipped.append("no C++ compiler was found, which torch.compile needs: no compiled blocks were compared")
    return [replace(case, device=device) for case in cases], skipped


def feature_case(preset: Preset, layout: ParallelConfig, recompute: Recompute = "none", **options: Any) -> Case:
    """A case with an independent reference and the sizes that suit one; `layout` is not yet resolved."""
    options = {"reference": "plain decoder", "heads": HEADS, "init_std": INIT_STD, **options}
    processes = (layout.dp or 1) * layout.tp * layout.pp
    resolved = replace(layout, dp=layout.dp or 1).resolve(processes, small_model(preset, 9, HEADS), SEQ_LEN)
    return Case.of(preset, resolved, recompute, **options)


def _single_cases() -> Iterator[Case]:
    """One process in float64 and float32, by the code of training, of recomputation and of micro-batches."""
    for preset in ("llama", "gpt2"):
        for precision in ("fp64", "fp32"):
            yield feature_case(preset, _ONE, precision=precision)
        yield feature_case(preset, ParallelConfig(micro_batches=2), "full")


def _adamw_cases(device: str) -> Iterator[Case]:
    """AdamW with clipping under layouts, and offloaded: in float64, where it amplifies no rounding."""
    layouts = [
        _ONE, *(ParallelConfig(dp=2, zero=zero) for zero in (0, 1, 3)), ParallelConfig(dp=2, zero=2, micro_batches=2),
        ParallelConfig(tp=2), ParallelConfig(tp=2, sequence_parallel=True), ParallelConfig(pp=2, schedule="zbv"), _3D,
    ]  # fmt: skip
    for layout in layouts:
        yield feature_case("gpt2", layout, optimizer="adamw")
    targets: tuple[OffloadTarget, ...] = ("cpu", "disk") if device == "cuda" else ("disk",)
    for target in targets:
        for layout in (_ONE, ParallelConfig(dp=2, zero=3)):
            yield feature_case("gpt2", layout, optimizer="adamw", offload=target)


def _half_precision_cases() -> Iterator[Case]:
    """bf16 and fp16 under every kind of layout."""
    zero = [ParallelConfig(dp=2, zero=zero) for zero in (0, 1, 2, 3)]
    tensor = [ParallelConfig(tp=2), ParallelConfig(tp=2, sequence_parallel=True)]
    pipelines = [ParallelConfig(pp=2, schedule="1f1b"), ParallelConfig(pp=2, schedule="zbv")]
    for layout in [_ONE, ParallelConfig(dp=2, zero=3, micro_batches=2), *zero, *tensor, *pipelines, _3D]:
        yield feature_case("llama", layout, precision="bf16")
    for recompute in ("selective", "full"):
        yield feature_case("llama", _ONE, recompute, precision="bf16")
    for layout in (_ONE, _3D):
        yield feature_case("gpt2", layout, precision="bf16")
        yield feature_case("gpt2", layout, precision="fp16")
    for layout in (_ONE, zero[3], tensor[1]):
        yield feature_case("llama", layout, precision="fp16")
