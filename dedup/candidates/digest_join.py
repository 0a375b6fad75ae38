"""Digest join: units of a corpus with equal digests meet in one task, within a worker's memory.

Tasks of a stage digest the units of each group of slices (`digest_groups`): a file of records with a digest and the
unit's place in the group. `join_digests` runs two steps: the first writes the records of a bundle of groups to a file
for each range of digests; the stage's own tasks then sort one range each.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gristmill.batches import partition_of
from gristmill.engine.run import StageRun
from gristmill.engine.slices import SliceGroup, read_slices
from gristmill.engine.staleness.records import StepResult
from gristmill.engine.task import FileSet, Task
from gristmill.io.documents import Slice
from gristmill.io.external_sort import MAX_SCATTERED, ExternalSorter, read_records, scatter_records

DIGEST = [("high", "<u8"), ("low", "<u8")]  # first fields of a record
BLOCK = 1 << 16  # records read together
_SORT_FACTOR = 8  # memory per byte of records while they are sorted
_MAX_SORTED = 256 << 20  # bytes sorted by one task under any budget: more tasks are more parallel
_MIN_BUNDLE = 16  # groups that one task scatters, or more: as many as there are ranges


def with_group(record: np.dtype) -> np.dtype:
    """Return the dtype of records of a corpus, given that of a group's: with the field `group`, its number."""
    return np.dtype([*record.descr, ("group", "<u4")])


def digest_groups(
    run: StageRun, step: str, slices: Sequence[Slice], function: Callable, arguments: dict[str, Any]
) -> StepResult:
    """Run a step whose tasks, one for each group of slices, write the records of the group to a file.

    `function` is the task, called with `arguments`, `group` and `output`.
    """

    def plan(groups: list[SliceGroup]) -> Iterator[Task]:
        for group in groups:
            output = run.work / step / f"{group[0].label}.bin"
            yield Task.on_slices(group, function, {**arguments, "output": output}, (output,))

    return read_slices(run, step, slices, plan)


def join_digests(
    run: StageRun,
    digested: StepResult,
    record: np.dtype,
    name: str,
    function: Callable,
    arguments: dict[str, Any],
    scatter_name: str = "scatter",
) -> tuple[FileSet, StepResult]:
    """Run the steps `scatter_name` and `name`; return the files that the tasks of the second wrote, and its result.

    Args:
        run: The run of the stage.
        digested: The step whose tasks wrote the records of a group each.
        record: The dtype of these records.
        name: Of the second step and of its files.
        function: Its task, called with `arguments`, `scattered` (the files of a digest range, whose records have their
            group and are in the order of the corpus), `output` and `memory`.
        arguments: Further arguments of the function.
        scatter_name: Of the first step, and of the folder of its files.
    """
    digests = [done.outputs[0] for done in digested.records]
    size = sum(digest.size for digest in digests)
    share = run.options.memory_per_worker
    sorted_bytes = max(1, min(share, _MAX_SORTED))
    parts = min(MAX_SCATTERED, 1 << (size * _SORT_FACTOR // sorted_bytes).bit_length())
    folder = run.work / scatter_name / f"{parts} parts"
    bundle = max(parts, _MIN_BUNDLE)  # so that bundles have a file for each group
    scatter = list[Task]()
    join = list[Task]()
    for first in range(0, len(digests), bundle):
        bundled = digests[first : first + bundle]
        bundled_bytes = sum(digest.size for digest in bundled)
        paths = FileSet(tuple(map(run.ledger.path, bundled)))
        outputs = tuple(folder / f"{first:06}" / f"{part:04}.bin" for part in range(parts))
        given = {"digested": paths, "first_group": first, "fields": record.descr, "outputs": outputs}
        scatter.append(Task(f"{first:06} of {parts}", scatter_digests, given, outputs, bundled_bytes))
    run.step(scatter_name, scatter)
    for part in range(parts):
        output = folder / f"{name}-{part:04}.bin"
        given = {**arguments, "scattered": FileSet.of(scatter, part), "output": output}
        join.append(Task(f"{part:04} of {parts}", function, given, (output,), size // parts, share))
    return FileSet.of(join), run.step(name, join)


def scatter_digests(
    digested: FileSet, first_group: int, fields: list[tuple[str, str]], outputs: tuple[Path, ...]
) -> None:
    """Task: write the records of consecutive groups, with their group, each range of digests to one of `outputs`."""
    dtype = np.dtype(fields)

    def blocks() -> Iterator[tuple[NDArray, NDArray[np.int64]]]:
        for number, path in enumerate(digested.paths, first_group):
            for block in read_records(path, dtype, BLOCK):
                records = np.empty(len(block), with_group(dtype))
                for name in block.dtype.names or ():
                    records[name] = block[name]
                records["group"] = number
                yield records, partition_of(block["high"], len(outputs))

    scatter_records(outputs, blocks())


def sorted_records(
    paths: Iterable[Path], record: np.dtype, keys: tuple[str, ...], output: Path, memory: int
) -> Iterator[NDArray]:
    """Yield the records of some files, sorted stably, in blocks of at most BLOCK; runs are written next to `output`."""
    with ExternalSorter(output.with_name(f"{output.name}.runs"), record, keys, memory) as sorter:
        sorter.add_all(read_records(paths, record, BLOCK))
        for block in sorter:
            for start in range(0, len(block), BLOCK):
                yield block[start : start + BLOCK]


def is_repeated(records: NDArray) -> NDArray[np.bool_]:
    """Return for each of sorted records (n) whether the one before it has the same digest."""
    repeated = np.zeros(len(records), bool)
    same_high = records["high"][1:] == records["high"][:-1]
    same_low = records["low"][1:] == records["low"][:-1]
    repeated[1:] = same_high & same_low
    return repeated
