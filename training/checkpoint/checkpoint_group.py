"""The processes of a run, to agree on something beside the training: a gloo group of their own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from gristmill.errors import GristmillError
from training.distributed.layout import ParallelConfig
from training.distributed.mesh import World, build_world, open_processes

Result = TypeVar("Result")
# of one process for another: a disk may be slow. That a process has died is noticed at once
_PATIENCE = timedelta(minutes=10)


@dataclass(frozen=True)
class Peers:
    """All processes of `world`, over a group that the training does not use.

    So a thread beside it may: two threads' messages on one gloo group reach each other's receivers.
    """

    world: World
    group: dist.ProcessGroup

    @classmethod
    def meet(cls, world: World) -> "Peers":
        """Every process calls it, at the same point among the groups it makes."""
        return cls(world, dist.new_group(backend="gloo", timeout=_PATIENCE))

    def gather(self, action: Callable[[], Result]) -> list[Result]:
        """What `action` returns on each process, by rank; where one of them meets an error, all raise it."""
        mine: tuple[Any, GristmillError | None]
        try:
            mine = action(), None
        except GristmillError as error:
            mine = None, error
        everyone: list[Any] = [None] * self.world.size
        dist.all_gather_object(everyone, mine, group=self.group)
        for _, met in everyone:
            if met is not None:
                raise met
        return [result for result, _ in everyone]

    def main_only(self, action: Callable[[], Result]) -> Result:
        """Let the main process act while the others wait: all get its result, or raise the error it met."""
        # nothing else is gathered, and so nothing is None but what the others did not do
        return self.gather(lambda: action() if self.world.is_main else None)[0]  # type: ignore[return-value]


@contextmanager
def alone() -> Iterator[Peers]:
    """This process by itself, for tools that read and write checkpoints."""
    with open_processes("cpu") as device:
        yield Peers.meet(build_world(ParallelConfig(dp=1, shard=1), device))
