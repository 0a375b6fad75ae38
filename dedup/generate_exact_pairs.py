"""Stage: find exact duplicates, documents whose text or matching form equals that of an earlier one.

Documents → text digests, partitioned by range → sorted, equal digests are copies → lines of keys and a table.
"""

import sys
from pathlib import Path
from typing import Any, get_args

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import pyarrow as pa

from dedup.candidates.digest_join import digest_groups, join_digests, sorted_records
from dedup.candidates.document_ids import SourceRuns
from dedup.candidates.exact_copies import (
    COPY,
    COPY_RECORD,
    DIGESTED,
    DIGESTED_ROW,
    FIRST,
    RowLocator,
    digest_slices,
    join_copies,
)
from dedup.candidates.input_shards import Scope
from dedup.minhash.shingles import MatchOn
from gristmill.batches import numbered
from gristmill.command import command
from gristmill.counts import READ, Counts
from gristmill.engine.options import RunOptions
from gristmill.engine.run import StageRun, open_stage
from gristmill.engine.slices import cut_raw_corpus, group_slices
from gristmill.engine.staleness.ledger import Ledger, run_name
from gristmill.engine.staleness.outputs import reject_overlapping_folders
from gristmill.engine.task import FileSet, Stage, Task
from gristmill.errors import OutputError, UsageError
from gristmill.io.artefacts import open_table_writer
from gristmill.io.corpus import list_corpus
from gristmill.io.documents import paths_of
from gristmill.io.files import STATE_DIR, mark_finished
from gristmill.paths import name_of
from gristmill.storage.files import is_file, remove_files
from gristmill.storage.local import atomic_write
from gristmill.wording import count_of

STAGE = Stage("generate_exact_pairs", version=2, libraries=("unicode", "pyarrow"))
UNIQUE = "unique"
_SCHEMA = pa.schema({"file": pa.string(), "row": pa.int64(), "kept_file": pa.string(), "kept_row": pa.int64()})


def generate_exact_pairs(
    input_dir: Path,
    out_file: Path,
    on: MatchOn = "matching_form",
    scope: Scope = "global",
    text_column: str = "text",
    options: RunOptions = RunOptions(),
) -> Counts:
    """Write each exact copy and the document it repeats as a line `<key> :: <key>`, in key order.

    In a group of equal documents the first in key order is kept, and the others are copies. A table of the same name
    (.parquet) has the same pairs; give it to `to_hash --skip`, so that copies get no signature. Documents whose
    matching form is empty are compared by their bytes.

    Args:
        input_dir: NORM/, the corpus, a folder of sources.
        out_file: DUP/duplicate_pairs_exact.txt; generate_connected_components reads duplicate_pairs*.txt.
        on: Compare the matching_form (lower case, no punctuation, single spaces) or the text's bytes.
        scope: per-source compares documents only with documents of their own source.
        text_column: The column or field of the text.
        options: Workers, memory, and when to stop; they change no output.

    Returns:
        Documents read, copies and unique documents (including the first of each group), per source.
    """
    check_names(input_dir, out_file, on, scope)
    files = list_corpus(input_dir, text_column=text_column)
    outputs = (out_file, out_file.with_suffix(".parquet"))
    with open_stage(
        STAGE, out_file.parent, options, label=out_file.name, reads={input_dir: paths_of(files)},
        files=outputs,
    ) as run:  # fmt: skip
        names = [file.name for file in files]
        corpus = FileSet(tuple(file.path for file in files))
        arguments: dict[str, Any] = {"names": names, "on": on, "scope": scope, "text_column": text_column}
        done = run.goal({**arguments, "corpus": corpus}, outputs)
        if done is not None:
            return run.finish(done)
        slices = cut_raw_corpus(run, files)
        digested = digest_groups(run, "digests", slices, digest_slices, {"on": on, "scope": scope})
        digested.counts.check_malformed(STAGE.name, options.max_malformed)
        groups = group_slices(slices)
        sources = SourceRuns.of([group[0].name for group in groups])
        copies, joined = join_digests(run, digested, DIGESTED_ROW, "copies", join_copies, {"sources": sources})
        numbers = numbered(names)
        places = RowLocator.of(groups, digested.values(list[int]), numbers)
        write_copies(run, names, places, copies, outputs)
        counts = run.finish(join_counts(digested.counts, joined.counts))
    if not options.quiet:
        print_summary(counts, joined.counts.total(FIRST).documents)
    return counts


def write_copies(
    run: StageRun, names: list[str], places: RowLocator, copies: FileSet, outputs: tuple[Path, Path]
) -> None:
    """Run the step that writes the lines and the table."""
    pairs, table = outputs
    arguments = {"names": names, "places": places, "copies": copies, "pairs": pairs, "table": table}
    run.step("write", [Task("write", write_pairs, arguments, outputs, memory=run.options.memory_bytes)])


def remove_exact_pairs(out_file: Path) -> None:
    """Remove the lines and the table of an earlier run with this `out_file`, as all pair files in a folder are read.

    Raises OutputError, and removes nothing, if one is there that generate_exact_pairs did not write.
    """
    ledger = Ledger(out_file.parent / STATE_DIR, run_name(STAGE.name, out_file.name))
    known = ledger.outputs()
    existing = [path for path in (out_file, out_file.with_suffix(".parquet")) if is_file(path)]
    for path in existing:
        if name_of(path) not in known:
            raise OutputError(
                f"{path} exists, and {STAGE.name} did not write it: the stage writes or removes a file of this name. "
                "Move it, or give another output folder"
            )
    remove_files(existing)
    mark_finished(out_file.parent, ledger.file.stem)
    if known:
        ledger.compact((), ledger.read())  # a file that is there later is not ours


def write_pairs(names: list[str], places: RowLocator, copies: FileSet, pairs: Path, table: Path, memory: int) -> None:
    """Task: write the copies of all digest ranges by key, as lines of keys and as a table; `names` are of files."""
    values = pa.array(names, pa.string())
    with (
        atomic_write(pairs) as temporary,
        temporary.open("w", encoding="utf-8", newline="\n") as lines,
        open_table_writer(table, _SCHEMA) as write,
    ):
        for block in sorted_records(copies.paths, COPY_RECORD, ("group", "row"), pairs, memory):
            files, rows = places.find(block["group"], block["row"])
            kept_files, kept_rows = places.find(block["kept_group"], block["kept_row"])
            keys = zip(files.tolist(), rows.tolist(), kept_files.tolist(), kept_rows.tolist(), strict=True)
            for file, row, kept_file, kept_row in keys:
                lines.write(f"{names[file]}@{row} :: {names[kept_file]}@{kept_row}\n")
            columns = {
                "file": values.take(pa.array(files)),
                "row": pa.array(rows),
                "kept_file": values.take(pa.array(kept_files)),
                "kept_row": pa.array(kept_rows),
            }
            write(columns)


def print_summary(counts: Counts, groups: int) -> None:
    """Print how many groups of copies there are, and how much of the text they are."""
    read = counts.total(READ)
    copied = counts.total(COPY)
    print(
        f"{STAGE.name}: {count_of(groups, 'group')}, "
        f"{count_of(copied.documents, 'copy', 'copies')}: "
        f"{copied.bytes / 1e6:,.1f} of {read.bytes / 1e6:,.1f} MB need no signature",
        file=sys.stderr,
    )


def join_counts(digested: Counts, joined: Counts) -> Counts:
    """Return counts per source, with read = copies + unique + malformed."""
    counts = Counts({}, digested.examples, digested.damaged, digested.stored)
    for source, reason, tally in digested.rows():
        counts.add(source, UNIQUE if reason == DIGESTED else reason, tally.bytes, tally.documents, tally.files)
    for source, reason, tally in joined.rows():
        if reason == COPY:
            counts.add(source, UNIQUE, -tally.bytes, -tally.documents)
            counts.add(source, COPY, tally.bytes, tally.documents)
    return counts


def check_names(input_dir: Path, out_file: Path, on: str, scope: str) -> None:
    """Raise UsageError for a value or a name that is not expected."""
    if on not in get_args(MatchOn) or scope not in get_args(Scope):
        forms = " or ".join(get_args(MatchOn))
        scopes = " or ".join(get_args(Scope))
        raise UsageError(f"--on {on} --scope {scope}: expected {forms}, and {scopes}")
    if not (out_file.name.startswith("duplicate_pairs") and out_file.suffix == ".txt"):
        raise UsageError(
            f"--out_file {out_file}: expected a name such as duplicate_pairs_exact.txt, "
            "as generate_connected_components reads duplicate_pairs*.txt"
        )
    reject_overlapping_folders(input_dir, out_file.parent)


if __name__ == "__main__":
    command(generate_exact_pairs)
