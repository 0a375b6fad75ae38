"""Reference: the independent runs that a case is compared with, by the plain decoder or by transformers' own models.

Both train in one process in float64, from the case's initial weights and on its batches, with torch's optimizers.
"""

import importlib.util
from dataclasses import dataclass

import torch
from torch import Tensor

from gristmill_parity.cases import Case
from gristmill_parity.plain.decoder import IGNORED
from gristmill_parity.reference_models import (
    Named,
    PlainModel,
    TransformersModel,
    clip_and_update,
    reference_optimizer,
    summed_loss,
)  # fmt: skip
from gristmill_parity.reference_replicas import CompressedSteps, LocalSteps
from gristmill_parity.worker import LOGIT_POSITIONS, global_batch
from training.model.batch import Batch


@dataclass(frozen=True)
class GlobalResult:
    """What a case yields, as global tensors on the CPU."""

    losses: Tensor
    """Each step's mean loss, then an evaluation's, in nats per token."""
    gradients: Named
    """Of the first step, by the parameters' names; with local steps the outer ones of the first round."""
    weights: Named
    """After the last step."""
    logits: Tensor | None = None
    """At LOGIT_POSITIONS of the evaluation's first sequence, (N, V); None if they are not compared."""
    mismatch: str = ""
    """First difference between ranks that hold the same shard, compared bitwise; empty if there is none."""


def run_reference(case: Case) -> GlobalResult:
    """Train the case's reference; `case.reference` says which. Runs in one process, on the CPU."""
    run: LocalSteps | CompressedSteps | _Steps
    if case.layout.local_steps:
        run = LocalSteps(case)
    else:
        run = _Steps(case) if case.layout.compression == "none" else CompressedSteps(case)
    losses = [run.step(*global_batch(case, step)) for step in range(case.steps)]
    batch, targets = global_batch(case, case.steps)
    with torch.no_grad():
        logits = torch.empty(*batch.ids.shape, case.model.vocab_size, dtype=torch.float64)
        for part, where in _documents_alone(batch):
            logits.flatten(0, 1)[where] = run.model.logits(part.ids)
        losses.append(summed_loss(logits, batch.targets) / targets)
    return GlobalResult(torch.stack(losses), run.gradients, run.model.named("data"), logits[0, list(LOGIT_POSITIONS)])


class _Steps:
    """Steps of one process; `gradients` are those of the first."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = TransformersModel(case) if case.reference == "transformers" else PlainModel(case)
        self.optimizer = reference_optimizer(case, self.model)
        self.gradients: Named = {}

    def step(self, batch: Batch, targets: int) -> Tensor:
        """Take a step; returns the mean loss before it."""
        model = self.model
        self.optimizer.zero_grad()
        parts = _documents_alone(batch)
        loss = torch.stack([model.loss(part) for part, _ in parts]).sum() / targets
        (loss + sum(_z_loss(self.case, model, part) for part, _ in parts) / targets).backward()
        self.gradients = self.gradients or {name: grad.clone() for name, grad in model.named("grad").items()}
        clip_and_update(self.case, model, self.optimizer)
        return loss.detach()


def _z_loss(case: Case, model: PlainModel | TransformersModel, batch: Batch) -> Tensor | float:
    """The case's coefficient times the squared log-sum-exp of the logits, summed over the batch's targets."""
    if not case.z_loss:
        return 0.0
    log_z = model.logits(batch.ids).logsumexp(-1)
    return case.z_loss * log_z[batch.targets != IGNORED].square().sum()


def _documents_alone(batch: Batch) -> list[tuple[Batch, Tensor]]:
    """The documents of the batch, each a sequence of its own, by length; the whole batch if it has none.

    With each batch, where its tokens are in the flattened one: (documents, length) int64.
    """
    every = torch.arange(batch.ids.numel())
    if batch.positions is None:
        return [(batch, every.view_as(batch.ids))]
    starts = every[batch.positions.flatten() == 0]
    lengths, parts = torch.cat([starts, starts.new_tensor([len(every)])]).diff(), []
    for length in lengths.unique().tolist():
        where = starts[lengths == length, None] + every[:length]
        ids, targets = (t.flatten()[where] for t in (batch.ids, batch.targets))
        parts.append((Batch(ids, targets, batch.sample_ids[:1].expand(len(where))), where))
    return parts


def transformers_is_installed() -> bool:
    """True where transformers can be imported."""
    return importlib.util.find_spec("transformers") is not None
