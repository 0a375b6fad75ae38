"""Source losses: the training loss of each data set of a mix, recorded with the metrics."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from training.parallel.parallel_model import ParallelModel
from training.plugin import LogRecord, Plugin


class SourceLosses(Plugin):
    """Records the mean loss of the sequences of each data set since the last report; skipped steps do not count.

    Sums stay on the device: the ranks add them up when there is a report, and no step waits for another rank.
    """

    def __init__(self, model: ParallelModel, names: Sequence[str]) -> None:
        """`names` of the data sets, in the order of the mix."""
        self.model = model
        self.names = names
        self._sums = torch.zeros(2, len(names), dtype=torch.float64, device=model.world.device)
        self._step = 0
        self._is_updated = False
        model.keep_sequence_losses()

    @contextmanager
    def update(self, loss_scale: float) -> Iterator[None]:  # noqa: ARG002
        yield
        self._is_updated = True

    def after_step(self, step: int) -> int:
        sums = self.model.take_source_losses(len(self.names))
        if self._is_updated:
            self._sums += sums
        self._step = step
        self._is_updated = False
        return step

    def log_records(self) -> list[LogRecord]:
        """Return one record: of each data set that was read, `loss` in nats/token, and the `tokens` that it is of."""
        losses, tokens = self.model.world.all_reduce(self._sums).tolist()
        self._sums.zero_()
        sources = zip(self.names, losses, tokens, strict=True)
        sets = {name: {"loss": loss / count, "tokens": int(count)} for name, loss, count in sources if count}
        return [("losses", self._step, {"sets": sets})] if sets else []
