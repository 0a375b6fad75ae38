"""The task of a pass: documents go through all steps, kept ones are written, and facts of all are noted."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from gristmill.batches import batched
from gristmill.counts import FAILED, MALFORMED, SKIPPED, WORKER_DIED, Counts
from gristmill.engine.execution.worker_deaths import (
    note_no_place,
    note_place,
    rows_of_deaths,
    times_suspected,
)
from gristmill.engine.run import StageRun
from gristmill.engine.slices import SliceGroup, leaves_out_damaged, note_reading
from gristmill.engine.task import FileSet, Result, Task
from gristmill.errors import GristmillError, UsageError
from gristmill.io.artefacts import open_table, open_table_writer, write_rows
from gristmill.io.documents import Document, Slice, names_of, read_sizes_of, rows_of
from gristmill.io.facts import (
    TYPES,
    FactsFile,
    FactsWriter,
    VectorWriter,
    WrittenSlice,
    open_facts_writer,
    open_vector_writer,
    schema_of_facts,
    stream_facts,
    write_index,
)
from gristmill.io.readers import read_documents
from gristmill.io.writers import Rejects, Sink, open_jsonl_writer
from gristmill.steps import Batch, DocumentStep, Processed, is_vector, run_steps, vector_length
from gristmill.text import utf8_size
from preprocessing.mixing.drops import Drops, load_drops
from preprocessing.tokenizer.safe_encoder import FailedDocument

COMPRESSION = 1  # of documents in .zst: a higher level takes twice the time, and saves 15 %
BATCH_DOCUMENTS = 4096
BATCH_CHARACTERS = 1 << 20
Steps = tuple[DocumentStep, ...]
_REPLACED = "replaced_"  # begins the facts of the rules of a recipe: personal data that was replaced, by kind
NOTED = "noted"  # reason of documents that stay where they are
REMOVED = pa.schema(
    {
        "file": pa.string(),
        "row": pa.int64(),
        "rule": pa.string(),
        "value": pa.float64(),
        "detail": pa.string(),
        "id": pa.string(),
    }
)


def removed_path(target_dir: Path) -> Path:
    """Return the table of the documents that are not in `target_dir`, next to it."""
    return target_dir.with_name(f"{target_dir.name}.removed.parquet")


class SliceNote(msgspec.Struct):
    """Result of a task for a slice: the raw records in it, and the documents written, or found, in `written.file`."""

    records: int
    written: WrittenSlice


class GroupNotes(msgspec.Struct):
    """Result of a task: what it did with its slices, and the sums of facts that were asked for."""

    slices: list[SliceNote]
    sums: dict[str, int]


@leaves_out_damaged
def process_slices(
    group: SliceGroup,
    outputs: tuple[Path, ...],
    names: tuple[str, ...],
    steps: Steps,
    sums: tuple[str, ...],
    written_as: str,
    facts: Path,
    drops: Path | None = None,
    **vectors: Path,
) -> Result:
    """Task: run the steps on the documents of each slice, and write the kept ones to its output.

    Without `outputs` nothing is written but facts, of documents that stay in the files of these `names`. The field of
    the text is named `written_as`, or stays. `vectors` are the files of facts that are vectors. Rows of documents that
    are written are counted from the slice's first. Documents that `drops`, a file of split_drops, leaves out, are
    counted with their reasons, and have no facts. The value is GroupNotes.
    """
    counts = Counts({}, [])
    notes = GroupNotes([], dict.fromkeys(sums, 0))
    scalars, lengths = split_facts(steps)
    drops_of = load_drops(drops, names_of(group)) if drops else {}
    with ExitStack() as stack:
        columns = stack.enter_context(open_facts_writer(facts, schema_of_facts(scalars)))
        writers = dict[str, VectorWriter]()
        for name, length in lengths.items():
            writers[name] = stack.enter_context(open_vector_writer(vectors[name], name, length))
        rejects = None if outputs else NotedRejects(facts)  # one for all slices: it begins a new file
        for number, (part, name) in enumerate(zip(group, names, strict=True)):
            worker = _SliceWorker(
                part, name, steps, counts, notes, columns, writers, written_as, drops_of.get(part.name)
            )
            if rejects:
                worker.run(rejects, None)
                continue
            with open_jsonl_writer(outputs[number], COMPRESSION) as sink:
                worker.run(NotedRejects(outputs[number]), sink)
    return Result(counts, msgspec.to_builtins(notes))


def split_facts(steps: Steps) -> tuple[dict[str, str], dict[str, int]]:
    """Return the types of scalar facts, which are columns, and the lengths of vector facts."""
    scalars = dict[str, str]()
    lengths = dict[str, int]()
    for step in steps:
        for name, kind in step.makes.items():
            if is_vector(kind):
                lengths[name] = vector_length(kind)
            else:
                scalars[name] = kind
    return scalars, lengths


class NotedRejects(Rejects):
    """Writes malformed records as Rejects, and notes the row, reason and size of each until `take`."""

    def __init__(self, output: Path) -> None:
        super().__init__(output)
        self._noted: list[tuple[int, str, int]] = []

    def note(self, row: int, reason: str, size: int, url: str = "") -> None:  # noqa: ARG002
        self._noted.append((row, reason, size))

    def take(self) -> list[tuple[int, str, int]]:
        """Return what was noted since the last call."""
        noted = self._noted
        self._noted = []
        return noted


class _SliceWorker:
    """Runs the steps on the documents of one slice, batch by batch."""

    def __init__(
        self, part: Slice, name: str, steps: Steps, counts: Counts, notes: GroupNotes, columns: FactsWriter,
        vectors: Mapping[str, VectorWriter], written_as: str, drops: Drops | None,
    ) -> None:  # fmt: skip
        self.part = part
        self.name = name
        self.steps = steps
        self.counts = counts
        self.notes = notes
        self.columns = columns
        self.vectors = vectors
        self.written_as = written_as
        self.drops = drops
        self.records = 0
        self.written = WrittenSlice(name, 0, 0, 0)

    def run(self, rejects: NotedRejects, sink: Sink | None) -> None:
        """Read the slice, write its documents to `sink`, and note facts of all its records."""
        if not sink:
            self.written.first = self.written.end = self.part.first_row
        if not self.part.damage:
            note_reading(self.part)
        documents = read_documents(self.part, self.counts, rejects)
        batches = batched(documents, BATCH_DOCUMENTS, BATCH_CHARACTERS, lambda document: len(document.text))
        for batch in batches:
            if self.drops:
                self._leave_out(batch, self.drops)
            if batch:
                self._run_batch(batch, rejects.take(), sink)
            batch.clear()  # a large document is gone before the next is read
            note_reading(self.part)
        note_no_place()
        self._note_facts({}, rejects.take(), 0)
        self.notes.slices.append(SliceNote(self.records, self.written))

    def _leave_out(self, documents: list[Document], drops: Drops) -> None:
        """Take the documents that are dropped out of a batch; count each with its reason."""
        reasons = drops.reasons(np.array(rows_of(documents), np.int64))
        left = list[Document]()
        for document, reason in zip(documents, reasons, strict=True):
            if reason:
                self.counts.add(self.part.source, reason, document.read_bytes)
            else:
                left.append(document)
        documents[:] = left

    def _run_batch(self, documents: list[Document], malformed: list[tuple[int, str, int]], sink: Sink | None) -> None:
        texts = tuple(document.text for document in documents)
        batch = Batch(
            texts,
            read_field=lambda number, name: documents[number].value(name),
            place=lambda number: f"{self.part.path} line {documents[number].key.row + 1}",
        )
        raw_rows = rows_of(documents)
        done = self._run_steps(batch, raw_rows)
        raw_sizes = np.array(read_sizes_of(documents), np.int64)
        is_written = np.array([text is not None for text in done.texts], np.bool_)
        sizes = raw_sizes.copy()
        for number in np.flatnonzero(done.is_rewritten & is_written).tolist():
            sizes[number] = utf8_size(done.texts[number] or "")
        if sink:
            rows = self._write(documents, done, is_written, sink)
        else:
            self._reject_changes(done, is_written, batch)
            rows = np.array(raw_rows, np.int64)
            self.written.end = int(rows[-1]) + 1
            self.written.documents += int(is_written.sum())
        self._count_removed(batch, done, raw_sizes, is_written)
        if sink:
            for size, before in zip(sizes[is_written].tolist(), raw_sizes[is_written].tolist(), strict=True):
                self.counts.add_written(self.part.source, size, before)
        else:
            self.counts.add(self.part.source, NOTED, int(sizes[is_written].sum()), int(is_written.sum()))
        removed = np.flatnonzero(~is_written).tolist()
        ids: list[str | None] = [None] * len(documents)
        for number in removed:
            ids[number] = documents[number].own_id
        columns = {
            "raw_row": pa.array(raw_rows, pa.int64()),
            "file": self._names(self.name, is_written),
            "row": pa.array(rows, mask=~is_written),
            "reason": pa.array(done.reasons, pa.string()).dictionary_encode(),
            "value": pa.array(done.values, pa.float64()),
            "detail": pa.array(done.details, pa.string(), mask=is_written),
            "id": pa.array(ids, pa.string()),
            "raw_bytes": pa.array(raw_sizes),
            "bytes": pa.array(sizes, mask=~is_written),
        }
        for name, kind in split_facts(self.steps)[0].items():
            columns[name] = _spread(done.facts.get(name), len(documents), kind)
        self._note_facts(columns, malformed, len(documents))
        for name, (positions, values) in done.facts.items():
            if name.startswith(_REPLACED):
                count = int(values[is_written[positions]].sum())
                self.counts.add_replaced({name.removeprefix(_REPLACED): count} if count else {})
        for name in self.notes.sums:
            positions, values = done.facts.get(name, (np.empty(0, np.int64), np.empty(0, np.int64)))
            self.notes.sums[name] += int(values[is_written[positions]].sum())
        for name, writer in self.vectors.items():
            if name in done.facts:
                positions, vectors = done.facts[name]
                writer.add(vectors[is_written[positions]])

    def _run_steps(self, batch: Batch, rows: Sequence[int]) -> Processed:
        """Run the steps without the documents on which workers died, each of which was tried alone then."""
        label = self.part.label
        dead = rows_of_deaths(label)
        deaths = dict[int, str]()
        for number, row in enumerate(rows):
            if row in dead:
                deaths[number] = dead[row]
        if times_suspected(label, rows[0]):
            for number, row in enumerate(rows):
                if number not in deaths:
                    note_place(label, row, is_alone=True)
                    with suppress(GristmillError):  # it fails among the others, too
                        run_steps(self.steps, batch.take([number], [batch.texts[number]], {}))
        note_place(label, rows[0])
        done = run_steps(self.steps, batch, deaths)
        note_no_place()
        return done

    def _write(
        self, documents: Sequence[Document], done: Processed, is_written: NDArray[np.bool_], sink: Sink
    ) -> NDArray[np.int64]:
        """Write the documents that are kept; return the row of each."""
        for number in np.flatnonzero(is_written).tolist():
            document = documents[number]
            text = done.texts[number]
            if done.is_rewritten[number] and text is not None:
                document.text = text
                document.fields[document.text_column] = text
            if self.written_as:
                document.rename_text(self.written_as)
            sink.write(document.to_json())
        rows = self.written.end + np.cumsum(is_written) - 1
        count = int(is_written.sum())
        self.written.end += count
        self.written.documents += count
        return rows.astype(np.int64)

    def _reject_changes(self, done: Processed, is_written: NDArray[np.bool_], batch: Batch) -> None:
        """Raise UsageError if a step changed or removed a document; one on which a step failed has no facts."""
        is_failed = np.array([reason.startswith(f"{FAILED}: ") for reason in done.reasons], np.bool_)
        changed = np.flatnonzero((done.is_rewritten | ~is_written) & ~is_failed)
        if len(changed):
            names = ", ".join(step.name for step in self.steps)
            raise UsageError(
                f"one of the steps {names} changed or removed {batch.place(int(changed[0]))}, and this pass writes no "
                "documents: expected steps that only note facts"
            )

    def _count_removed(
        self, batch: Batch, done: Processed, raw_sizes: NDArray[np.int64], is_written: NDArray[np.bool_]
    ) -> None:
        for number in np.flatnonzero(~is_written).tolist():
            reason = done.reasons[number]
            self.counts.add(self.part.source, reason, int(raw_sizes[number]))
            if reason.startswith(f"{FAILED}: "):
                step = reason.removeprefix(f"{FAILED}: ")
                what = WORKER_DIED if step == WORKER_DIED else f"step {step!r} failed"
                self.counts.add_failure(f"{what} at {batch.place(number)}: {done.details[number]}")

    def _note_facts(self, columns: dict[str, pa.Array], malformed: list[tuple[int, str, int]], count: int) -> None:
        """Add the facts of a batch of documents, and of the malformed records between them, in the order of rows."""
        self.records += count + len(malformed)
        if count and not malformed:
            self.columns.add({"raw_file": self._names(self.part.name, np.ones(count, np.bool_)), **columns})
            return
        if not malformed:
            return
        schema = self.columns.schema
        rows, reasons, sizes = zip(*malformed, strict=True)
        noted = {
            "raw_row": pa.array(rows, pa.int64()),
            "reason": pa.array(reasons, pa.string()),
            "raw_bytes": pa.array(sizes, pa.int64()),
        }
        joined = dict[str, pa.Array]()
        for name in schema.names:
            if name == "raw_file":
                continue
            kind = schema.field(name).type
            plain = kind.value_type if pa.types.is_dictionary(kind) else kind
            pieces = [columns[name].cast(plain)] if count else []
            pieces.append(noted[name] if name in noted else pa.nulls(len(rows), plain))
            joined[name] = pa.concat_arrays(pieces)
        order = pc.array_sort_indices(joined["raw_row"])
        total = count + len(rows)
        table = {"raw_file": self._names(self.part.name, np.ones(total, np.bool_))}
        for name, array in joined.items():
            table[name] = _encode(array.take(order), schema.field(name).type)
        self.columns.add(table)

    def _names(self, name: str, is_present: NDArray[np.bool_]) -> pa.DictionaryArray:
        """Return a column with one name, null where there is none."""
        indices = pa.array(np.zeros(len(is_present), np.int32), mask=~is_present)
        return pa.DictionaryArray.from_arrays(indices, pa.array([name]))


def _encode(array: pa.Array, kind: pa.DataType) -> pa.Array:
    return array.dictionary_encode() if pa.types.is_dictionary(kind) else array


def _spread(noted: tuple[NDArray[np.int64], NDArray[Any]] | None, count: int, kind: str) -> pa.Array:
    """Return a column of `count` values, given the values at some positions; null elsewhere."""
    if noted is None:
        return pa.nulls(count, TYPES[kind])
    positions, values = noted
    if len(positions) == count:
        return pa.array(values, TYPES[kind])
    full = np.zeros(count, values.dtype)
    full[positions] = values
    is_missing = np.ones(count, np.bool_)
    is_missing[positions] = False
    return pa.array(full, TYPES[kind], mask=is_missing)


def number_rows(facts: Path, first: int, output: Path) -> None:
    """Task: write the facts of a piece of a large file anew, with rows counted from the file's first."""
    with open_table(facts) as file, open_facts_writer(output, file.schema_arrow) as writer:
        for number in range(file.num_row_groups):
            table = file.read_row_group(number)
            columns = {name: table.column(name).combine_chunks() for name in table.column_names}
            columns["row"] = pc.add(columns["row"], pa.scalar(first, pa.int64()))
            writer.add(columns)


def list_removed(facts: FileSet, output: Path) -> None:
    """Task: write a table of the documents that steps removed, with the rule of each, from files of facts in order."""
    columns = ["raw_file", "raw_row", "reason", "value", "detail", "id"]
    with open_table_writer(output, REMOVED) as write:
        for path in facts.paths:
            for table in stream_facts(path, columns):
                reasons = table.column("reason").cast(pa.string())
                no_documents = pc.or_(
                    pc.starts_with(reasons, f"{MALFORMED}: "), pc.starts_with(reasons, f"{SKIPPED}: ")
                )
                chosen = table.filter(pc.and_(pc.not_equal(reasons, ""), pc.invert(no_documents)))
                removed = dict[str, pa.ChunkedArray]()
                for name, field in zip(columns, REMOVED, strict=True):
                    removed[field.name] = chosen.column(name).cast(field.type)
                write(removed)


def list_failed(run: StageRun, failed: Sequence[FailedDocument], target_dir: Path) -> Path | None:
    """Run the step that lists documents on which a tokenizer failed, next to the tokens; return the table, if any."""
    if not failed:
        return None
    table = removed_path(target_dir)
    arguments = {"rows": [document.removed_row for document in failed], "output": table}
    run.step("removed", [Task("removed", write_removed, arguments, (table,))])
    return table


def write_removed(rows: list[tuple[Any, ...]], output: Path) -> None:
    """Task: write a table of removed documents, given its rows."""
    write_rows(output, REMOVED, rows)


def index_facts(files: list[FactsFile], output: Path) -> None:
    """Task: write the list of the files of facts."""
    write_index(output, files)
