"""Reference: the independent runs that a case is compared with, steps of a reference model by torch's optimizers.

All train in one process in float64, from the case's initial weights and on its batches; replicas that compress
gradients or take local steps are plain decoders, too.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from gristmill_parity.cases import Case
from gristmill_parity.plain.compression import PlainInt8, PlainPowerSGD
from gristmill_parity.plain.decoder import IGNORED
from gristmill_parity.plain.muon import PlainMuon
from gristmill_parity.reference_models import Named, PlainModel, TransformersModel, summed_loss
from gristmill_parity.worker import ADAMW, LOGIT_POSITIONS, LR, SEED, global_batch
from training.experimental.compression.powersgd import initial_q
from training.model.batch import TokenBatch


def reference_optimizer(case: Case, model: PlainModel | TransformersModel) -> torch.optim.Optimizer | PlainMuon:
    """Return torch's plain SGD, or its AdamW, in which norms and biases do not decay; or plain Muon."""
    if case.optimizer == "sgd":
        return torch.optim.SGD(model.parameters, lr=LR)
    named = model.weights if isinstance(model, PlainModel) else {}
    biases = {id(weight) for name, weight in named.items() if name.endswith("bias")}  # experts' have two dimensions
    matrices = list[Tensor]()
    if case.optimizer == "muon":
        for name, weight in named.items():
            if name.startswith("blocks.") and weight.ndim >= 2 and id(weight) not in biases:
                matrices.append(weight)
    orthogonalised = {id(matrix) for matrix in matrices}
    decaying = list[Tensor]()
    others = list[Tensor]()
    for parameter in model.parameters:
        if id(parameter) in orthogonalised:
            continue
        if parameter.ndim >= 2 and id(parameter) not in biases:
            decaying.append(parameter)
        else:
            others.append(parameter)
    groups = [{"params": decaying, "weight_decay": ADAMW.weight_decay}, {"params": others, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=ADAMW.lr, betas=ADAMW.betas, eps=ADAMW.eps)
    if case.optimizer == "adamw":
        return adamw
    return PlainMuon(matrices, adamw, ADAMW.lr, ADAMW.weight_decay, ADAMW.muon_momentum)


def clip_and_update(
    case: Case, model: PlainModel | TransformersModel, optimizer: torch.optim.Optimizer | PlainMuon
) -> Tensor:
    """Update the model by its gradients, which are clipped as the case says; returns their norm before that."""
    max_norm = math.inf if case.optimizer == "sgd" else ADAMW.max_grad_norm
    norm = torch.nn.utils.clip_grad_norm_(model.parameters, max_norm)
    optimizer.step()
    return norm


def set_learning_rate(optimizer: torch.optim.Optimizer | PlainMuon, rate: float) -> None:
    """Let the next updates have another learning rate."""
    if isinstance(optimizer, PlainMuon):
        optimizer.lr = rate
        optimizer = optimizer.other
    for group in optimizer.param_groups:
        group["lr"] = rate


def _copied_gradients(model: PlainModel | TransformersModel) -> Named:
    return {name: gradient.clone() for name, gradient in model.named("grad").items()}


_BY_COLUMNS = ("o.weight", "down.weight")  # of matrices those whose inputs tensor parallelism divides


class CompressedSteps:
    """Steps of one model by gradients that replicas sum compressed; `gradients` are the sums of the first step."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = PlainModel(case)
        layout = case.layout
        self.optimizer = reference_optimizer(case, self.model)
        self.optimizers = [self.optimizer]
        self.gradients: Named = {}
        self.norms: list[Tensor] = []
        self.replicas = layout.dp
        self.rank = layout.compression_rank
        self.tp = layout.tp
        self._int8 = PlainInt8(self.replicas) if layout.compression == "int8" else None
        self._powersgd: dict[tuple[str, int], PlainPowerSGD] = {}

    def step(self, batch: TokenBatch, targets: int) -> Tensor:
        """Take a step; returns the mean loss before it."""
        by_replica = list[Named]()
        total = torch.zeros((), dtype=torch.float64)
        for replica in range(self.replicas):
            self.optimizer.zero_grad()
            loss = self.model.loss(own_sequences(batch, replica, self.replicas)) / targets
            loss.backward()
            total += loss.detach()
            by_replica.append(_copied_gradients(self.model))
        sums = self._sums(by_replica)
        for name, weight in self.model.weights.items():
            weight.grad = sums[name].clone()
        self.gradients = self.gradients or sums
        self.norms.append(clip_and_update(self.case, self.model, self.optimizer))
        return total

    def _sums(self, by_replica: list[Named]) -> Named:
        """Return the sums that all replicas get: of vectors exactly, of matrices compressed."""
        sums = {name: torch.stack([own[name] for own in by_replica]).sum(0) for name in by_replica[0]}
        matrices = self._compressed_names(sums)
        if self._int8 is None:
            for name in matrices:
                sums[name] = self._low_rank(name, [own[name] for own in by_replica])
            return sums
        rows = []
        for own in by_replica:
            rows.append(torch.cat([own[name].flatten() for name in matrices]))
        sizes = [sums[name].numel() for name in matrices]
        for name, values in zip(matrices, self._int8.sum(rows).split(sizes), strict=True):
            sums[name] = values.view_as(sums[name])
        return sums

    def _compressed_names(self, gradients: Named) -> list[str]:
        """Return the names of the matrices that are compressed, last ones first, as a backward pass has them."""
        has_kv_terms = self.tp > self.case.model.kv_heads  # several ranks have terms of a head's gradient
        names = []
        for name in reversed(gradients):
            if gradients[name].ndim == 2 and not (has_kv_terms and name.endswith(("k.weight", "v.weight"))):
                names.append(name)
        return names

    def _low_rank(self, name: str, gradients: list[Tensor]) -> Tensor:
        """Return the sum by PowerSGD: each tensor-parallel rank compresses its piece, if that makes it smaller."""
        dim = int(name.endswith(_BY_COLUMNS))
        pieces_of_replicas = [gradient.chunk(self.tp, dim) for gradient in gradients]
        sums = []
        for index, pieces in enumerate(zip(*pieces_of_replicas, strict=True)):
            rows, columns = pieces[0].shape
            if self.rank * (rows + columns) >= rows * columns:
                sums.append(torch.stack(pieces).sum(0))
                continue
            if (name, index) not in self._powersgd:
                first = initial_q((rows, columns), self.rank, SEED, name, pieces[0])
                self._powersgd[name, index] = PlainPowerSGD(self.replicas, first)
            sums.append(self._powersgd[name, index].sum(pieces))
        return torch.cat(sums, dim)


class LocalSteps:
    """Local steps, as algorithm 1 of Douillard et al. 2023 has them; `gradients` are the first outer ones.

    `model` has the shared weights, and torch's SGD is the outer optimizer.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = PlainModel(case)
        self.gradients: Named = {}
        self.norms: list[Tensor] = []
        self._replicas = [PlainModel(case) for _ in range(case.layout.dp)]
        self.optimizers = [reference_optimizer(case, replica) for replica in self._replicas]
        self._outer = torch.optim.SGD(
            self.model.parameters, lr=ADAMW.outer_lr, momentum=ADAMW.outer_momentum, nesterov=True
        )
        self._steps = 0

    def step(self, batch: TokenBatch, targets: int) -> Tensor:
        """Let each replica take a step; returns their mean loss before it."""
        total = torch.zeros((), dtype=torch.float64)
        norms = []
        for number, replica in enumerate(self._replicas):
            own = own_sequences(batch, number, len(self._replicas))
            optimizer = self.optimizers[number]
            optimizer.zero_grad()
            if replica.experts is not None:
                replica.experts.restart()
            loss = replica.loss(own)
            total_loss = loss if replica.experts is None else loss + replica.experts.loss
            own_targets = int((own.targets != IGNORED).sum())
            (total_loss / own_targets).backward()
            total += loss.detach() / targets
            norms.append(clip_and_update(self.case, replica, optimizer))
        self.norms.append(torch.stack(norms).square().mean().sqrt())
        self._steps += 1
        if self._steps % self.case.layout.local_steps == 0:
            self._outer_step()
        return total

    def _outer_step(self) -> None:
        """Update the shared weights by the replicas' mean change, and give them to all replicas."""
        for name, shared in self.model.weights.items():
            changes = [shared.detach() - replica.weights[name].detach() for replica in self._replicas]
            shared.grad = torch.stack(changes).mean(0)
        self.gradients = self.gradients or _copied_gradients(self.model)
        self._outer.step()
        for name, shared in self.model.weights.items():
            for replica in self._replicas:
                replica.weights[name].data.copy_(shared.detach())


def own_sequences(batch: TokenBatch, replica: int, replicas: int) -> TokenBatch:
    """Return the sequences of a replica: every `replicas`-th one."""
    return batch.rows(slice(replica, None, replicas))


@dataclass(frozen=True)
class GlobalResult:
    """The results of a case, as global tensors on the CPU."""

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
    run = reference_steps(case)
    losses = [run.step(*global_batch(case, step)) for step in range(case.steps)]
    batch, targets = global_batch(case, case.steps)
    logits = evaluated_logits(run.model, batch, case.model.vocab_size)
    losses.append(summed_loss(logits, batch.targets) / targets)
    return GlobalResult(torch.stack(losses), run.gradients, run.model.named("data"), logits[0, list(LOGIT_POSITIONS)])


@torch.no_grad()
def evaluated_logits(model: PlainModel | TransformersModel, batch: TokenBatch, vocabulary: int) -> Tensor:
    """Return the logits (B, T, V) of a batch, each of its documents alone."""
    logits = torch.empty(*batch.ids.shape, vocabulary, dtype=torch.float64)
    for part, where in _documents_alone(batch):
        logits.flatten(0, 1)[where] = model.logits(part.ids)
    return logits


def reference_steps(case: Case) -> "LocalSteps | CompressedSteps | OneModelSteps":
    """Return the steps of a case's reference, which is at its initial weights."""
    if case.layout.local_steps:
        return LocalSteps(case)
    if case.layout.compression != "none":
        return CompressedSteps(case)
    return OneModelSteps(case)


class OneModelSteps:
    """Steps of one process; `gradients` are those of the first."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = TransformersModel(case) if case.reference == "transformers" else PlainModel(case)
        self.optimizer = reference_optimizer(case, self.model)
        self.optimizers = [self.optimizer]
        self.gradients: Named = {}
        self.norms: list[Tensor] = []

    def step(self, batch: TokenBatch, targets: int) -> Tensor:
        """Take a step; returns the mean loss before it."""
        model = self.model
        experts = model.experts if isinstance(model, PlainModel) else None
        if experts is not None:
            experts.restart()
        self.optimizer.zero_grad()
        documents = [batch_of_length for batch_of_length, _ in _documents_alone(batch)]
        loss = torch.stack([model.loss(each) for each in documents]).sum() / targets
        total_loss = loss + sum(_z_loss(self.case, model, each) for each in documents) / targets
        if experts is not None:
            total_loss = total_loss + experts.loss / targets
        total_loss.backward()
        self.gradients = self.gradients or _copied_gradients(model)
        self.norms.append(clip_and_update(self.case, model, self.optimizer))
        if experts is not None:
            experts.update()
        return loss.detach()


def _z_loss(case: Case, model: PlainModel | TransformersModel, batch: TokenBatch) -> Tensor | float:
    """Return the case's coefficient times the squared log-sum-exp of the logits, summed over the batch's targets."""
    if not case.z_loss:
        return 0.0
    log_z = model.logits(batch.ids).logsumexp(-1)
    return case.z_loss * log_z[batch.targets != IGNORED].square().sum()


def _documents_alone(batch: TokenBatch) -> list[tuple[TokenBatch, Tensor]]:
    """Return the documents of the batch, each a sequence of its own, by length; the whole batch if it has none.

    With each batch, where its tokens are in the flattened one: (documents, length) int64.
    """
    every = torch.arange(batch.ids.numel())
    if batch.positions is None:
        return [(batch, every.view_as(batch.ids))]
    starts = every[batch.positions.flatten() == 0]
    lengths = torch.cat([starts, starts.new_tensor([len(every)])]).diff()
    documents = []
    for length in lengths.unique().tolist():
        where = starts[lengths == length, None] + every[:length]
        ids = batch.ids.flatten()[where]
        targets = batch.targets.flatten()[where]
        samples = batch.sample_ids[:1].expand(len(where))
        documents.append((TokenBatch(ids, targets, samples), where))
    return documents
