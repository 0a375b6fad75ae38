"""Profiler: what the options ask to see of a run, at the steps that they ask for."""

import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from gristmill.errors import require
from gristmill.storage.local import atomic_write
from training.parallel.mesh import World
from training.parallel.parallel_model import ParallelModel
from training.plugin import LogRecord, Plugin
from training.profiling.profile_config import FOLDER, ProfileConfig
from training.sharding.sharded_parameter import ShardedParameter

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
        self.every = every
        self.world = world
        self.active = False
        self.seconds: dict[str, float] = {}
        if every:
            for part in parts:
                part.register_forward_pre_hook(self._enter)
                part.register_forward_hook(self._leave)

    @contextmanager
    def step(self, step: int, traced: bool = False) -> Iterator[None]:
        """Context of a step, which some rank has `traced`; afterwards `seconds` has its times, if it is measured."""
        self.active = self.every > 0 and step % self.every == 0
        self.seconds = {}
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
    """Return the length of the union of spans (start, end).

    >>> covered([(0, 2), (5, 6), (1, 3)])
    4.0
    """
    total = 0.0
    until = float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


_MOST_EVENTS = 1_000_000  # of memory, in a snapshot


class StepTrace:
    """Traces the steps of `config.span` on one rank; elsewhere, and without a span, it does nothing.

    The trace is for chrome://tracing or ui.perfetto.dev, the snapshot for pytorch.org/memory_viz.
    """

    def __init__(self, config: ProfileConfig, rank: int, device: torch.device, out_dir: Path) -> None:
        self.span = config.span if rank in config.ranks else None
        self.rank = rank
        self.device = device
        self.folder = out_dir / FOLDER
        self._profiler: profile | None = None
        self._first = 0

    def before(self, step: int) -> None:
        """Begin if `step` is the first of the span, or the first of this process that is in it."""
        if self.span is None or self._profiler is not None or not self.span[0] <= step <= self.span[1]:
            return
        cuda = self.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
        if cuda:
            torch.cuda.memory._record_memory_history(max_entries=_MOST_EVENTS)
        self._profiler = profile(activities=activities, record_shapes=True)
        self._first = step
        self._profiler.start()

    def after(self, step: int) -> None:
        """Write the trace, whole or not at all, if `step` is the last of the span. Raises OutputError if it cannot."""
        if self._profiler is None or (self.span is not None and step < self.span[1]):
            return
        profiler = self._profiler
        self._profiler = None
        profiler.stop()
        name = f"steps-{self._first}-{step}.rank-{self.rank}"
        with atomic_write(self.folder / f"{name}.json.gz") as file, tempfile.TemporaryDirectory() as scratch:
            exported = f"{scratch}/trace.json.gz"  # torch compresses what has this ending
            profiler.export_chrome_trace(exported)
            shutil.copyfile(exported, file)
        if self.device.type == "cuda":
            with atomic_write(self.folder / f"{name}.memory.pickle") as file:
                torch.cuda.memory._dump_snapshot(str(file))
            torch.cuda.memory._record_memory_history(enabled=None)

    def close(self) -> None:
        """Stop a trace whose last step did not come, without writing it."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None


def layer_of(name: str) -> str:
    """Return the layer of a parameter: its block, or the module outside the blocks.

    >>> layer_of("blocks.3.mlp.up.weight"), layer_of("embed.tokens.weight")
    ('blocks.3', 'embed')
    """
    words = name.split(".")
    return ".".join(words[: 2 if words[0] == "blocks" else 1])


class LayerNorms:
    """Norms of the layers of a model; `names` are those of all its parameters, on every rank the same."""

    def __init__(self, names: Sequence[str], params: Sequence[ShardedParameter], world: World) -> None:
        self.layers = list(dict.fromkeys(map(layer_of, names)))
        self.params = [p for p in params if p.is_primary and p.local.numel()]
        self.world = world
        self.norms: dict[str, dict[str, float]] = {}

    @contextmanager
    def update(self, loss_scale: float) -> Iterator[None]:
        """Context of an update: afterwards `norms` has those of "grad", before clipping, "weight" and "update".

        It needs the memory of a copy of this rank's weights.
        """
        squares = [self._squares([p.local.grad for p in self.params]) / loss_scale**2]
        before = [p.local.detach().clone() for p in self.params]
        yield
        squares.append(self._squares([p.local.detach() for p in self.params]))
        changes = [p.local.detach() - old for p, old in zip(self.params, before, strict=True)]
        squares.append(self._squares(changes))
        norms = self.world.all_reduce(torch.stack(squares)).sqrt().tolist()
        kinds = ("grad", "weight", "update")
        self.norms = {kind: dict(zip(self.layers, of, strict=True)) for kind, of in zip(kinds, norms, strict=True)}

    def _squares(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return this rank's part of each layer's squared norm: (layers,) float64."""
        squares = torch.zeros(len(self.layers), dtype=torch.float64, device=self.world.device)
        for param, tensor in zip(self.params, tensors, strict=True):
            if tensor is not None:
                rows = torch.linalg.vector_norm(tensor, dim=-1)
                squares[self.layers.index(layer_of(param.name))] += rows.double().square().sum().to(squares.device)
        return squares


class Profiler(Plugin):
    """Traces, times and norms of a run's steps. Every rank calls every method."""

    def __init__(self, config: ProfileConfig, model: ParallelModel, names: Sequence[str], out_dir: Path) -> None:
        """`names` of all parameters. Raises UsageError for a rank that the run does not have."""
        world = model.world
        max_rank = max(config.ranks, default=0)
        require(
            max_rank < world.size,
            f"profile.ranks has {max_rank}, and the run has the ranks 0 to {world.size - 1}; try --profile.ranks 0",
        )
        self.config = config
        self._trace = StepTrace(config, world.rank, world.device, out_dir)
        self._times = StepTimes(config.times, model.parts, world)
        self._norms = LayerNorms(names, model.params, world) if config.norms else None
        self._records: list[LogRecord] = []

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Context of a training step."""
        self._step = step
        self._trace.before(step)
        with self._times.step(step, self.config.traces(step)):
            yield
        self._trace.after(step)
        if self._times.seconds:
            self._records.append(("times", step, self._times.seconds))

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Context of a part of a step (see `StepTimes`)."""
        return self._times.phase(name)

    @contextmanager
    def update(self, loss_scale: float) -> Iterator[None]:
        """Context of the update of the weights, from gradients of the loss times `loss_scale`."""
        measured = self._norms is not None and self._step % self.config.norms == 0
        norms = self._norms.update(loss_scale) if measured and self._norms is not None else nullcontext()
        with norms, self.phase("optimizer"):
            yield
        if measured and self._norms is not None:
            self._records.append(("norms", self._step, self._norms.norms))

    def log_records(self) -> list[LogRecord]:
        """Return the records (kind, step, values) since the last call."""
        records = self._records
        self._records = []
        return records

    def close(self) -> None:
        """Stop what is still traced."""
        self._trace.close()
