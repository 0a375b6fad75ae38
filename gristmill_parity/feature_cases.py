"""Cases of features: precisions, optimizers, documents, grids, contexts, replicas, and parts of published models.

Layouts are compared with one process of our own code (cases.py); here that code, and each feature that changes what is
computed, is compared with the plain decoder and with transformers.
"""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from gristmill.errors import UsageError
from gristmill_parity.cases import SEQ_LEN, SHRUNK, Case, Preset, small_model
from gristmill_parity.reference_models import transformers_is_installed
from training.experimental.parallel_config import ParallelConfig
from training.memory.memory_config import OffloadTarget, Recompute
from training.parallel.pipeline.schedules import Schedule

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
HEADS = 8  # of 12 features: several rotary frequencies, halves that differ from neighbours
INIT_STD = 0.1  # about 1 / sqrt(width): features keep their size, and rounding errors theirs
_PRESETS: tuple[Preset, ...] = ("llama", "gpt2")
_GRID = ParallelConfig(tp=4, tensor="2d")
_CUBE = ParallelConfig(tp=8, tensor="3d")
_SCHEDULES: tuple[Schedule, ...] = ("1f1b", "interleaved-1f1b", "zbv")
Options = dict[str, Any]


def feature_cases(device: Literal["cpu", "cuda"] = "cpu", full: bool = False) -> tuple[list[Case], list[str]]:
    """Return all cases with an independent reference, and of each family; a line for each that this machine cannot run.

    `full`: also those of families that train for longer.
    """
    skipped = []
    rows: list[tuple[Preset, ParallelConfig, Options]] = []
    rows += _single_cases()
    rows += _document_cases()
    rows += _half_precision_cases()
    rows += _adamw_cases(device)
    rows += _muon_cases(device)
    rows += _grid_cases(full)
    rows += _context_cases(full)
    rows += _replica_cases(full)
    rows += expert_cases(full)
    if any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        compiled = {"precision": "fp32", "compiled": True}
        rows.append(("llama", ParallelConfig(dp=2, zero=3), compiled))
        if full:
            rows.append(("llama", ParallelConfig(cp=2), {**compiled, "reference": "one process"}))
    else:
        skipped.append("there is no C++ compiler, which torch.compile needs: no compiled blocks are compared")
    if transformers_is_installed():  # together with the families: a process imports it once
        for preset in _PRESETS:
            for documents in (False, True):
                rows.append((preset, _ONE, {"reference": "transformers", "dropout": 0.0, "documents": documents}))
    else:
        skipped.append("transformers is not installed: its Llama and GPT-2 are not compared; pip install transformers")
    rows += family_cases(transformers_is_installed(), full)
    cases = []
    for preset, layout, options in rows:
        try:
            cases.append(feature_case(preset, layout, device=device, **options))
        except UsageError as error:  # of an older torch
            skipped.append(str(error))
    return cases, list(dict.fromkeys(skipped))


def feature_case(preset: Preset, layout: ParallelConfig, **options: Any) -> Case:
    """Return a case with an independent reference and the sizes that suit one.

    Raises UsageError for a refused `layout`.
    """
    options = {"reference": "plain decoder", "heads": HEADS, "init_std": INIT_STD, **options}
    processes = replace(layout, dp=layout.dp or 1).processes
    model = small_model(preset, 9, options["heads"], sparse=options.get("sparse", ""))
    return Case.of(preset, layout.resolve(processes, model, SEQ_LEN), **options)


def _single_cases() -> Iterator[tuple[Preset, ParallelConfig, Options]]:
    """Yield one process in float64 and float32, with recomputation and micro-batches; a z-loss; few heads of keys."""
    for preset in _PRESETS:
        yield preset, _ONE, {"precision": "fp64"}
        yield preset, _ONE, {"precision": "fp32"}
        yield preset, ParallelConfig(micro_batches=2), {"recompute": "full"}
    for layout in (_ONE, ParallelConfig(tp=2), ParallelConfig(pp=2, schedule="zbv")):
        yield "llama", layout, {"z_loss": 0.01}
    yield "qwen2.5-0.5b", ParallelConfig(tp=4), {"heads": 4}  # of which two are of keys and values


def _document_cases() -> Iterator[tuple[Preset, ParallelConfig, Options]]:
    """Yield documents that do not see each other: against each alone, and layouts against one process, with dropout."""
    for preset in _PRESETS:
        yield preset, _ONE, {"documents": True, "dropout": 0.0}
        yield preset, ParallelConfig(micro_batches=2), {"documents": True, "dropout": 0.0, "recompute": "selective"}
    layouts: list[tuple[Preset, ParallelConfig, Recompute]] = [
        ("llama", ParallelConfig(dp=2, zero=1), "none"), ("llama", ParallelConfig(dp=2, zero=2), "selective"),
        ("gpt2", ParallelConfig(dp=2, zero=3), "full"),
        ("llama", ParallelConfig(tp=2), "selective"), ("gpt2", ParallelConfig(tp=2, sequence_parallel=True), "none"),
        ("llama", ParallelConfig(pp=2, schedule="zbv"), "none"), ("gpt2", ParallelConfig(pp=2), "selective"),
        ("gpt2", _3D, "full"),
    ]  # fmt: skip
    for preset, layout, recompute in layouts:
        yield preset, layout, {"documents": True, "recompute": recompute, "reference": "one process"}
    chats = {"chats": True, "documents": True, "padding": True}
    yield "llama", _ONE, {**chats, "dropout": 0.0}
    for layout in (ParallelConfig(dp=2, zero=3), _TP_PP, ParallelConfig(cp=2)):
        yield "llama", layout, {**chats, "reference": "one process"}


def _grid_cases(full: bool) -> Iterator[tuple[Preset, ParallelConfig, Options]]:
    """Yield 2D, 2.5D and 3D tensor parallelism against one process, alone and with other kinds; more of them in `full`.

    In `full` there are grids of three rows, three layers of grids, and worlds of 16.
    """
    layers = ParallelConfig(tp=8, tensor="2.5d", depth=2)
    three = ParallelConfig(tp=9, tensor="2d")
    layouts: list[tuple[Preset, ParallelConfig, Options]] = [
        ("llama", _GRID, {}),
        ("gpt2", _CUBE, {}),
        ("gpt2", layers, {"optimizer": "adamw", "recompute": "full", "documents": True, "dropout": 0.1}),
    ]
    if full:
        layouts += [
            ("gpt2", _GRID, {}), ("llama", layers, {"z_loss": 0.01}), ("llama", _GRID, {"optimizer": "muon"}),
            *(("llama", replace(_GRID, dp=2, zero=zero), {"optimizer": "adamw"}) for zero in (0, 1, 2, 3)),
            *(("gpt2", replace(_GRID, pp=2, schedule=schedule), {}) for schedule in ("1f1b", "zbv")),
            ("codegeex-13b", _GRID, {}), ("bloom-176b", _GRID, {}), ("qwen3-0.6b", _GRID, {}),
            ("glm-130b", layers, {}), ("mistral-7b", layers, {}), ("llama", _GRID, {"precision": "fp32"}),
            ("llama", _CUBE, {"optimizer": "adamw", "z_loss": 0.01}), ("llama", _CUBE, {"precision": "fp32"}),
            ("gpt2", _CUBE, {"documents": True, "recompute": "full"}), ("qwen3-0.6b", _CUBE, {"documents": True}),
            ("bloom-176b", _CUBE, {}), ("codegeex-13b", _CUBE, {}), ("mistral-7b", _CUBE, {"optimizer": "muon"}),
            ("llama", _GRID, {"precision": "fp16", "reference": "plain decoder"}),
            ("llama", _CUBE, {"precision": "bf16", "reference": "plain decoder"}), ("bloom-176b", layers, {}),
            ("llama", three, {"heads": 6}), ("gpt2", three, {"heads": 6, "documents": True}),
            ("llama", replace(layers, tp=12, depth=3), {}), ("gpt2", replace(layers, pp=2), {}),
            ("llama", replace(_CUBE, pp=2), {}), ("llama", replace(_CUBE, dp=2, zero=2), {"optimizer": "adamw"}),
            ("llama", replace(_GRID, dp=2, zero=3), {"optimizer": "adamw", "offload": "disk"}),
        ]  # fmt: skip
    for preset, layout, options in layouts:
        yield preset, layout, {"reference": "one process", **options}


def _context_cases(full: bool) -> Iterator[tuple[Preset, ParallelConfig, Options]]:
    """Yield sequences divided over ranks against one process, alone and with other kinds; more of them in `full`."""
    layouts: list[tuple[Preset, ParallelConfig, Options]] = [
        ("llama", ParallelConfig(cp=2), {"documents": True}),
        ("mistral-7b", ParallelConfig(cp=3), {"recompute": "full"}),
        ("gpt2", ParallelConfig(cp=4), {}),
        ("llama", ParallelConfig(cp=2, context="ulysses"), {"documents": True}),
        ("bloom-176b", ParallelConfig(cp=3, context="ulysses"), {"heads": 6}),
        ("bloom-176b", ParallelConfig(cp=2), {"heads": 6, "documents": True}),
        ("llama", ParallelConfig(cp=2, tp=2, sequence_parallel=True), {}),
        ("llama", ParallelConfig(cp=2, pp=2, schedule="zbv"), {}),
        ("gpt2", ParallelConfig(cp=2, dp=2, zero=3), {"optimizer": "adamw"}),
    ]
    if full:
        for cp in (2, 3, 4):
            for preset in _PRESETS:
                layouts.append((preset, ParallelConfig(cp=cp), {"documents": cp == 3}))
        layouts += [
            *(("llama", ParallelConfig(cp=2, dp=2, zero=zero, micro_batches=2), {}) for zero in (0, 1, 2, 3)),
            *(("gpt2", ParallelConfig(cp=2, pp=2, schedule=schedule), {"documents": True}) for schedule in _SCHEDULES),
            ("mistral-7b", ParallelConfig(cp=2, tp=2), {"documents": True}), ("qwen3-0.6b", ParallelConfig(cp=4), {}),
            ("llama", ParallelConfig(cp=2, zero=1), {"optimizer": "muon"}),
            ("llama", ParallelConfig(cp=2), {"precision": "bf16", "reference": "plain decoder"}),
            ("llama", ParallelConfig(cp=2), {"precision": "fp16", "reference": "plain decoder"}),
            ("llama", ParallelConfig(cp=2, tp=2, pp=2), {"z_loss": 0.01}),
            ("gpt2", ParallelConfig(cp=4, context="ulysses"), {}),
            ("llama", ParallelConfig(cp=2, tp=2, sequence_parallel=True, context="ulysses"), {"documents": True}),
            ("mistral-7b", ParallelConfig(cp=2, pp=2, schedule="zbv", context="ulysses"), {"recompute": "full"}),
            ("llama", ParallelConfig(cp=2, dp=2, zero=3, context="ulysses"), {"recompute": "selective"}),
            ("gpt2", ParallelConfig(cp=2, tp=2, sequence_parallel=True, context="ulysses"), {"recompute": "full"}),
            ("gpt2", ParallelConfig(cp=2, tp=2, sequence_parallel=True), {"documents": True, "recompute": "full"}),
            ("bloom-176b", ParallelConfig(cp=2, tp=2), {"dropout": 0.1}),
        ]  # fmt: skip
    for preset, layout, options in layouts:
        yield preset, layout, {"reference": "one process", **options}


def expert_cases(full: bool) -> Iterator[tuple[Preset, ParallelConfig, Options]]:
    """Yield sparse models against the plain decoder and, under each kind of layout, one process; more in `full`."""
    dp = ParallelConfig(dp=2)
    tp = ParallelConfig(tp=2)
    pp = ParallelConfig(pp=2)
    cp = ParallelConfig(cp=2)
    rows: list[tuple[str, ParallelConfig, Options]] = [
        ("switch", _ONE, {"reference": "plain decoder"}),
        ("sequence", _ONE, {"reference": "plain decoder"}),
        ("bias", _ONE, {"reference": "plain decoder"}),
        ("bias", replace(_ONE, micro_batches=2), {"recompute": "full", "reference": "plain decoder"}),
        ("bias", _ONE, {"optimizer": "muon", "reference": "plain decoder"}),
        ("all", replace(tp, dp=2, zero=1), {"precision": "bf16", "reference": "plain decoder"}),
        ("bias", replace(dp, zero=2, micro_batches=2), {"recompute": "selective"}),
        ("sequence", replace(dp, zero=3, micro_batches=2), {"optimizer": "adamw"}),
        ("bias", replace(tp, sequence_parallel=True), {"recompute": "selective"}),
        ("switch", replace(cp, dp=2, zero=1), {}),
        ("bias", replace(pp, schedule="zbv"), {"recompute": "full"}),
        ("bias", _3D, {"optimizer": "adamw", "recompute": "full"}),
        ("switch", replace(dp, dp=4, ep=4), {"recompute": "full"}),
        ("bias", replace(dp, dp=4, ep=2, zero=3, micro_batches=2), {"optimizer": "adamw"}),
        ("bias", replace(_3D, ep=2), {"optimizer": "adamw", "recompute": "full"}),
        ("bias", replace(dp, ep=2), {"optimizer": "muon"}),
        ("bias", replace(dp, dp=4, ep=2, zero=1), {"optimizer": "muon"}),
        ("latent", _ONE, {"reference": "plain decoder"}),
        ("latent", tp, {"reference": "plain decoder"}),
        ("latent", replace(pp, schedule="zbv"), {"recompute": "full"}),
        ("latent", cp, {"documents": True}),
        ("latent", replace(dp, zero=3), {"recompute": "selective", "optimizer": "adamw"}),
        ("latent", replace(dp, ep=2), {}),
        ("capacity", replace(_ONE, micro_batches=2), {"recompute": "full", "reference": "plain decoder"}),
        ("capacity", replace(tp, sequence_parallel=True), {}),
        ("capacity", cp, {}),
        ("capacity", replace(dp, ep=2, zero=1, micro_batches=2), {"optimizer": "adamw"}),
        ("sinks", _ONE, {"reference": "plain decoder"}),
        ("sinks", tp, {"reference": "plain decoder"}),
        ("sinks", replace(pp, schedule="zbv"), {"recompute": "full"}),
        ("sinks", cp, {"documents": True}),
        ("sinks", replace(dp, zero=3), {"optimizer": "adamw"}),
        ("sinks", replace(dp, ep=2), {"documents": True}),
        ("switch", _ONE, {"padding": True, "reference": "plain decoder"}),
        ("bias", _ONE, {"padding": True, "reference": "plain decoder"}),
        ("capacity", _ONE, {"padding": True, "reference": "plain decoder"}),
        ("switch", replace(dp, dp=4, ep=2), {"padding": True, "recompute": "full"}),
        ("bias", replace(tp, sequence_parallel=True, dp=2, zero=1), {"padding": True}),
        ("bias", replace(pp, schedule="zbv"), {"padding": True, "recompute": "selective"}),
        ("capacity", replace(cp, dp=2), {"padding": True, "documents": True}),
    ]
    if full:
        rows += [
            ("sequence", _ONE, {"precision": "fp32", "reference": "plain decoder"}),
            ("all", _ONE, {"precision": "bf16", "reference": "plain decoder"}),
            ("switch", dp, {"reference": "plain decoder"}), ("switch", replace(dp, zero=1), {}),
            ("bias", replace(dp, dp=4, zero=3, zero_group=2), {}), ("switch", tp, {"recompute": "full"}),
            ("sequence", tp, {"optimizer": "adamw"}), ("sequence", pp, {"recompute": "full"}),
            ("bias", replace(pp, schedule="interleaved-1f1b"), {}), ("sequence", replace(pp, schedule="zbv"), {}),
            ("sequence", cp, {}), ("bias", replace(cp, context="ulysses"), {"recompute": "full"}),
            ("sequence", replace(tp, dp=2, zero=1), {"optimizer": "muon"}),
            ("sequence", replace(tp, dp=2), {"documents": True}),
            ("sequence", replace(dp, zero=3), {"optimizer": "adamw", "offload": "disk"}),
            ("sequence", replace(dp, local_steps=2), {"optimizer": "adamw", "steps": 6, "reference": "plain decoder"}),
            *(("bias", replace(dp, dp=4, ep=2, zero=zero, micro_batches=2), {}) for zero in (0, 1, 2)),
            ("bias", replace(dp, dp=4, ep=2, zero=3, zero_group=2), {}), ("bias", replace(dp, dp=6, ep=3, zero=3), {}),
            ("bias", replace(dp, ep=2), {"recompute": "selective"}), ("bias", replace(cp, ep=2), {}),
            ("bias", replace(tp, dp=2, ep=2, sequence_parallel=True), {}),
            ("bias", replace(tp, dp=2, ep=2, zero=1), {"optimizer": "muon"}),
            ("bias", replace(pp, dp=2, ep=2, schedule="zbv"), {"recompute": "full"}),
            ("all", replace(dp, dp=3, ep=3, zero=1), {"precision": "bf16", "reference": "plain decoder"}),
            ("bias", replace(_3D, ep=2, zero=3), {"recompute": "full"}),
            ("latent", replace(cp, context="ulysses"), {"recompute": "full"}), ("latent", cp, {"dropout": 0.1}),
            ("latent", replace(tp, sequence_parallel=True), {"recompute": "selective", "documents": True}),
            ("latent", _3D, {"optimizer": "adamw"}), ("latent", tp, {"dropout": 0.1, "reference": "plain decoder"}),
            ("latent", replace(_3D, ep=2, zero=1), {"recompute": "full"}),
            ("latent", _ONE, {"optimizer": "muon", "reference": "plain decoder"}),
            ("sinks", replace(cp, context="ulysses"), {"recompute": "full"}), ("sinks", cp, {"dropout": 0.1}),
            ("sinks", replace(cp, tp=2, context="ulysses"), {"dropout": 0.1, "documents": True}),
            ("sinks", replace(tp, sequence_parallel=True), {"recompute": "full", "documents": True}),
            ("sinks", _3D, {"optimizer": "adamw"}), ("sinks", tp, {"dropout": 0.1, "reference": "plain decoder"}),
            ("sinks", replace(_3D, ep=2, zero=1), {"recompute": "full"}),
            ("sinks", _ONE, {"optimizer": "muon", "reference": "plain decoder"}),
            ("sinks, all", replace(tp, dp=2, zero=1), {"precision": "bf16", "reference": "plain decoder"}),
            ("capacity", replace(cp, context="ulysses"), {"recompute": "full"}), ("capacity", replace(_3D, ep=2), {}),
            ("capacity", replace(pp, schedule="zbv"), {"recompute": "selective"}),
            ("capacity", replace(dp, zero=3), {}), ("bias", replace(_3D, ep=2), {"padding": True}),
            ("switch", cp, {"padding": True}), ("sequence", replace(cp, context="ulysses"), {"padding": True}),
            ("bias", replace(dp, zero=3, micro_batches=2), {"padding": True, "optimizer": "adamw"}),
            ("latent, all", replace(tp, dp=2, zero=1), {"precision": "bf16", "reference": "plain decoder"}),
        ]  # fmt: skip
    for sparse, layout, options in rows:
        yield "llama", layout, {"reference": "one process", "sparse": sparse, **options}


def _replica_cases(full: bool) -> Iterator[tuple[Preset, ParallelConfig, Options]]:
    """Yield compressed gradients and local steps against plain ones of as many replicas; more in `full`.

    They take several steps, as what is left out is kept from step to step. The rank is below that of the gradients:
    above it a product has columns of rounding errors, from which the next step would begin
    (docs/concepts/parallelism/compression.md).
    """
    low_rank = ParallelConfig(dp=2, compression="powersgd")
    codes = ParallelConfig(dp=2, compression="int8")
    local = ParallelConfig(dp=2, local_steps=2)
    layouts: list[tuple[Preset, ParallelConfig, Options]] = [
        ("llama", replace(low_rank, tp=2), {}),
        ("llama", codes, {}),
        ("llama", local, {"optimizer": "adamw"}),
    ]
    if full:
        layouts += [
            ("gpt2", low_rank, {"optimizer": "adamw"}), ("llama", replace(low_rank, dp=3), {}),
            ("llama", replace(low_rank, pp=2), {}), ("llama", replace(low_rank, compression_rank=8), {"steps": 12}),
            ("gpt2", replace(codes, dp=3, micro_batches=2), {}), ("llama", codes, {"optimizer": "adamw"}),
            ("llama", replace(local, dp=3, local_steps=3), {"optimizer": "adamw"}),
            ("llama", replace(local, dp=4, zero=3, zero_group=2), {"optimizer": "adamw"}),
            ("llama", replace(local, tp=2, pp=2), {"optimizer": "muon"}),
        ]  # fmt: skip
    for preset, layout, options in layouts:
        yield preset, layout, {"steps": 6, **options}


def _adamw_cases(device: str) -> Iterator[tuple[Preset, ParallelConfig, Options]]:
    """Yield AdamW with clipping under layouts, and offloaded: of GPT-2, whose float64 has no float32 in it."""
    layouts = [
        _ONE, ParallelConfig(dp=2), ParallelConfig(dp=2, zero=1), ParallelConfig(dp=2, zero=3),
        ParallelConfig(dp=2, zero=2, micro_batches=2), ParallelConfig(tp=2),
        ParallelConfig(tp=2, sequence_parallel=True), ParallelConfig(pp=2, schedule="zbv"), _3D,
    ]  # fmt: skip
    for layout in layouts:
        yield "gpt2", layout, {"optimizer": "adamw"}
    targets: tuple[OffloadTarget, ...] = ("cpu", "disk") if device == "cuda" else ("disk",)
    for target in targets:
        for layout in (_ONE, ParallelConfig(dp=2, zero=3)):
            yield "gpt2", layout, {"optimizer": "adamw", "offload": target}


def _muon_cases(device: str) -> Iterator[tuple[Preset, ParallelConfig, Options]]:
    """Yield Muon with clipping under layouts that shard matrices by rows, by columns, by both, and unevenly.

    In float64: orthogonalising amplifies the rounding of gradients, so that in 16 bits updates differ by percents.
    """
    if device == "cuda":
        return  # where it orthogonalises in bf16, and the reference in float64
    layouts = [ParallelConfig(dp=3, zero=1), ParallelConfig(dp=2, zero=2), ParallelConfig(tp=2, dp=2, zero=3), _3D]
    for layout in (_ONE, *layouts):
        yield "llama", layout, {"optimizer": "muon"}


def _half_precision_cases() -> Iterator[tuple[Preset, ParallelConfig, Options]]:
    """Yield bf16 and fp16 under every kind of layout, with each mode of recomputation."""
    replicas = ParallelConfig(dp=2)
    zero1 = replace(replicas, zero=1)
    zero2 = replace(replicas, zero=2, micro_batches=2)
    zero3 = replace(replicas, zero=3)
    sequence_parallel = ParallelConfig(tp=2, sequence_parallel=True)
    layouts: list[tuple[ParallelConfig, Recompute]] = [
        (_ONE, "none"), (_ONE, "selective"), (replicas, "none"), (zero1, "selective"),
        (zero2, "none"), (zero3, "full"), (replace(zero3, micro_batches=2), "none"),
        (ParallelConfig(tp=2), "selective"), (sequence_parallel, "full"),
        (ParallelConfig(pp=2, schedule="1f1b"), "selective"), (ParallelConfig(pp=2, schedule="zbv"), "full"),
        (_3D, "full"),
    ]  # fmt: skip
    for layout, recompute in layouts:
        yield "llama", layout, {"precision": "bf16", "recompute": recompute}
    yield "gpt2", _ONE, {"precision": "bf16"}
    for layout in (_ONE, _3D):
        yield "gpt2", layout, {"precision": "fp16"}
    for layout in (_ONE, zero3, sequence_parallel):
        yield "llama", layout, {"precision": "fp16"}


def family_cases(transformers: bool, full: bool) -> Iterator[tuple[Preset, ParallelConfig, dict[str, Any]]]:
    """Yield each preset in one process, against transformers if that has it, and under tensor and pipeline parallelism.

    This with documents that do not see each other, every third with ZeRO too. In `full` every preset is under all
    kinds together, without documents too, and the kinds by themselves take turns; and it trains for longer with each.
    """
    apart = {"documents": True, "dropout": 0.0}
    presets = [name for name in SHRUNK if full or SHRUNK[name].has_own_parts]
    for number, preset in enumerate(presets):
        if not SHRUNK[preset].in_transformers:
            yield preset, _ONE, {}
        elif transformers:
            yield preset, _ONE, {"reference": "transformers"}
        tp_pp = _TP_PP if number % 3 else _3D
        yield preset, tp_pp, {**apart, "recompute": "selective"}
        if not full:
            continue
        yield preset, _3D, {"recompute": "selective"}
        yield preset, _TWO[number % len(_TWO)], apart
        # in float32 rounding makes a router choose another expert sooner or later, and losses then differ
        precision = "fp64" if "experts" in SHRUNK[preset].options else "fp32"
        for layout in (ParallelConfig(dp=2), ParallelConfig(tp=2), ParallelConfig(pp=2)):
            yield preset, layout, {"reference": "one process", "precision": precision, "steps": STEPS}
