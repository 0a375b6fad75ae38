"""PartQueue: which parts of which steps are done, which a worker computes, and which may be begun.

Bounded staleness, after Ho et al. 2013 ("More effective distributed ML via a stale synchronous parallel parameter
server"): the oldest part that is not done holds back those that begin more than `staleness` steps later. Parts are not
tied to workers: one that is lost has left its part to the next who asks.
"""

import torch
from torch import Tensor

Part = tuple[int, int]  # step, from 0; number in its batch


class PartQueue:
    """The parts of steps 0 … `steps` - 1, `parts` of each. Every part is given back once."""

    def __init__(self, steps: int, parts: int, staleness: int) -> None:
        self.steps = steps
        self.parts = parts
        self.staleness = staleness
        self.oldest = 0
        """The first step of which a part is not done."""
        self.updates = 0
        """Updates that the weights have which are given out, of as many gradients as a step has parts."""
        self._done: set[Part] = set()  # of steps from `oldest` on
        self._taken: dict[Part, int] = {}

    def take(self, worker: int) -> Part | None:
        """Return the first part that may be begun, from now on the worker's; None if there is none yet."""
        last = min(self.steps - 1, self.oldest + self.staleness, self.updates + self.staleness)
        for step in range(self.oldest, last + 1):
            for number in range(self.parts):
                if (step, number) not in self._done and (step, number) not in self._taken:
                    self._taken[step, number] = worker
                    return step, number
        return None

    def give(self, worker: int, part: Part) -> None:
        """A worker's part is done."""
        assert self._taken.get(part) == worker, f"worker {worker} returned {part}, which it had not taken"
        del self._taken[part]
        self._done.add(part)
        while (parts := {(self.oldest, number) for number in range(self.parts)}) <= self._done:
            self._done -= parts
            self.oldest += 1

    def drop(self, worker: int) -> list[Part]:
        """Return the parts of a worker that is lost, which may now be taken again."""
        lost = [part for part, holder in self._taken.items() if holder == worker]
        for part in lost:
            del self._taken[part]
        return lost

    def done_ahead(self) -> Tensor:
        """1 for each part that is done of `oldest` and later steps, else 0: (staleness + 1, parts) int64."""
        done = torch.zeros(self.staleness + 1, self.parts, dtype=torch.int64)
        for step, number in self._done:
            done[step - self.oldest, number] = 1
        return done

    def resume(self, updates: int, ahead: Tensor) -> None:
        """Go on after so many updates, of which `ahead` is what `done_ahead` returned."""
        self.updates = updates
        self.oldest = updates - int(ahead.sum()) // self.parts
        self._done = {(self.oldest + int(step), int(number)) for step, number in ahead.nonzero().tolist()}
