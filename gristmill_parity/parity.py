"""The parity certificate: training computes what independent references do, and every layout what one process does.

`gristmill parity` covers all pairs of options, in two to three minutes on two idle cores; `--full` runs every layout.
"""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

from gristmill.console import wide_console
from gristmill.errors import GristmillError, UsageError
from gristmill.storage.files import reject_remote
from gristmill.storage.local import atomic_write_bytes
from gristmill.wording import count_of


def parity(
    full: bool = False,
    processes: int | None = None,
    device: Literal["cpu", "cuda"] = "cpu",
    out: Path | None = None,
    only: str = "",
    explain: bool = False,
) -> None:
    """Check training against independent references, and parallel layouts against one process.

    Trains a small Llama or GPT-2 (tied embedding, biases, dropout) in real processes, from the same seed and data, and
    compares losses, gradients and weights after three steps. One process, AdamW with clipping, offloading, bf16, fp16
    and compiled blocks are compared with a plain decoder that shares no code with the trainer, and with transformers
    where it is installed; layouts with one process, and their traffic with formulas; and runs of the trainer from token
    shards, which are stopped and resume, with a plain decoder that reads the shards by itself. The limits are in
    docs/concepts/parallelism.md.

    Args:
        full: Run every possible layout (takes most of an hour) instead of a set that covers all pairs of options.
        processes: Maximum number of processes of a layout; by default 8, and 16 for some rows of --full.
        device: Where to train. If there are fewer GPUs than processes, processes share them, through gloo.
        out: Also write the table to this file: Markdown if it ends in .md, JSON if in .json.
        only: Run only the rows whose name contains this text, for example the name of a row that failed.
        explain: Say of every row where it first differs from one process: the tensor, the rank, and what the
            difference looks like. Without it that is said of the first three red rows.
    """
    if processes is not None and not 1 <= processes <= 64:
        raise UsageError(f"processes is {processes}; expected 1 to 64")
    if out is not None and out.suffix not in (".md", ".json"):
        raise UsageError(f"out is {out}; expected a file that ends in .md or .json")
    if out is not None:
        reject_remote(out)
    import torch  # takes seconds, as the trainer does: the help needs neither

    from gristmill_parity.certificate import as_json, as_markdown, plan_certificate, report, run_cases
    from gristmill_parity.explain import RED_ROWS, explain_rows

    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("device is cuda, but torch finds no GPU on this machine; try --device cpu")
    plan = plan_certificate(full, processes, device)
    if only:
        plan = replace(plan, refused={})
    cases = [case for case in plan.cases if only in str(case)]
    if not cases:
        raise UsageError(f"--only is {only!r}, which no row's name has; one is {str(plan.cases[-1])!r}")
    started = time.monotonic()
    rows = run_cases(cases, device)
    seconds = time.monotonic() - started
    wide_console().print(report(rows, plan, seconds))
    red = [row.case for row in rows if not row.passed]
    to_explain = [row.case for row in rows] if explain else red[:RED_ROWS]
    if to_explain:
        for case, text in explain_rows(to_explain, device):
            wide_console().print(f"\n{case}\n{text}", markup=False, highlight=False)
    if out is not None:
        if out.suffix == ".json":
            certificate = json.dumps(as_json(rows, plan), indent=1)
        else:
            certificate = as_markdown(rows, plan, seconds)
        atomic_write_bytes(out, certificate.encode())
    if red:
        raise GristmillError(
            f"{len(red)} of {count_of(len(rows), 'row')} red: results differ from the reference, or traffic from "
            "theory; see above"
        )
