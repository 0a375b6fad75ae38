"""Stage: list the documents that are too short to learn from; the shuffle (pass1) drops them."""

import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import numpy as np
from tyro.conf import Positional

from gristmill.command import command
from gristmill.counts import Counts
from gristmill.engine.key_sets import merge_task
from gristmill.engine.options import RunOptions
from gristmill.engine.report import note_count_mismatch
from gristmill.engine.run import StageRun, open_stage
from gristmill.engine.slices import SliceGroup, cut_raw_corpus, leaves_out_damaged, read_slices
from gristmill.engine.staleness.records import DoneRecord, StepResult
from gristmill.engine.task import Stage, Task
from gristmill.errors import UsageError
from gristmill.io.artefacts import is_table
from gristmill.io.corpus import list_source, source_folder
from gristmill.io.documents import paths_of
from gristmill.io.files import STATE_DIR
from gristmill.io.keys import KeyBlocks, write_keys
from gristmill.io.readers import read_documents
from gristmill.io.writers import Rejects
from preprocessing.minimum_length import SizeUnit, check_threshold, is_short

STAGE = Stage("filter", version=1, libraries=("unicode", "pyarrow"))
SHORT = "short"
KEPT = "kept"
_FIND = "find"  # name of the step whose outputs are merged
_MERGED = "all/merged"  # the part of the work that is merging data sets, none of which is named all


def filter(
    input_dir: Positional[Path],
    output_file: Positional[Path],
    n_docs: Positional[int],
    dataset_name: Positional[str],
    threshold: Positional[int],
    options: RunOptions = RunOptions(),
    text_column: str = "text",
    unit: SizeUnit = "character",
) -> Counts:
    """List the documents with fewer than `threshold` characters in the matching form. No document is removed here.

    The matching form is lower case, without ASCII punctuation, with single spaces. Run once for each data set with the
    same output file: each run replaces the keys of its own data set and keeps the others. A Chinese character carries
    as much as several letters and takes three bytes, so --unit byte suits corpora of several scripts.

    Args:
        input_dir: NORM/<dataset>/; or NORM/, in which dataset_name chooses one data set or all.
        output_file: FILTERED.pickle, as SlimPajama's: {file: {rows}}; or .parquet, a table of file and row.
        n_docs: The expected number of documents; a note is printed if it differs from the count.
        dataset_name: Name of the data set, or all.
        threshold: Minimum size of the matching form of a document to keep, in units; SlimPajama's is 200 characters.
        options: Workers, memory, and when to stop; they change no output.
        text_column: The column or field that holds the text.
        unit: Unit of the threshold: character, or byte of UTF-8.

    Returns:
        Documents read, kept and short, per source.
    """
    check_threshold(threshold)
    is_table(output_file)  # raises for an unknown suffix now, before the work
    files = list_source(input_dir, dataset_name, text_column)
    folder = source_folder(input_dir, dataset_name)
    if output_file.resolve().is_relative_to(folder.resolve()):
        raise UsageError(f"{output_file} lies in the corpus {folder}: give a file outside it")
    with open_stage(
        STAGE, output_file.parent, options, reads={folder: paths_of(files)}, files=[output_file],
        label=output_file.name, part="" if dataset_name == "all" else dataset_name,
    ) as run:  # fmt: skip
        slices = cut_raw_corpus(run, files)

        def tasks_of(groups: Iterable[SliceGroup]) -> list[Task]:
            return [_find_task(run, group, threshold, unit) for group in groups]

        listed = read_slices(run, _FIND, slices, tasks_of)
        listed.counts.check_malformed(STAGE.name, options.max_malformed)
        if dataset_name == "all":
            _merge(run, listed, output_file)
        else:
            _merge_data_sets(run, output_file)
        counts = run.finish(listed.counts)
    note_count_mismatch(n_docs, counts, options)
    return counts


def _find_task(run: StageRun, group: SliceGroup, threshold: int, unit: SizeUnit) -> Task:
    output = run.ledger.root / STATE_DIR / run.output / f"{group[0].label}.parquet"
    return Task.on_slices(group, find_short, {"threshold": threshold, "unit": unit, "output": output}, (output,))


@leaves_out_damaged
def find_short(group: SliceGroup, threshold: int, unit: SizeUnit, output: Path) -> Counts:
    """Task: write the keys of the short documents in a group of slices."""
    counts = Counts({}, [])
    rejects = Rejects(output)
    keys = KeyBlocks()
    for part in group:
        short_rows = list[int]()
        for document in read_documents(part, counts, rejects):
            short = is_short(document.text, threshold, unit)
            counts.add(part.source, SHORT if short else KEPT, document.read_bytes)
            if short:
                short_rows.append(document.key.row)
        keys.add(part.name, np.array(short_rows, np.int64))
    write_keys(output, keys.join())
    return counts


def _merge_data_sets(run: StageRun, output_file: Path) -> None:
    """Write the keys that the calls for single data sets have found: a run of its own, one at a time.

    It reads what has been found while no other merges: a call that ends meanwhile merges again, with its own.
    """
    options = replace(run.options, quiet=True, of_run=run.execution)
    with open_stage(
        STAGE, output_file.parent, options, files=[output_file], label=output_file.name, part=_MERGED
    ) as merging:
        records = list[DoneRecord]()
        for ledger in (run.ledger, *run.ledger.siblings):
            for record in ledger.read().values():
                if record.step == _FIND:
                    records.append(record)
        listed = StepResult(records, run.ledger.root)
        merging.finish(_merge(merging, listed, output_file).counts)


def _merge(run: StageRun, listed: StepResult, output_file: Path) -> StepResult:
    """Run the step that merges the keys that tasks have listed."""
    return run.step("merge", [merge_task(listed.paths(), output_file, run.options.memory_bytes)])


if __name__ == "__main__":
    command(filter)
