"""Gathering: the rows of many bucket files are brought together by part, in levels that each read every file once.

To read each part's rows from each file would be work that grows with the square of the corpus. A task of a level reads
up to `fan` whole files and writes one for each of up to `fan` ranges of parts; the next level does so for each range,
until a range is one part, whose rows are in few files.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from gristmill.batches import partition_of
from gristmill.engine.run import StageRun
from gristmill.engine.task import FileSet, Task
from preprocessing.mixing.manifest import part_path
from preprocessing.mixing.shuffle_buckets import BucketFile, numbers_of, open_scatter, write_bucket_file

_FILE_BYTES = 64 << 20  # of lines in a file that a task writes, about
_MIN_TASKS = 32  # in a level, if it has so many files: for the workers


@dataclass(frozen=True)
class Level:
    """One level: each range of `width` consecutive parts has `files` files, which tasks gather by `fan_in`."""

    width: int
    files: int
    fan_in: int
    next_width: int

    @property
    def tasks(self) -> int:
        """Tasks for each range, and so files of each range of the next level."""
        return math.ceil(self.files / self.fan_in)

    def divide(self, start: int, end: int) -> list[tuple[int, int]]:
        """The ranges of the next level in a range of this one: first part, and the one after the last."""
        return [(first, min(first + self.next_width, end)) for first in range(start, end, self.next_width)]


def plan_levels(files: int, parts: int, line_bytes: int, fan: int) -> list[Level]:
    """The levels that bring `files` files, with `line_bytes` of lines, to at most `fan` files for each part."""
    depth = next(depth for depth in range(1, 65) if fan**depth >= parts)
    fan_out = next(width for width in range(1, fan + 1) if width**depth >= parts)
    levels: list[Level] = []
    width = parts
    while width > 1 or files > fan or not levels:
        ranges = math.ceil(parts / width)
        next_width = math.ceil(width / fan_out)
        fan_in = _fan_in(ranges * files, line_bytes, math.ceil(width / next_width), fan)
        levels.append(Level(width, files, fan_in, next_width))
        width, files = next_width, levels[-1].tasks
    return levels


def _fan_in(files: int, line_bytes: int, fan_out: int, fan: int) -> int:
    """Files that a task reads: so many that those it writes are of _FILE_BYTES, and that there are _MIN_TASKS."""
    wanted = fan_out * _FILE_BYTES * files // max(line_bytes, 1)
    return max(2, min(fan, wanted, math.ceil(files / _MIN_TASKS)))


def gather(run: StageRun, files: Sequence[Path], parts: int, line_bytes: int, fan: int, folder: Path) -> int:
    """Run the steps of all levels; return n, the number of files that each part then has.

    Those of a part are part_path(folder, part, i) for i < n. `line_bytes` is the size of all lines.
    """
    levels = plan_levels(len(files), parts, line_bytes, fan)
    ranges = {(0, parts): tuple(files)}  # first part, and the one after the last → files
    for number, level in enumerate(levels):
        target = folder if number == len(levels) - 1 else run.work / f"level {number + 1}"
        run.step(f"gather {number + 1}", _tasks(level, ranges, parts, target))
        ranges = {
            found: tuple(part_path(target, found[0], i) for i in range(level.tasks))
            for whole in ranges
            for found in level.divide(*whole)
        }
    return levels[-1].tasks


def _tasks(level: Level, ranges: dict[tuple[int, int], tuple[Path, ...]], parts: int, target: Path) -> Iterator[Task]:
    for (start, end), files in ranges.items():
        for i in range(level.tasks):
            outputs = {first: part_path(target, first, i) for first, _ in level.divide(start, end)}
            found = FileSet(files[i * level.fan_in : (i + 1) * level.fan_in])
            arguments = {"files": found, "parts": parts, "outputs": outputs}
            yield Task(f"{start}-{i}", gather_rows, arguments, tuple(outputs.values()))


def gather_rows(files: FileSet, parts: int, outputs: dict[int, Path]) -> None:
    """Task: write the rows of all files to `outputs`: each gets the parts from its key up to the next one's."""
    starts = list(outputs)
    width = starts[1] - starts[0] if len(starts) > 1 else parts
    with ExitStack() as stack:
        writers = [stack.enter_context(write_bucket_file(path)) for path in outputs.values()]
        scatter = stack.enter_context(
            open_scatter(
                lambda rows: (partition_of(numbers_of(rows, "draw"), parts) - starts[0]) // width,
                lambda bucket, rows: writers[bucket].write(0, rows),
                outputs[starts[0]],
            )
        )
        for path in files.paths:
            for rows in BucketFile.open(path).read():
                scatter.add_rows(rows)
                del rows  # large lines are gone before their frame is written, and the next read
                scatter.write_full()
