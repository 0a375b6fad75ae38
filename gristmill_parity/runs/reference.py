"""Reference of a run: the plain decoder, trained in one process on what it reads of the same token shards by itself."""

import math
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from gristmill_parity.cases import VOCAB_SIZE
from gristmill_parity.plain.decoder import IGNORED
from gristmill_parity.plain.token_data import PlainBatch, PlainOrder, PlainTokens, evaluation_batch, unigram_loss
from gristmill_parity.reference import GlobalResult, evaluated_logits, reference_steps, set_learning_rate
from gristmill_parity.reference_models import PlainModel, TransformersModel, summed_loss
from gristmill_parity.runs.run_case import EVALUATED, RunCase
from gristmill_parity.runs.shards import HOLDOUT, train_folders, write_token_data
from gristmill_parity.worker import SEED
from training.model.batch import TokenBatch


def run_reference_of_run(case: RunCase) -> GlobalResult:
    """Train the reference of a run without a stop, in one process on the CPU; the results are those of `read_outcome`.

    Losses: of the steps, of the evaluations, and of the unigram model.
    """
    with tempfile.TemporaryDirectory() as folder:
        write_token_data(Path(folder))
        paths = train_folders(Path(folder), max(1, len(case.weights)))
        sets = [PlainTokens(path, case.seq_len, case.documents) for path in paths]
        holdout = PlainTokens(Path(folder) / HOLDOUT, case.seq_len, case.documents)
    ramp = []
    for entry in case.batch_ramp:
        size, tokens = entry.split(":")
        ramp.append((int(size), int(tokens)))
    weights = case.weights or (1.0,)
    order = PlainOrder(sets, weights, SEED, case.sequences, ramp)
    steps = reference_steps(case)
    losses = []
    evaluations = []
    for step, read in enumerate(order.batches(case.steps), 1):
        for optimizer in steps.optimizers:
            set_learning_rate(optimizer, _learning_rate(step, case))
        losses.append(steps.step(*_tokens(read, case)))
        if step in case.evaluations:
            evaluations.append(_evaluate(steps.model, holdout, case))
    unigram = unigram_loss(sets, weights, holdout, EVALUATED, VOCAB_SIZE)
    all_losses = [*losses, *evaluations, torch.tensor(unigram, dtype=torch.float64)]
    norms = torch.stack(steps.norms)
    return GlobalResult(torch.stack(all_losses), {"norm": norms}, steps.model.named("data"))


def _learning_rate(step: int, case: RunCase) -> float:
    """Return the rate of a step, from 1: a warm-up to the largest rate, and half a cosine down to the last one."""
    optim = case.optim
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    share = (step - optim.warmup_steps) / (case.steps - optim.warmup_steps)
    return optim.final_lr + (optim.lr - optim.final_lr) * (1 + math.cos(math.pi * share)) / 2


def _tokens(read: PlainBatch, case: RunCase) -> tuple[TokenBatch, int]:
    """Return a batch as models take it, and its number of targets."""
    ids = torch.from_numpy(read.ids)
    targets = torch.from_numpy(read.targets)
    samples = torch.from_numpy(read.sample_ids)
    positions = torch.from_numpy(read.positions) if case.documents else None
    return TokenBatch(ids, targets, samples, positions), int((targets != IGNORED).sum())


def _evaluate(model: PlainModel | TransformersModel, holdout: PlainTokens, case: RunCase) -> Tensor:
    """Return the mean loss of the sequences of the holdout that a run evaluates."""
    batch, targets = _tokens(evaluation_batch(holdout, EVALUATED), case)
    return summed_loss(evaluated_logits(model, batch, VOCAB_SIZE), batch.targets) / targets
