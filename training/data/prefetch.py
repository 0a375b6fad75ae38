"""PrefetchLoader: prefetches batches in a thread."""

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from training.data.batches import Batches
from training.model.batch import Batch

_MAX_READ_STEPS = 16  # per read
_MAX_READ_TOKENS = 1 << 20  # per read: 8 MiB of int64


class PrefetchLoader:
    """Loads a data-parallel rank's batches; the next ones are read while the model computes with the current ones.

    One read covers `steps_per_read` steps, because handing work to a thread costs more than reading a small batch.
    """

    def __init__(self, batches: Batches, device: torch.device) -> None:
        self.batches, self.device = batches, device
        split = batches.split
        tokens = split.grad_accum_steps * split.micro_batch_size * batches.data.length  # of this rank, per step
        self.steps_per_read = min(_MAX_READ_STEPS, max(1, _MAX_READ_TOKENS // tokens))
        self._thread = ThreadPoolExecutor(1, "data")
        self._loaded: dict[int, Batch] = {}  # by step
        self._next: tuple[int, Future[list[Batch]]] | None = None  # its first step, and the read in progress

    def batch(self, step: int) -> Batch:
        """The batch of a step (from 0) on the device; steps may come in any order, but only the next is prefetched."""
        if step not in self._loaded:
            read = self._next if self._next and self._next[0] == step else self._submit(step)
            self._loaded = dict(enumerate(read[1].result(), step))
            self._next = self._submit(step + self.steps_per_read)
        return self._loaded[step].to(self.device)

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _submit(self, first: int) -> tuple[int, Future[list[Batch]]]:
        return first, self._thread.submit(self._read, first)

    def _read(self, first: int) -> list[Batch]:
        batches = self.batches.read(first, self.steps_per_read)
        return [batch.pin_memory() for batch in batches] if self.device.type == "cuda" else batches
