"""Key sets that the tasks of a step wrote, each of some documents, merged into one."""

from collections.abc import Iterable
from pathlib import Path

from gristmill.engine.task import FileSet, Task
from gristmill.io.keys import sort_keys, write_sorted_keys


def merge_task(key_sets: Iterable[Path], output_file: Path, memory: int) -> Task:
    """Return the task that merges key sets into one, .pickle or .parquet, within so many bytes of memory."""
    arguments = {"keys": FileSet(tuple(sorted(key_sets))), "output_file": output_file}
    return Task("merge", merge_keys, arguments, (output_file,), memory=memory)


def merge_keys(keys: FileSet, output_file: Path, memory: int) -> None:
    """Task: write all keys of some key sets, ascending by file and row."""
    with sort_keys(keys.paths, output_file.with_name(f"{output_file.name}.sorted"), memory // 2) as (names, blocks):
        write_sorted_keys(output_file, names, blocks)
