"""Stage: read a corpus once, run steps on its documents, write the kept ones, and note facts of all records.

Raw files → steps → documents, which later stages read, and facts, which joins read instead of the text.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gristmill.counts import Counts
from gristmill.engine.options import RunOptions
from gristmill.engine.rewriting import Targets, plan_targets, rewrite_corpus
from gristmill.engine.run import StageRun, open_stage
from gristmill.engine.slices import SliceGroup, cut_raw_corpus, is_piece, read_slices
from gristmill.engine.staleness.outputs import reject_overlapping_folders, reject_unknown_files
from gristmill.engine.staleness.records import StepResult
from gristmill.engine.task import FileSet, Stage, Task
from gristmill.io.corpus import Corpus, Source, join_corpora, scan_corpus, scan_sources, web_libraries
from gristmill.io.documents import CORPUS_SUFFIXES, CorpusFile, Extract, names_of, paths_of
from gristmill.io.facts import CORE, INDEX_FILE, SUFFIX, FactsFile, WrittenSlice, paths_of_facts, vector_path
from gristmill.steps import DocumentStep, check_steps
from gristmill.storage.files import listed_once
from preprocessing.document_pass import (
    GroupNotes,
    Steps,
    index_facts,
    list_removed,
    number_rows,
    process_slices,
    split_facts,
)

STAGE = Stage("prepare", version=1, libraries=("unicode", "zstandard", "zlib", "pyarrow"))


def prepare(
    data_dir: Path,
    documents_dir: Path | None,
    facts_dir: Path,
    steps: Sequence[DocumentStep],
    options: RunOptions = RunOptions(),
    *,
    text_column: str = "text",
    read_also: tuple[str, ...] = (),
    skip_odd_names: bool = False,
    extract: Extract = "main",
    sources: Mapping[str, Source] | None = None,
    sums: tuple[str, ...] = (),
    removed: Path | None = None,
    max_failed: float = 0.0,
    stage: Stage = STAGE,
) -> tuple[Counts, dict[str, int]]:
    """Run steps on every document of a corpus; write the documents that they keep, and facts of all records.

    A file has its input's name with the suffix .jsonl.zst, and a large one is cut into slices. Without `documents_dir`
    no text is written: steps may only note facts, of documents that stay where they are.

    Args:
        data_dir: The raw corpus, in any format that normalize_text reads.
        documents_dir: Output folder of the documents; files keep their relative paths.
        facts_dir: Output folder of the facts; see gristmill.io.facts.
        steps: What is done with a document, in this order.
        options: Workers, memory, and when to stop; they change no output.
        text_column: The column or field that holds the text; it keeps its name.
        read_also: More formats to read: txt, md, html (a file is one document), csv, tsv (a row is one).
        skip_odd_names: Leave out files whose names cannot be part of a document's key.
        extract: Of HTML pages the text without menus and footers (main), or all text.
        sources: Folder, text field and format of each source, where these differ; others are not read then.
        sums: Facts to add up over the documents that are written.
        removed: Output, a table of the documents that steps removed: raw file and row, rule, value, detail and id.
        max_failed: Fraction of the documents on which steps may fail; they are left out, and listed in `removed`.
            Beyond it the stage ends with an error, after the other documents. If it is more than 0, a document on which
            a worker process dies counts as one, and with 0 that ends the stage.
        stage: The name and version under which records are kept, where the pass does the work of another stage.

    Returns:
        Documents read, written, malformed, and removed by each reason, and files read and not read, per source; and
        the sums.
    """
    steps = tuple(steps)
    check_steps(steps, reserved=CORE.names)
    written_to = documents_dir or data_dir
    reject_overlapping_folders(facts_dir, written_to)
    with listed_once(data_dir):
        corpora = _list_corpus(data_dir, sources, text_column, read_also, skip_odd_names, extract)
        corpus = join_corpora(corpora)
        reads = dict[Path, list[Path]]()
        for folder, listed in corpora:
            reads.setdefault(folder, []).extend(paths_of(listed.files))
        targets: Targets = {}
        publishes = [facts_dir]
        if documents_dir:
            targets = plan_targets(corpus.files, documents_dir, zst=True)
            publishes = [documents_dir, facts_dir]
        names = dict[str, str]()
        for name, path in targets.items():
            names[name] = path.relative_to(written_to).as_posix()
        files = sorted(corpus.files, key=lambda file: names.get(file.name, file.name))  # in the order of keys
        version = stage_of(stage, steps, files)
        more = [removed] if removed else []
        with open_stage(
            version, publishes[0], options, reads=reads, publishes=publishes, files=more, inputs_vary=bool(sources)
        ) as run:
            if documents_dir:
                reject_unknown_files(documents_dir, targets.values(), CORPUS_SUFFIXES, run.ledger)
            written_as = text_column if sources else ""
            plan = PassPlan(run, facts_dir, steps, names, sums, written_as, sets_aside=max_failed > 0)
            if documents_dir:
                done = plan.write_documents(files, targets)
            else:
                done = plan.only_note(files)
            counts = done.counts
            facts = plan.finish_facts(done)
            if removed:
                arguments = {"facts": FileSet(tuple(facts)), "output": removed}
                run.step("removed", [Task("removed", list_removed, arguments, (removed,))])
            counts.check_failed(stage.name, max_failed, removed)
            counts.merge(run.note("files that are not read", corpus.count_unread()))
            totals = dict.fromkeys(sums, 0)
            for group in done.values(GroupNotes):
                for name in sums:
                    totals[name] += group.sums[name]
            return run.finish(counts), totals


def _list_corpus(
    data_dir: Path,
    sources: Mapping[str, Source] | None,
    text_column: str,
    read_also: tuple[str, ...],
    skip: bool,
    extract: Extract,
) -> list[tuple[Path, Corpus]]:
    if sources:
        return scan_sources(data_dir, sources, text_column, skip)
    listed = scan_corpus(data_dir, text_column=text_column, read_also=read_also, skip_odd_names=skip, extract=extract)
    return [(data_dir, listed)]


def stage_of(stage: Stage, steps: Steps, files: Sequence[CorpusFile]) -> Stage:
    """Return the stage with its steps, and the libraries that these and the formats depend on."""
    libraries = dict.fromkeys((*STAGE.libraries, *stage.libraries))
    for step in steps:
        libraries |= dict.fromkeys(step.libraries)
    libraries |= dict.fromkeys(web_libraries(files))
    return replace(stage, libraries=tuple(libraries), steps=versions_of(steps))


def versions_of(steps: Iterable[DocumentStep]) -> tuple[tuple[str, int], ...]:
    """Return the name and version of each step."""
    return tuple((step.name, step.version) for step in steps)


@dataclass
class PassPlan:
    """The tasks of a pass: where each writes, and what follows where a file is cut into pieces.

    `names` are the names of the documents' files by the raw file's, where they differ. `drops` are the files, by the
    names of a group's files, of the documents that are left out (see preprocessing.mixing.drops).
    """

    run: StageRun
    facts_dir: Path
    steps: Steps
    names: Mapping[str, str]
    sums: tuple[str, ...]
    written_as: str
    sets_aside: bool = False
    drops: Mapping[tuple[str, ...], Path] = field(default_factory=dict)

    def write_documents(self, files: Sequence[CorpusFile], targets: Targets) -> StepResult:
        """Run the steps on all files; write the documents that are kept."""
        return rewrite_corpus(
            self.run, "prepare", files, targets, process_slices, self._arguments(), self._foreign(),
            of_group=self._names_of, also=self._facts_of, sets_aside=self.sets_aside,
        )  # fmt: skip

    def only_note(self, files: Sequence[CorpusFile]) -> StepResult:
        """Run the steps on all files; write facts alone."""

        def plan(groups: list[SliceGroup]) -> Iterator[Task]:
            for group in groups:
                further = self._facts_of(group)
                given = {"outputs": (), **self._arguments(), **self._names_of(group), **further}
                yield Task.on_slices(
                    group, process_slices, given, (*further.values(),), self._foreign(), self.sets_aside
                )

        return read_slices(self.run, "prepare", cut_raw_corpus(self.run, files), plan)

    def finish_facts(self, done: StepResult) -> list[Path]:
        """Count the rows of large files from their first; list all files of facts, and return their paths."""
        listed = list[FactsFile]()
        numbering = list[Task]()
        ends = dict[str, int]()
        for record, paths, notes in zip(done.records, done.paths_of_tasks(), done.values(GroupNotes), strict=True):
            written = next(path for path in paths if path.name.endswith(SUFFIX))
            is_temporary = self._is_temporary(written)
            slices = list[WrittenSlice]()
            records = 0
            for note in notes.slices:
                records += note.records
                if is_temporary:
                    slices.append(self._moved(note.written, ends))
                else:
                    slices.append(note.written)
            target = self.facts_dir / f"{record.task}{SUFFIX}"
            if is_temporary:
                first = 0
                if slices:
                    first = slices[0].first
                arguments = {"facts": written, "first": first, "output": target}
                numbering.append(Task(record.task, number_rows, arguments, (target,)))
            listed.append(FactsFile(target.relative_to(self.facts_dir).as_posix(), records, slices))
        if numbering:
            self.run.step("number", numbering)
        index = self.facts_dir / INDEX_FILE
        self.run.step("index", [Task("index", index_facts, {"files": listed, "output": index}, (index,))])
        return paths_of_facts(self.facts_dir, listed)

    def _moved(self, part: WrittenSlice, ends: dict[str, int]) -> WrittenSlice:
        """Return the rows of a piece in its file, which begin where the rows of the piece before it end."""
        first = ends.get(part.file, 0)
        ends[part.file] = first + part.end
        return WrittenSlice(part.file, first, first + part.end, part.documents)

    def _is_temporary(self, path: Path) -> bool:
        return path.is_relative_to(self.run.work)

    def _arguments(self) -> dict[str, Any]:
        return {"steps": self.steps, "sums": self.sums, "written_as": self.written_as}

    def _foreign(self) -> str:
        return ", ".join(step.foreign for step in self.steps if step.foreign)

    def _names_of(self, group: SliceGroup) -> dict[str, Any]:
        names = tuple(self.names.get(part.name, part.name) for part in group)
        of_group: dict[str, Any] = {"names": names}
        if self.drops:
            of_group["drops"] = self.drops[names_of(group)]
        return of_group

    def _facts_of(self, group: SliceGroup) -> dict[str, Path]:
        """Return where a task writes facts: first to a temporary file, if rows are to be counted from another slice."""
        label = group[0].label
        facts = self.facts_dir / f"{label}{SUFFIX}"
        _, lengths_of_vectors = split_facts(self.steps)
        vectors = {name: vector_path(facts, name) for name in lengths_of_vectors}
        if self.names and is_piece(group[0]):
            facts = self.run.work / "facts" / f"{label}{SUFFIX}"
        return {"facts": facts, **vectors}


def note_replaced(counts: Counts, options: RunOptions) -> None:
    """Print how much personal data the rules of a recipe replaced, by kind, if they did."""
    if counts.replaced and not options.quiet:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in counts.replaced.items())
        print(f"note: personal data replaced in the documents written: {kinds}", file=sys.stderr)
