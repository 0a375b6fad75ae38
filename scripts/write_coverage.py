"""Write docs/reference/coverage.md: which layouts the certificate trains with which features, in which precisions.

python scripts/write_coverage.py
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

from gristmill_parity.cases import Case
from gristmill_parity.certificate import plan_certificate
from gristmill_parity.feature_cases import feature_cases
from gristmill_parity.runs.run_case import RunCase, trainer_runs
from training.parallel.pipeline.schedules import SPLIT_BACKWARD

ROOT = Path(__file__).resolve().parents[1]
COVERAGE = ROOT / "docs/reference/coverage.md"
HEAD = """# What is tested where

Which layouts are trained with which features, in which precisions.

```text
gristmill parity --only "dp2 tp1 pp1 zero1"      # the rows of one layout
```

In each cell [the certificate](../concepts/parallelism.md#the-parity-certificate) trains the layout with the feature
and compares every gradient, in the precisions that are named; – means not at all. The tests run the same cases.
`python scripts/write_coverage.py` writes this page from the certificate's list, and a test compares the two.

Other tests compare losses:

| what | tests |
|---|---|
| compiled blocks with sequence parallelism, ZeRO-3, a ring and experts | `tests/training/parallel/test_compile.py` |
| moments on disk and in CPU memory, bit for bit | `tests/training/optim/` |
| averages of the weights under ZeRO-3 and tensor parallelism | `tests/training/optim/test_weight_average.py` |
| runs killed and resumed under other layouts | `tests/training/checkpoint/`, `tests/training/test_restart.py` |
"""
_GPU = """
Pipelines, grids and rings need a GPU for each process. The tests marked `gpu` (`tests/training/test_gpu.py`) run some
of these rows, and train, compile, offload and resume. [On a GPU](gpu.md) says what ran on one GPU; no row ran
on several GPUs or machines.
"""
LAYOUTS: dict[str, Callable[[Case], bool]] = {
    "one process": lambda c: _axes(c) == "",
    **{
        f"dp, ZeRO-{zero}": lambda c, zero=zero: _axes(c) == "dp" and c.layout.zero == zero and not _hybrid(c)
        for zero in (0, 1, 2, 3)
    },
    "dp, ZeRO within groups": lambda c: _axes(c) == "dp" and _hybrid(c),
    "tp": lambda c: _axes(c) == "tp" and not c.layout.sequence_parallel and c.layout.tensor == "1d",
    "tp, on a grid (2d, 2.5d, 3d)": lambda c: c.layout.tensor != "1d",
    "tp, sequence parallel": lambda c: _axes(c) == "tp" and c.layout.sequence_parallel,
    "pp, whole backward pass": lambda c: _axes(c) == "pp" and c.layout.schedule not in SPLIT_BACKWARD,
    "pp, split backward pass": lambda c: _axes(c) == "pp" and c.layout.schedule in SPLIT_BACKWARD,
    "dp × tp": lambda c: _axes(c) == "dp tp",
    "dp × pp": lambda c: _axes(c) == "dp pp",
    "tp × pp": lambda c: _axes(c) == "tp pp",
    "dp × tp × pp": lambda c: _axes(c) == "dp tp pp",
    "cp": lambda c: _axes(c) == "cp",
    "cp × tp": lambda c: _axes(c) == "tp cp",
    "cp × dp, pp": lambda c: _axes(c) in ("dp cp", "pp cp", "dp pp cp"),
}
FEATURES: dict[str, Callable[[Case], bool]] = {
    "a step of SGD": lambda c: c.optimizer == "sgd",
    "dropout": lambda c: c.dropout > 0,
    "micro-batches": lambda c: c.layout.micro_batches > 1,
    "recompute: selective": lambda c: c.recompute == "selective",
    "recompute: full": lambda c: c.recompute == "full",
    "AdamW, clipped": lambda c: c.optimizer == "adamw",
    "Muon, clipped": lambda c: c.optimizer == "muon",
    "z-loss": lambda c: c.z_loss > 0,
    "offload: cpu": lambda c: c.offload == "cpu",
    "offload: disk": lambda c: c.offload == "disk",
    "compiled": lambda c: c.compiled,
    "documents apart": lambda c: c.documents,
    "packed chats": lambda c: c.chats,
    "experts": lambda c: bool(c.sparse),
}
_RUNS = """## Runs of the trainer

Each trains under one layout, crashes or is stopped by a signal, and resumes under the other
([how](../concepts/parallelism.md#runs-of-the-trainer)).
"""


def coverage() -> str:
    """The whole page."""
    cpu = [case for case in plan_certificate(False, 8).cases if not isinstance(case, RunCase)]
    on_one_gpu = [*feature_cases("cuda")[0], *(case for case in cpu if case.reference == "one process")]
    gpu = [case for case in on_one_gpu if not case.sends_tensors]
    parts = [HEAD, "## On a CPU\n", *_table(cpu), "\n## On one GPU, with `--device cuda`\n", *_table(gpu), _GPU]
    parts += [_RUNS, *_runs(False), "\nWith `--full` also:\n", *_runs(True), ""]
    return "\n".join(parts)


def _runs(full: bool) -> list[str]:
    """The names of the runs; with `full` of those that are only in the full certificate."""
    usual = trainer_runs(False)[0]
    chosen = [case for case in trainer_runs(True)[0] if case not in usual] if full else usual
    return [f"- `{case}`" for case in chosen]


def _table(cases: Sequence[Case]) -> list[str]:
    lines = [f"| | {' | '.join(FEATURES)} |", "|---" * (len(FEATURES) + 1) + "|"]
    for layout, has_layout in LAYOUTS.items():
        chosen = [case for case in cases if has_layout(case)]
        cells = [_precisions([case for case in chosen if has(case)]) for has in FEATURES.values()]
        lines.append(f"| {layout} | {' | '.join(cells)} |")
    return lines


def _precisions(cases: Sequence[Case]) -> str:
    found = {case.precision for case in cases}
    return " ".join(name for name in ("fp64", "fp32", "bf16", "fp16") if name in found) or "–"


def _axes(case: Case) -> str:
    """The axes along which a case has several processes, such as "dp tp"."""
    return " ".join(name for name in ("dp", "tp", "pp", "cp") if getattr(case.layout, name) > 1)


def _hybrid(case: Case) -> bool:
    return 1 < case.layout.zero_group < case.layout.dp


if __name__ == "__main__":
    COVERAGE.write_text(coverage(), encoding="utf-8")
