"""Steps that write a corpus anew, file by file: a large file is written in pieces by several tasks, then joined.

As Parquet, every file is a piece of JSON lines first: the step schema finds the types of each source's fields, and the
step parquet writes the files with them.
"""

from base64 import b64decode, b64encode
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa

from gristmill.batches import batched
from gristmill.counts import Counts
from gristmill.engine.options import RunOptions
from gristmill.engine.run import StageRun, open_stage
from gristmill.engine.slices import SliceGroup, cut_raw_corpus, is_piece, read_slices
from gristmill.engine.staleness.outputs import reject_unknown_files
from gristmill.engine.staleness.records import StepResult
from gristmill.engine.task import FileSet, Result, Stage, Task
from gristmill.errors import UsageError
from gristmill.io.artefacts import open_table, open_table_writer, stream_table
from gristmill.io.corpus import list_corpus
from gristmill.io.documents import (
    CORPUS_SUFFIXES,
    CorpusFile,
    Slice,
    normal_name,
    paths_of,
    source_of,
    stem,
    table_name,
)
from gristmill.io.files import STATE_DIR, rejects_path
from gristmill.io.readers import SLICE_BYTES
from gristmill.io.writers import merge_schemas, reject_unwritable, schema_of, write_documents
from gristmill.storage.local import concatenate

_MOST_FILES = 256  # that one task writes as Parquet
_TABLE = ".removed"  # suffix of the table of one task
OutputFormat = Literal["jsonl", "parquet"]
Targets = dict[str, Path]  # name of an input file → its output file


def plan_targets(
    files: Sequence[CorpusFile], target_dir: Path, zst: bool = False, format: OutputFormat = "jsonl"
) -> Targets:
    """Return the output file of each input file. UsageError if two would be written to one."""
    targets = Targets()
    names_of_outputs: dict[str, list[str]] = defaultdict(list)
    for file in files:
        output = table_name(file.name) if format == "parquet" else normal_name(file.name, zst)
        targets[file.name] = target_dir / output
        names_of_outputs[output].append(file.name)
    for output, names in names_of_outputs.items():
        if len(names) > 1:
            raise UsageError(
                f"{' and '.join(names)} would be written to one file, {target_dir / output}: rename all but one of them"
            )
    return targets


@contextmanager
def open_rewriting(
    stage: Stage,
    data_dir: Path,
    target_dir: Path,
    options: RunOptions,
    text_column: str,
    format: OutputFormat,
    files: Sequence[Path] = (),
) -> Iterator[tuple[StageRun, list[CorpusFile], Targets]]:
    """Yield a run of a stage that writes the corpus `data_dir` anew, the files of that, and the output of each.

    `files`: see open_stage. Raises UsageError for a folder that is no corpus, OutputError if other files are in
    `target_dir`.
    """
    corpus = list_corpus(data_dir, text_column=text_column)
    targets = plan_targets(corpus, target_dir, format=format)
    reads = {data_dir: paths_of(corpus)}
    with open_stage(stage, target_dir, options, reads=reads, publishes=[target_dir], files=files) as run:
        reject_unknown_files(target_dir, targets.values(), CORPUS_SUFFIXES, run.ledger)
        yield run, corpus, targets


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
    also: Callable[[SliceGroup], dict[str, Path]] | None = None,
    sets_aside: bool = False,
) -> StepResult:
    """Write the output file of each file; return the counts and records of all tasks.

    `function(group=…, outputs=…, **arguments)` is the task: it writes each slice of a group into its output.
    `foreign`, `sets_aside`: see Task. With `table`, each task writes a table of its own, its argument `rows`, and these
    are joined to it, in the order of the corpus. `of_group`: arguments that differ from group to group; `also`:
    arguments that are further outputs of the task. Where `targets` are Parquet files, they are made of the JSON lines
    of tasks.
    """
    slices = cut_raw_corpus(run, files)
    parquet = any(path.suffix == ".parquet" for path in targets.values())
    tables = run.ledger.root / STATE_DIR / run.output
    pieces = dict[Slice, Path]()
    for part in slices:
        if parquet or is_piece(part):
            pieces[part] = _piece_path(run, part, targets)

    def output_of(part: Slice) -> Path:
        """Return where a slice is written: also one that is marked as damaged, and so none of `pieces`."""
        if parquet or is_piece(part):
            return _piece_path(run, part, targets)
        return targets[part.name]

    def plan(groups: list[SliceGroup]) -> Iterator[Task]:
        """Yield a task for each group of small files, and each piece of a large one, whose output is temporary."""
        for group in groups:
            outputs = tuple(map(output_of, group))
            further = dict[str, Path]()
            if also:
                further |= also(group)
            if table:
                further["rows"] = tables / f"{group[0].label}{_TABLE}"
            given = {"outputs": outputs, **arguments}
            if of_group:
                given |= of_group(group)
            given |= further
            yield Task.on_slices(group, function, given, (*outputs, *further.values()), foreign, sets_aside)

    done = read_slices(run, step, slices, plan)
    if parquet:
        _write_tables(run, files, _pieces_of(run, pieces, done), targets)
    elif pieces:
        run.step("join", _join_tasks(_pieces_of(run, pieces, done), targets))
    if table:
        written = [path for path in _written(run, done) if path.suffix == _TABLE]
        joined = {"tables": FileSet(tuple(written)), "output": table}
        run.step("table", [Task("table", concatenate_tables, joined, (table,))])
    return done


def _written(run: StageRun, done: StepResult) -> list[Path]:
    """Return all files that the tasks of a step wrote."""
    paths = list[Path]()
    for record in done.records:
        paths += map(run.ledger.path, record.outputs)
    return paths


def _piece_path(run: StageRun, part: Slice, targets: Targets) -> Path:
    """Return the path of a piece, with the target's suffix and so its compression; for a table, of JSON lines."""
    name = targets[part.name].name
    suffix = name.removeprefix(stem(name))
    if suffix == ".parquet":
        suffix = ".jsonl.zst"
    return run.work / part.name / f"{part.start}{suffix}"


class Pieces(NamedTuple):
    """The pieces of one file, in order, and the files of their malformed records."""

    paths: list[Path]
    rejects: list[Path]


def _pieces_of(run: StageRun, pieces: dict[Slice, Path], done: StepResult) -> dict[str, Pieces]:
    """Return the pieces of each file."""
    written = set(_written(run, done))
    pieces_of_files = dict[str, Pieces]()
    for part, path in pieces.items():
        of_file = pieces_of_files.setdefault(part.name, Pieces([], []))
        of_file.paths.append(path.absolute())
        rejects = rejects_path(path.absolute())
        if rejects in written:
            of_file.rejects.append(rejects)
    return pieces_of_files


def _join_tasks(pieces: dict[str, Pieces], targets: Targets) -> Iterator[Task]:
    """Yield a task for each large file: it joins the pieces, and the files of their malformed records."""
    for name, of_file in pieces.items():
        arguments = {"pieces": of_file.paths, "rejects": of_file.rejects, "target": targets[name]}
        yield Task(name, join_pieces, arguments, (targets[name],))


def join_pieces(pieces: list[Path], rejects: list[Path], target: Path) -> None:
    """Task: concatenate the pieces of one file, as .jsonl, .gz and .zst allow, and their malformed records."""
    concatenate(pieces, target)
    _join_rejects(rejects, target)


def _join_rejects(rejects: list[Path], target: Path) -> None:
    rejects_path(target).unlink(missing_ok=True)
    if rejects:
        concatenate(rejects, rejects_path(target))


def _write_tables(run: StageRun, files: Sequence[CorpusFile], pieces: dict[str, Pieces], targets: Targets) -> None:
    """Run the steps schema and parquet: a file is written with the types of all records of its source."""
    groups = list(batched(files, count=_MOST_FILES, size=SLICE_BYTES, size_of=lambda file: file.size))
    schemas = _find_schemas(run, groups, pieces)
    tasks = list[Task]()
    for group in groups:
        outputs = tuple(targets[file.name] for file in group)
        given = {
            "pieces": [(file.source, pieces[file.name]) for file in group],
            "schemas": {file.source: schemas[file.source] for file in group},
            "targets": outputs,
        }
        tasks.append(Task(group[0].name, write_tables, given, outputs))
    run.step("parquet", tasks)


def _find_schemas(run: StageRun, groups: Sequence[list[CorpusFile]], pieces: dict[str, Pieces]) -> dict[str, str]:
    """Run the step schema; return the schema of each source, encoded. UsageError if one cannot be written."""
    tasks = list[Task]()
    for group in groups:
        arguments = {"pieces": {file.name: pieces[file.name].paths for file in group}}
        tasks.append(Task(group[0].name, find_schemas, arguments))
    of_sources: dict[str, list[tuple[str, pa.Schema]]] = defaultdict(list)
    for schemas in run.step("schema", tasks).values(dict[str, str]):
        for name, encoded in schemas.items():
            of_sources[source_of(name)].append((name, _decode_schema(encoded)))
    merged = {source: merge_schemas(schemas) for source, schemas in of_sources.items()}
    for source, schema in merged.items():
        reject_unwritable(schema, source)
    return {source: _encode_schema(schema) for source, schema in merged.items()}


def find_schemas(pieces: dict[str, list[Path]]) -> Result:
    """Task: the value is the schema of the records in the pieces of each file."""
    schemas = {name: _encode_schema(schema_of(paths, name)) for name, paths in pieces.items()}
    return Result(Counts({}, []), schemas)


def write_tables(pieces: list[tuple[str, Pieces]], schemas: dict[str, str], targets: tuple[Path, ...]) -> None:
    """Task: write the pieces of some files, each of a source, as Parquet, with the schemas of the sources."""
    for (source, of_file), target in zip(pieces, targets, strict=True):
        write_documents(of_file.paths, _decode_schema(schemas[source]), target)
        _join_rejects(of_file.rejects, target)


def _encode_schema(schema: pa.Schema) -> str:
    return b64encode(schema.serialize()).decode()


def _decode_schema(text: str) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(b64decode(text)))


def concatenate_tables(tables: FileSet, output: Path) -> None:
    """Task: write the rows of one or more tables as one."""
    with open_table(tables.paths[0]) as first:
        schema = first.schema_arrow
    with open_table_writer(output, schema) as write:
        for path in tables.paths:
            for table in stream_table(path, schema.names):
                write({name: table.column(name) for name in schema.names})
