"""Steps that write a corpus anew, file by file: a large file is written in pieces by several tasks, then joined."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from gristmill.counts import Counts
from gristmill.engine.run import StageRun, StepResult
from gristmill.engine.slices import SliceGroup, cut_raw_corpus, is_piece, read_slices
from gristmill.engine.task import FileSet, Result, Task
from gristmill.errors import UsageError
from gristmill.io.corpus_names import normal_name
from gristmill.io.documents import CorpusFile, stem
from gristmill.io.files import STATE_DIR, rejects_path
from gristmill.io.parquet_tables import open_table, open_table_writer, stream_table
from gristmill.io.readers import Slice
from gristmill.storage.local import concatenate

_TABLE = ".removed"  # suffix of the table of one task
Targets = dict[str, Path]  # name of an input file → its output file


def plan_targets(files: Sequence[CorpusFile], target_dir: Path, zst: bool = False) -> Targets:
    """The output file of each input file. UsageError if two would be written to one."""
    outputs = {file.name: normal_name(file.name, zst) for file in files}
    by_output = defaultdict(list)
    for name, output in outputs.items():
        by_output[output].append(name)
    for output, names in by_output.items():
        if len(names) > 1:
            raise UsageError(
                f"{' and '.join(names)} would be written to one file, {target_dir / output}: rename all but one of them"
            )
    return {name: target_dir / output for name, output in outputs.items()}


def rewrite_corpus(
    run: StageRun,
    step: str,
    files: Sequence[CorpusFile],
    targets: Targets,
    function: Callable[..., Counts | Result],
    arguments: dict[str, Any],
    foreign: str = "",
    table: Path | None = None,
    of_group: Callable[[SliceGroup], dict[str, Any]] | None = None,
) -> StepResult:
    """Write the output file of each file; return the counts and records of all tasks.

    `function(group=…, outputs=…, **arguments)` is the task: it writes each slice of a group into its output.
    `foreign`: see Task. With `table`, each task writes a table of its own, its argument `rows`, and these are joined to
    it, in the order of the corpus. `of_group`: arguments that differ from group to group.
    """
    slices = cut_raw_corpus(run, files)
    tables = run.ledger.root / STATE_DIR / run.output if table else None
    pieces = [part for part in slices if is_piece(part)]
    done = read_slices(
        run,
        step,
        slices,
        lambda groups: _slice_tasks(run, groups, targets, function, arguments, foreign, tables, of_group),
    )
    if pieces:
        run.step("join", _join_tasks(run, pieces, targets, done))
    if table:
        found = (run.ledger.path(output) for record in done.records for output in record.outputs)
        given = {"tables": FileSet(tuple(path for path in found if path.suffix == _TABLE)), "output": table}
        run.step("table", [Task("table", concatenate_tables, given, (table,))])
    return done


def _slice_tasks(
    run: StageRun,
    groups: list[SliceGroup],
    targets: Targets,
    function: Callable[..., Counts | Result],
    arguments: dict[str, Any],
    foreign: str,
    tables: Path | None,
    of_group: Callable[[SliceGroup], dict[str, Any]] | None,
) -> Iterator[Task]:
    """A task for each group of small files, and each piece of a large one, whose output is temporary."""
    for group in groups:
        outputs = tuple(_piece_path(run, part, targets) if is_piece(part) else targets[part.name] for part in group)
        size = sum(part.size for part in group)
        given = {"group": group, "outputs": outputs, **arguments, **(of_group(group) if of_group else {})}
        more = (tables / f"{group[0].label}{_TABLE}",) if tables else ()
        if more:
            given["rows"] = more[0]
        yield Task(group[0].label, function, given, (*outputs, *more), size, foreign=foreign)


def _piece_path(run: StageRun, part: Slice, targets: Targets) -> Path:
    """Path of a piece, with the target's suffix and so its compression."""
    name = targets[part.name].name
    return run.work / part.name / f"{part.start}{name.removeprefix(stem(name))}"


def _join_tasks(run: StageRun, pieces: list[Slice], targets: Targets, done: StepResult) -> Iterator[Task]:
    """A task for each large file: it joins the pieces, and the files of their malformed records."""
    written = {run.ledger.path(output) for record in done.records for output in record.outputs}
    for name, of_file in groupby(pieces, key=lambda part: part.name):
        paths = [_piece_path(run, part, targets).absolute() for part in of_file]
        found = [path for path in map(rejects_path, paths) if path in written]
        arguments = {"pieces": paths, "rejects": found, "target": targets[name]}
        yield Task(name, join_pieces, arguments, (targets[name],))


def join_pieces(pieces: list[Path], rejects: list[Path], target: Path) -> None:
    """Task: concatenate the pieces of one file, as .jsonl, .gz and .zst allow, and their malformed records."""
    concatenate(pieces, target)
    rejects_path(target).unlink(missing_ok=True)
    if rejects:
        concatenate(rejects, rejects_path(target))


def concatenate_tables(tables: FileSet, output: Path) -> None:
    """Task: write the rows of one or more tables as one."""
    with open_table(tables.paths[0]) as first:
        schema = first.schema_arrow
    with open_table_writer(output, schema) as write:
        for path in tables.paths:
            for table in stream_table(path, schema.names):
                write({name: table.column(name) for name in schema.names})
