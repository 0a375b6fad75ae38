"""Stage: list the documents that are too short to learn from; the shuffle (pass1) drops them."""

import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import numpy as np
from numpy.typing import NDArray
from tyro.conf import Positional

from gristmill.batches import batched
from gristmill.command import command
from gristmill.counts import READ, Counts
from gristmill.engine.facts import count_files, list_facts, plan_facts
from gristmill.engine.options import RunOptions
from gristmill.engine.report import note_count_mismatch
from gristmill.engine.run import StageRun, open_stage
from gristmill.engine.slices import SliceGroup, cut_raw_corpus, leaves_out_damaged, read_slices
from gristmill.engine.staleness.records import DoneRecord
from gristmill.engine.task import FileSet, Stage, Task
from gristmill.errors import UsageError
from gristmill.io.artefacts import is_table
from gristmill.io.corpus import list_source, source_folder
from gristmill.io.documents import paths_of, source_of
from gristmill.io.facts import written_by_file
from gristmill.io.files import STATE_DIR
from gristmill.io.keys import sort_keys, write_keys, write_sorted_keys
from gristmill.io.readers import read_documents
from gristmill.io.writers import Rejects
from gristmill.steps import FORM_BYTES, FORM_CHARACTERS
from preprocessing.minimum_length import SizeUnit, check_threshold, is_short
from preprocessing.mixing.first_texts import FirstTexts
from preprocessing.mixing.keep_list import reject_stale_lines

STAGE = Stage("filter", version=1, libraries=("unicode", "pyarrow"))
SHORT = "short"
KEPT = "kept"
_FIND = "find"  # name of the step whose outputs are merged
_MERGED = "all/merged"  # the part of the work that is merging data sets, none of which is named all
_FACTS_FILES = 64  # read by one task


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
            run.step("merge", [_merge_task(run, listed.records, output_file)])
        else:
            _merge_data_sets(run, output_file)
        counts = run.finish(listed.counts)
    note_count_mismatch(n_docs, counts, options)
    return counts


def list_short(
    facts_dir: Path,
    output_file: Path,
    threshold: int,
    options: RunOptions = RunOptions(),
    unit: SizeUnit = "character",
    keep_list: Path | None = None,
    first: FirstTexts | None = None,
) -> Counts:
    """List the short documents as `filter` does, from the facts of a pass with the step Fingerprint: no text is read.

    This is the first stage of a run that reads the facts, so it refuses a list that the mix would refuse later.

    Args:
        facts_dir: Folder of facts that prepare wrote.
        output_file: The key set, .pickle or .parquet.
        threshold: Minimum size of the matching form of a document to keep, in units.
        options: Workers, memory, and when to stop; they change no output.
        unit: Unit of the threshold: character, or byte of UTF-8.
        keep_list: The list of documents that the mix will be given. A line that fits no document is an error now.
        first: The texts that the first stage of the run wrote, if later ones wrote others.

    Returns:
        Documents read, kept and short, per source.
    """
    check_threshold(threshold)
    is_table(output_file)  # raises for an unknown suffix now, before the work
    found_facts = list_facts(facts_dir)
    with open_stage(
        STAGE,
        output_file.parent,
        options,
        reads={facts_dir: found_facts},
        files=[output_file],
        label=output_file.name,
    ) as run:
        files = plan_facts(run, facts_dir)
        reject_stale_lines(run, keep_list, facts_dir, files, first)
        paths = [facts_dir / file.path for file in files]
        tasks = list[Task]()
        for bundle in batched(paths, count=_FACTS_FILES):
            name = bundle[0].relative_to(facts_dir).as_posix()
            output = run.ledger.root / STATE_DIR / run.output / f"{name}.short.parquet"
            arguments = {"facts": FileSet(tuple(bundle)), "threshold": threshold, "unit": unit, "output": output}
            tasks.append(Task(name, find_short_rows, arguments, (output,)))
        listed = run.step(_FIND, tasks)
        run.step("merge", [_merge_task(run, listed.records, output_file)])
        return run.finish(listed.counts.merge(run.note("files that are read", count_files(files))))


def find_short_rows(facts: FileSet, threshold: int, unit: SizeUnit, output: Path) -> Counts:
    """Task: write the keys of the short documents in some files of facts."""
    counts = Counts({}, [])
    rows = defaultdict[str, list[NDArray[np.int64]]](list)
    measure = FORM_CHARACTERS if unit == "character" else FORM_BYTES
    for path in facts.paths:
        for name, facts_of_file in written_by_file(path, (measure, "bytes")):
            is_short_row = facts_of_file[measure].to_numpy() < threshold
            sizes = facts_of_file["bytes"].to_numpy()
            for reason, chosen in ((SHORT, is_short_row), (KEPT, ~is_short_row)):
                if chosen.any():
                    counts.add(source_of(name), READ, int(sizes[chosen].sum()), int(chosen.sum()))
                    counts.add(source_of(name), reason, int(sizes[chosen].sum()), int(chosen.sum()))
            rows[name].append(facts_of_file["row"].to_numpy()[is_short_row])
    write_keys(output, {name: np.concatenate(blocks) for name, blocks in rows.items()})
    return counts


def _find_task(run: StageRun, group: SliceGroup, threshold: int, unit: SizeUnit) -> Task:
    output = run.ledger.root / STATE_DIR / run.output / f"{group[0].label}.parquet"
    return Task.on_slices(group, find_short, {"threshold": threshold, "unit": unit, "output": output}, (output,))


@leaves_out_damaged
def find_short(group: SliceGroup, threshold: int, unit: SizeUnit, output: Path) -> Counts:
    """Task: write the keys of the short documents in a group of slices."""
    counts = Counts({}, [])
    rejects = Rejects(output)
    rows = defaultdict(list)
    for part in group:
        for document in read_documents(part, counts, rejects):
            short = is_short(document.text, threshold, unit)
            counts.add(part.source, SHORT if short else KEPT, document.read_bytes)
            if short:
                rows[part.name].append(document.key.row)
    write_keys(output, {file: np.array(rows_of_file, np.int64) for file, rows_of_file in rows.items()})
    return counts


def _merge_data_sets(run: StageRun, output_file: Path) -> None:
    """Write the keys that the calls for single data sets have found: a run of its own, one at a time."""
    records = list[DoneRecord]()
    for ledger in (run.ledger, *run.ledger.siblings):
        records += [record for record in ledger.read().values() if record.step == _FIND]
    options = replace(run.options, quiet=True, of_run=run.execution)
    with open_stage(
        STAGE, output_file.parent, options, files=[output_file], label=output_file.name, part=_MERGED
    ) as merging:
        merging.finish(merging.step("merge", [_merge_task(merging, records, output_file)]).counts)


def _merge_task(run: StageRun, records: Sequence[DoneRecord], output_file: Path) -> Task:
    """Return the task that merges the keys that tasks have found."""
    keys = FileSet(tuple(sorted(run.ledger.path(record.outputs[0]) for record in records)))
    arguments = {"keys": keys, "output_file": output_file}
    return Task("merge", merge_keys, arguments, (output_file,), memory=run.options.memory_bytes)


def merge_keys(keys: FileSet, output_file: Path, memory: int) -> None:
    """Task: write the key set of all data sets, ascending by file and row."""
    with sort_keys(keys.paths, output_file.with_name(f"{output_file.name}.sorted"), memory // 2) as (names, blocks):
        write_sorted_keys(output_file, names, blocks)


if __name__ == "__main__":
    command(filter)
