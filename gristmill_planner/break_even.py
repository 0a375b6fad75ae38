"""Break-even: where a pipeline schedule, more tensor parallelism, or another division of a layer gains nothing."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rich.table import Table

from gristmill.errors import UsageError
from gristmill_planner.fitted_constants import Constants
from gristmill_planner.hardware import Cluster, Device
from gristmill_planner.pipeline_simulator import PassCosts, simulate_schedule
from gristmill_planner.planned_run import PlannedRun
from gristmill_planner.step_time import layer_time
from training.experimental.parallel_config import ParallelConfig
from training.model.model_config import ModelConfig
from training.parallel.pipeline.schedules import SCHEDULES, Schedule
from training.parallel.tensor.options import divides_heads

_HALVINGS = 12
_LONGEST = 4.0  # times a rank's forward pass, of a message


def pipeline_break_even(schedule: Schedule, ranks: int, micro_batches: int, costs: PassCosts) -> float | None:
    """Return the seconds of a message between ranks at which `schedule` takes as long as 1F1B with the same messages.

    Schedules with several stages a rank send more messages, which take no time of the ranks, but delay the next stage.
    None if the schedule is as fast as 1F1B up to messages of four forward passes; 0 if it never is faster.
    """

    def gain(send: float) -> float:
        costs_with_send = replace(costs, send=send)
        usual = simulate_schedule("1f1b", ranks, micro_batches, costs_with_send)
        other = simulate_schedule(schedule, ranks, micro_batches, costs_with_send)
        return usual.seconds - other.seconds

    low = 0.0
    high = _LONGEST * costs.forward
    if gain(high) >= 0:
        return None
    if gain(low) <= 0:
        return 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if gain(middle) > 0:
            low = middle
        else:
            high = middle
    return low


def break_even_table(schedules: Sequence[Schedule], ranks: int, counts: Sequence[int], costs: PassCosts) -> Table:
    """Return the messages up to which each schedule is faster than 1F1B, in seconds of the costs."""

    def cell(schedule: Schedule, count: int) -> str:
        seconds = pipeline_break_even(schedule, ranks, count, costs)
        return f"{seconds:.2g} s" if seconds is not None else f"any up to {_LONGEST * costs.forward:g} s"

    return schedules_table("faster than 1f1b if a message takes less than", schedules, ranks, counts, cell)


def schedules_table(
    title: str, schedules: Sequence[Schedule], ranks: int, counts: Sequence[int], cell: Callable[[Schedule, int], str]
) -> Table:
    """Return a row for each schedule, with a cell for each number of micro-batches that is enough for it."""
    table = Table(title, *(f"{count} micro-batches" for count in counts), box=None, pad_edge=False)
    for schedule in schedules:
        cells = []
        for count in counts:
            cells.append(cell(schedule, count) if has_enough(schedule, ranks, count) else "")
        table.add_row(schedule, *cells)
    return table


def has_enough(schedule: Schedule, ranks: int, micro_batches: int) -> bool:
    """Return whether there are as many micro-batches as a schedule takes."""
    return micro_batches >= SCHEDULES[schedule].least_micro_batches(ranks, 2 * ranks)


def tensor_break_even(run: PlannedRun, constants: Constants) -> list[tuple[int, float, float]]:
    """Return tensor-parallel ranks, seconds of a layer's passes of a micro-batch, and of the collectives in them.

    By powers of 2 up to two nodes, as far as they divide heads and MLP; the micro-batch stays the same.
    """
    model = run.model
    rows = []
    ranks = 1
    while ranks <= 2 * run.cluster.per_node and divides_heads(model, ranks) and model.ffn_width % ranks == 0:
        sequence_parallel = ranks > 1 and run.layout.sequence_parallel
        layout = replace(run.layout, tp=ranks, tensor="1d", depth=1, sequence_parallel=sequence_parallel)
        cluster = replace(run.cluster, devices=max(ranks, run.cluster.devices))
        other = replace(run, layout=layout, cluster=cluster)
        passes = layer_time(other, constants)
        rows.append((ranks, passes.forward + passes.backward, passes.collectives))
        ranks *= 2
    return rows


_ONE_STAGE = {"dp": 1, "zero_group": 1, "virtual_stages": 1, "micro_batches": 1}


def divisions(ranks: int) -> Mapping[str, ParallelConfig]:
    """Return every way of dividing a layer over `ranks`, by name; of 2.5D that with most layers."""
    layouts = {"1D": ParallelConfig(tp=ranks, sequence_parallel=True)}
    for side in range(2, ranks):
        if side * side == ranks:
            layouts["2D"] = ParallelConfig(tp=ranks, tensor="2d")
        depth = ranks // (side * side)
        if 2 <= depth <= side and side * side * depth == ranks:
            layouts.setdefault("2.5D", ParallelConfig(tp=ranks, tensor="2.5d", depth=depth))
        if side**3 == ranks:
            layouts["3D"] = ParallelConfig(tp=ranks, tensor="3d")
    layouts["ring"] = ParallelConfig(cp=ranks)
    layouts["Ulysses"] = ParallelConfig(cp=ranks, context="ulysses")
    return {name: replace(layout, **_ONE_STAGE) for name, layout in layouts.items()}  # type: ignore[arg-type]


def layer_seconds(
    model: ModelConfig, device: Device, ranks: int, sequences: int, seq_len: int, constants: Constants
) -> dict[str, tuple[float, float]]:
    """Return the seconds of a layer's two passes of a micro-batch on nodes of 8, and those of collectives.

    By name of the division; without those that the trainer refuses.
    """
    seconds = {}
    for name, layout in divisions(ranks).items():
        try:
            layout.check(ranks, model, seq_len)
        except UsageError:
            continue
        time = layer_time(PlannedRun(model, layout, sequences, seq_len, Cluster(device, ranks)), constants)
        seconds[name] = (time.forward + time.backward, time.collectives)
    return seconds
