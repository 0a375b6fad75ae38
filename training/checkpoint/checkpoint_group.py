"""A separate gloo group over all ranks, for the threads that write checkpoints."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from gristmill.errors import GristmillError
from training.distributed.process_group import init_distributed
from training.parallel.layout import Layout
from training.parallel.mesh import World, build_world

Result = TypeVar("Result")
_TIMEOUT = timedelta(minutes=10)  # a disk may be slow; a rank that died is noticed at once


@dataclass(frozen=True)
class CheckpointGroup:
    """All ranks of `world`, over a process group that training never uses.

    Checkpoint threads need a separate group: two threads on one gloo group would receive each other's messages.
    """

    world: World
    process_group: dist.ProcessGroup

    @classmethod
    def create(cls, world: World) -> "CheckpointGroup":
        """Create the group. Collective: every rank creates its groups in the same order."""
        return cls(world, dist.new_group(backend="gloo", timeout=_TIMEOUT))

    def gather(self, action: Callable[[], Result]) -> list[Result]:
        """Run `action` on every rank; return all results, by rank.

        If it raises a GristmillError on one rank, every rank raises it.
        """
        mine: tuple[Any, GristmillError | None]
        try:
            mine = action(), None
        except GristmillError as error:
            mine = None, error
        everyone: list[Any] = [None] * self.world.size
        dist.all_gather_object(everyone, mine, group=self.process_group)
        for _, failure in everyone:
            if failure is not None:
                raise failure
        return [result for result, _ in everyone]

    def main_only(self, action: Callable[[], Result]) -> Result:
        """Run `action` on rank 0; every rank returns its result, or raises the GristmillError it raised."""
        return self.gather(lambda: action() if self.world.is_main else None)[0]  # type: ignore[return-value]


@contextmanager
def single_process_group() -> Iterator[CheckpointGroup]:
    """A group of this process alone, for tools that read and write checkpoints outside a training run."""
    with init_distributed("cpu") as device:
        yield CheckpointGroup.create(build_world(Layout(dp=1, zero_group=1), device))
