"""StepTimes: how long the parts of a step take: data, forward, backward, optimizer; and its communication."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from training.parallel.mesh import World

_COLLECTIVES = ("gloo:", "nccldevkernel", "ncclkernel")  # beginnings of names in torch's profiler
PHASES = ("data", "forward", "backward", "optimizer")


class StepTimes:
    """Measures every `every`-th step: seconds of each phase, as means over the ranks.

    The forward passes are those of the modules `parts`; backward is the rest of forward and backward, and includes what
    a pipeline waits for. Communication is the time in which a collective or a message of this rank was under way: it
    overlaps with the phases, which wait for some of it. It is left out of steps that are traced: with
    torch's profiler inside another one, writing the outer trace ends the process (SIGSEGV, torch 2.13).
    """

    def __init__(self, every: int, parts: Sequence[nn.Module], world: World) -> None:
        self.every, self.world, self.active = every, world, False
        self.seconds: dict[str, float] = {}
        if every:
            for part in parts:
                part.register_forward_pre_hook(self._enter)
                part.register_forward_hook(self._leave)

    @contextmanager
    def step(self, step: int, traced: bool = False) -> Iterator[None]:
        """Context of a step, which some rank has `traced`; afterwards `seconds` has its times, if it is measured."""
        self.active, self.seconds = self.every > 0 and step % self.every == 0, {}
        if not self.active:
            yield
            return
        self.seconds = dict.fromkeys(PHASES, 0.0)
        with nullcontext() if traced else self._communication():
            started = self._now()
            yield
            self.seconds["step_seconds"] = self._now() - started
        self.active = False
        self.seconds["backward"] -= self.seconds["forward"]
        names = list(self.seconds)
        total = self.world.all_reduce(torch.tensor([self.seconds[name] for name in names], dtype=torch.float64))
        self.seconds = dict(zip(names, (total / self.world.size).tolist(), strict=True))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context of a part of a step; that of forward and backward is named "backward"."""
        if not self.active:
            yield
            return
        started = self._now()
        yield
        self.seconds[name] += self._now() - started

    @contextmanager
    def _communication(self) -> Iterator[None]:
        if self.world.size == 1:
            yield
            return
        cuda = self.world.device.type == "cuda"
        with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as profiler:
            yield
        events = [event for event in profiler.events() if event.name.lower().startswith(_COLLECTIVES)]
        spans = [(event.time_range.start, event.time_range.end) for event in events]
        self.seconds["communication"] = covered(spans) / 1e6  # from microseconds

    def _enter(self, *_: object) -> None:
        if self.active:
            self._entered = self._now()

    def _leave(self, *_: object) -> None:
        if self.active:
            self.seconds["forward"] += self._now() - self._entered

    def _now(self) -> float:
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
        return time.perf_counter()


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of spans (start, end).

    >>> covered([(0, 2), (5, 6), (1, 3)])
    4.0
    """
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
