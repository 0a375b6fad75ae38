"""The stage `generate_exact_pairs` of a run: pair exact copies by their digests. No text is read."""

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dedup.candidates.digest_join import join_digests
from dedup.candidates.document_ids import SourceRuns
from dedup.candidates.exact_copies import DIGESTED, DIGESTED_ROW, FIRST, RowLocator, join_copies
from dedup.candidates.input_shards import Scope
from dedup.generate_exact_pairs import STAGE, check_names, join_counts, print_summary, write_copies
from dedup.steps.fingerprint import FORM_DIGEST
from gristmill.batches import numbered
from gristmill.counts import READ, Counts
from gristmill.engine.facts import count_files, list_facts, plan_facts, without_vectors
from gristmill.engine.options import RunOptions
from gristmill.engine.run import open_stage
from gristmill.engine.task import FileSet, Task
from gristmill.io.documents import source_of
from gristmill.io.external_sort import write_records
from gristmill.io.facts import FactsFile, WrittenSlice, paths_of_facts, written_by_file

_FACTS_FILES = 64  # of facts that one task reads
_FACTS_ROWS = 1 << 24  # of facts that one task reads


def pair_exact_copies(
    facts_dir: Path, out_file: Path, scope: Scope = "global", options: RunOptions = RunOptions()
) -> Counts:
    """Write exact copies as generate_exact_pairs does, from the facts of a pass with the step Fingerprint.

    Args:
        facts_dir: Folder of facts that prepare wrote.
        out_file: DUP/duplicate_pairs_exact.txt; a table of the same name (.parquet) has the same pairs.
        scope: per-source compares documents only with documents of their own source.
        options: Workers, memory, and when to stop; they change no output.

    Returns:
        Documents read, copies and unique documents (including the first of each group), per source.
    """
    check_names(facts_dir, out_file, "matching_form", scope)
    outputs = (out_file, out_file.with_suffix(".parquet"))
    paths = list_facts(facts_dir)
    with open_stage(
        STAGE,
        out_file.parent,
        options,
        label=out_file.name,
        reads={facts_dir: paths},
        files=outputs,
    ) as run:
        done = run.goal({"scope": scope, "facts": FileSet(without_vectors(paths))}, outputs)
        if done is not None:
            return run.finish(done)
        files = plan_facts(run, facts_dir)
        groups = group_facts(files)
        tasks = list[Task]()
        for group in groups:
            output = run.work / "digests" / f"{group[0].path}.bin"
            facts = FileSet(tuple(paths_of_facts(facts_dir, group)))
            arguments = {"facts": facts, "slices": [file.slices for file in group], "scope": scope, "output": output}
            tasks.append(Task(group[0].path, digest_facts, arguments, (output,)))
        digested = run.step("digests", tasks)
        sources = SourceRuns.of([group[0].slices[0].file for group in groups])
        copies, joined = join_digests(run, digested, DIGESTED_ROW, "copies", join_copies, {"sources": sources})
        names_of_files = set[str]()
        for file in files:
            names_of_files.update(file.corpus_files)
        names = sorted(names_of_files)
        write_copies(run, names, locate_rows(groups, names), copies, outputs)
        counts = join_counts(digested.counts, joined.counts)
        read = run.note("files that are read", count_files(files))
        counts = run.finish(counts.merge(read))
    if not options.quiet:
        print_summary(counts, joined.counts.total(FIRST).documents)
    return counts


def group_facts(files: Sequence[FactsFile]) -> list[list[FactsFile]]:
    """Gather consecutive files of facts of one source, those with documents, so that few tasks read many small ones."""
    groups = list[list[FactsFile]]()
    rows = 0
    for file in files:
        if not file.documents:
            continue
        is_full = not groups or len(groups[-1]) == _FACTS_FILES or rows > _FACTS_ROWS
        if is_full or _source(groups[-1][0]) != _source(file):
            groups.append([])
            rows = 0
        groups[-1].append(file)
        rows += _count_rows(file.slices)
    return groups


def _source(file: FactsFile) -> str:
    return source_of(file.slices[0].file)


def _count_rows(slices: Sequence[WrittenSlice]) -> int:
    return sum(part.end - part.first for part in slices)


def digest_facts(facts: FileSet, slices: list[list[WrittenSlice]], scope: Scope, output: Path) -> Counts:
    """Task: write the DIGESTED_ROWs of the documents in a group of files of facts, each with its `slices`."""
    counts = Counts({}, [])
    source = source_of(slices[0][0].file)
    salt = np.zeros(2, "<u8")
    if scope == "per-source":
        salt = np.frombuffer(blake2b(source.encode(), digest_size=16).digest(), "<u8")

    def blocks() -> Iterator[NDArray]:
        start = 0
        for path, parts in zip(facts.paths, slices, strict=True):
            starts = _starts_of(parts, start)
            start += _count_rows(parts)
            for file, table in written_by_file(path, (*FORM_DIGEST, "bytes")):
                records = np.empty(table.num_rows, DIGESTED_ROW)
                records["high"] = table.column(FORM_DIGEST[0]).to_numpy() ^ salt[0]
                records["low"] = table.column(FORM_DIGEST[1]).to_numpy() ^ salt[1]
                records["row"] = table.column("row").to_numpy() + starts[file]
                sizes = table.column("bytes").to_numpy()
                records["size"] = sizes
                size = int(sizes.sum())
                counts.add(source, READ, size, len(records))
                counts.add(source, DIGESTED, size, len(records))
                yield records

    write_records(output, blocks())
    return counts


def _starts_of(slices: Sequence[WrittenSlice], start: int) -> dict[str, int]:
    """Return what is added to a row of each file to get the row in the group, whose rows begin at `start` here."""
    starts = dict[str, int]()
    for part in slices:
        starts[part.file] = start - part.first
        start += part.end - part.first
    return starts


def locate_rows(groups: Sequence[Sequence[FactsFile]], names: Sequence[str]) -> RowLocator:
    """Return where rows are, given groups of files of facts, as digest_facts numbers their rows.

    `names` are of all files.
    """
    numbers = numbered(names)
    packed = list[int]()
    files = list[int]()
    first_rows = list[int]()
    for group_number, group in enumerate(groups):
        start = 0
        for file in group:
            for part in file.slices:
                packed.append(group_number << 32 | start)
                files.append(numbers[part.file])
                first_rows.append(part.first)
                start += part.end - part.first
    return RowLocator(np.array(packed, np.uint64), np.array(files, np.uint32), np.array(first_rows, np.int64))
