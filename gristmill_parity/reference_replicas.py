"""Reference of replicas: plain decoders that send compressed gradients, or take local steps, all in one process."""

import torch
from torch import Tensor

from gristmill_parity.cases import Case
from gristmill_parity.plain.compression import PlainInt8, PlainPowerSGD
from gristmill_parity.plain.decoder import IGNORED
from gristmill_parity.reference_models import Named, PlainModel, clip_and_update, reference_optimizer
from gristmill_parity.worker import ADAMW, SEED
from training.experimental.compression.powersgd import initial_q
from training.model.batch import Batch

_BY_COLUMNS = ("o.weight", "down.weight")  # of matrices those whose inputs tensor parallelism divides


class CompressedSteps:
    """Steps of one model by gradients that replicas sum compressed; `gradients` are the first sums."""

    def __init__(self, case: Case) -> None:
        self.case, self.model, layout = case, PlainModel(case), case.layout
        self.optimizer = reference_optimizer(case, self.model)
        self.gradients: Named = {}
        self.replicas, self.rank, self.tp = layout.dp, layout.compression_rank, layout.tp
        self._int8 = PlainInt8(self.replicas) if layout.compression == "int8" else None
        self._powersgd: dict[tuple[str, int], PlainPowerSGD] = {}

    def step(self, batch: Batch, targets: int) -> Tensor:
        """Take a step; returns the mean loss before it."""
        each, total = list[Named](), torch.zeros((), dtype=torch.float64)
        for replica in range(self.replicas):
            self.optimizer.zero_grad()
            loss = self.model.loss(own_sequences(batch, replica, self.replicas)) / targets
            loss.backward()
            total += loss.detach()
            each.append({name: grad.clone() for name, grad in self.model.named("grad").items()})
        sums = self._sums(each)
        for name, weight in self.model.weights.items():
            weight.grad = sums[name].clone()
        self.gradients = self.gradients or sums
        clip_and_update(self.case, self.model, self.optimizer)
        return total

    def _sums(self, each: list[Named]) -> Named:
        """What all replicas get: vectors exactly, and matrices compressed."""
        sums = {name: torch.stack([own[name] for own in each]).sum(0) for name in each[0]}
        matrices = [name for name in reversed(sums) if sums[name].ndim == 2]  # as a backward pass has them
        if self._int8 is None:
            return sums | {name: self._low_rank(name, [own[name] for own in each]) for name in matrices}
        rows = [torch.cat([own[name].flatten() for name in matrices]) for own in each]
        parts = self._int8.sum(rows).split([sums[name].numel() for name in matrices])
        return sums | {name: part.view_as(sums[name]) for name, part in zip(matrices, parts, strict=True)}

    def _low_rank(self, name: str, gradients: list[Tensor]) -> Tensor:
        """By PowerSGD: each tensor-parallel rank of its own piece of the matrix, if that makes it smaller."""
        dim, found = int(name.endswith(_BY_COLUMNS)), []
        for index, pieces in enumerate(zip(*(g.chunk(self.tp, dim) for g in gradients), strict=True)):
            n, m = pieces[0].shape
            if self.rank * (n + m) >= n * m:
                found.append(torch.stack(pieces).sum(0))
                continue
            if (name, index) not in self._powersgd:
                first = initial_q((n, m), self.rank, SEED, name, pieces[0])
                self._powersgd[name, index] = PlainPowerSGD(self.replicas, first)
            found.append(self._powersgd[name, index].sum(pieces))
        return torch.cat(found, dim)


class LocalSteps:
    """Local steps, as algorithm 1 of Douillard et al. 2023 has them; `gradients` are the first outer ones.

    `model` has the shared weights, and torch's SGD is the outer optimizer.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.model = case, PlainModel(case)
        self.gradients: Named = {}
        self._each = [PlainModel(case) for _ in range(case.layout.dp)]
        self._optimizers = [reference_optimizer(case, one) for one in self._each]
        self._outer = torch.optim.SGD(
            self.model.parameters, lr=ADAMW.outer_lr, momentum=ADAMW.outer_momentum, nesterov=True
        )
        self._steps = 0

    def step(self, batch: Batch, targets: int) -> Tensor:
        """Let each replica take a step; returns their mean loss before it."""
        total = torch.zeros((), dtype=torch.float64)
        for replica, (one, optimizer) in enumerate(zip(self._each, self._optimizers, strict=True)):
            own = own_sequences(batch, replica, len(self._each))
            optimizer.zero_grad()
            loss = one.loss(own)
            (loss / int((own.targets != IGNORED).sum())).backward()
            total += loss.detach() / targets
            clip_and_update(self.case, one, optimizer)
        self._steps += 1
        if self._steps % self.case.layout.local_steps == 0:
            self._meet()
        return total

    def _meet(self) -> None:
        """An outer step, after which all replicas have the shared weights."""
        for name, shared in self.model.weights.items():
            own = [one.weights[name].detach() for one in self._each]
            shared.grad = torch.stack([shared.detach() - weight for weight in own]).mean(0)
        self.gradients = self.gradients or {name: grad.clone() for name, grad in self.model.named("grad").items()}
        self._outer.step()
        for name, shared in self.model.weights.items():
            for one in self._each:
                one.weights[name].data.copy_(shared.detach())


def own_sequences(batch: Batch, replica: int, replicas: int) -> Batch:
    """The sequences of a replica: every `replicas`-th one."""
    own = slice(replica, None, replicas)
    return Batch(batch.ids[own], batch.targets[own], batch.sample_ids[own])
