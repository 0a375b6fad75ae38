"""Outcome: what a run's folder has at its end, by the metrics and the last checkpoint that it wrote."""

import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from gristmill_parity.reference import GlobalResult
from gristmill_parity.runs.run_case import RunCase

_WEIGHT = "model."


def read_outcome(run: Path, case: RunCase) -> GlobalResult:
    """Read a finished run: losses of its steps and evaluations, norms of its gradients, weights of its checkpoint.

    Files are read by json and torch alone. Raises AssertionError where a step or an evaluation is not recorded once.
    """
    steps, evaluations = _read_metrics(run)
    recorded = [record["step"] for record in steps]
    assert recorded == list(range(1, case.steps + 1)), f"metrics.jsonl has steps {recorded}"
    evaluated = [record["step"] for record in evaluations]
    assert evaluated == case.evaluations, f"metrics.jsonl has evaluations after steps {evaluated}"
    skipped = [record["step"] for record in steps if record.get("skipped")]
    assert not skipped, f"steps {skipped} were skipped"
    summary = json.loads((run / "summary.json").read_text())
    losses = [record["loss"] for record in [*steps, *evaluations]]
    losses.append(summary["unigram_loss"])
    norms = [record["grad_norm"] for record in steps]
    latest = (run / "checkpoints/latest").read_text().strip()
    return GlobalResult(
        losses=torch.tensor(losses, dtype=torch.float64),
        gradients={"norm": torch.tensor(norms, dtype=torch.float64)},
        weights=_weights(run / "checkpoints" / latest),
    )


def _read_metrics(run: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the records of a run's steps, and those of its evaluations."""
    steps = []
    evaluations = []
    for line in (run / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "step":
            steps.append(record)
        elif record["kind"] == "eval":
            evaluations.append(record)
    return steps, evaluations


def _weights(checkpoint: Path) -> dict[str, Tensor]:
    """Return the weights of a checkpoint, read by torch, by name."""
    reader = dcp.FileSystemReader(checkpoint)
    state: dict[str, Any] = {}
    for key, stored in reader.read_metadata().state_dict_metadata.items():
        if key.startswith(_WEIGHT) and isinstance(stored, TensorStorageMetadata):
            state[key] = torch.empty(stored.size, dtype=stored.properties.dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there is one process
        dcp.load(state, storage_reader=reader, no_dist=True)
    return {key.removeprefix(_WEIGHT): values for key, values in state.items()}
