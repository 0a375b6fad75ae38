"""Steps of the removal stage: sort → fetch → scatter → decide → write; where no document is read: decide → write."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from dedup.candidates.document_ids import SourceRuns, is_of_index
from dedup.candidates.input_shards import SignatureShard
from dedup.clustering.keep_policy import KeepPolicy
from dedup.clustering.similarity import SimilarityCheck
from dedup.removal.clusters import MemberFile, MemberPlan, SliceMembers, sort_members
from dedup.removal.decisions import decide_by_key, decide_part
from dedup.removal.fetching import (
    CLUSTERED,
    MAX_OPEN,
    UNREADABLE_FIELD,
    WITHOUT_FIELD,
    fetch_signatures,
    fetch_texts,
    scatter_fetched,
)
from dedup.removal.removal_table import IdFiles, join_ids, write_clusters, write_removals
from gristmill.batches import batched
from gristmill.counts import Counts
from gristmill.engine.run import StageRun
from gristmill.engine.slices import cut_corpus, group_slices
from gristmill.engine.task import FileSet, Task
from gristmill.errors import UsageError
from gristmill.io.documents import CorpusFile, Slice, total_size
from gristmill.wording import count_of

_SHARDS = 64  # of an index, which one task reads
_SIGNATURES = 1 << 18  # of an index, which one task reads
_MIN_BUNDLE = 16  # fetched files that one task scatters, or as many as there are parts


@dataclass(frozen=True)
class RemovalSettings:
    """Settings of a removal: the clusters, and the options."""

    input_file: Path
    keep: KeepPolicy
    dropped: tuple[Path, ...]
    check: SimilarityCheck | None

    @property
    def needs_corpus(self) -> bool:
        """Return whether the decision depends on the documents themselves."""
        return self.check is not None or self.keep.reads_documents


class Sorted(NamedTuple):
    """Files of the step sort: all members by file and row, and members of an index by cluster."""

    members: Path
    indexed: Path
    plan: MemberPlan


class FetchedFiles(NamedTuple):
    """FETCHED records and, if similarity is checked, their texts, which they locate."""

    records: FileSet
    texts: FileSet


class Decided(NamedTuple):
    """REMOVALs and the names of the files that they refer to by number."""

    names: list[str]
    removals: FileSet
    counts: Counts


def sort(run: StageRun, settings: RemovalSettings) -> Sorted:
    """Run the step sort: sort all members by file and row."""
    members = run.work / "members.bin"
    indexed = run.work / "index.bin"
    arguments = {
        "input_file": settings.input_file, "keep": settings.keep, "dropped": settings.dropped, "members": members,
        "indexed": indexed,
    }  # fmt: skip
    task = Task("sort", sort_members, arguments, (members, indexed), memory=run.options.memory_bytes)
    return Sorted(members, indexed, run.step("sort", [task]).values(MemberPlan)[0])


def fetch(
    run: StageRun,
    settings: RemovalSettings,
    members: Sorted,
    files: Sequence[CorpusFile],
    shards: Sequence[SignatureShard],
) -> tuple[FetchedFiles, FileSet | None, Counts]:
    """Run the step fetch: copy the members' texts, own ids and signatures out of the corpus and the indexes.

    Returns the files, those of the documents' own ids (None: no document has one), and counts.

    UsageError if the corpus `files` lack a file that clusters name, or the index `shards` a document;
    TooManyMalformed if the corpus has more malformed records than the options allow.
    """
    plan = members.plan
    names = set(members.plan.names)
    _check_files(settings, plan, files, shards)
    slices = cut_corpus(run, [file for file in files if file.name in names])
    of_corpus = list(_text_tasks(run, settings, members, slices))
    indexed = [shard for shard in shards if shard.file in names]
    tasks = [*of_corpus, *_signature_tasks(run, members, indexed, len(of_corpus))]
    done = run.step("fetch", tasks)
    done.counts.check_malformed(run.stage.name, run.options.max_malformed)
    _check_field(settings, done.counts)
    if settings.check:
        _check_signatures(plan, done.counts)
    records = _files_given(tasks, "output")
    texts = FileSet(())
    if settings.check:
        texts = _files_given(tasks, "texts")
    ids = None
    if any(done.values(int | None)):  # type: ignore[arg-type]
        ids = _files_given(of_corpus, "ids")
    return FetchedFiles(records, texts), ids, done.counts


def _files_given(tasks: Iterable[Task], name: str) -> FileSet:
    """Return the files that tasks have as an argument."""
    return FileSet(tuple(task.arguments[name] for task in tasks))


def _text_tasks(run: StageRun, settings: RemovalSettings, members: Sorted, slices: Sequence[Slice]) -> Iterator[Task]:
    """Yield a task for each group of slices."""
    ends = dict[Slice, int]()  # of all slices but the last of each file
    for one, following in pairwise(slices):
        if one.name == following.name:
            ends[one] = following.first_row
    for number, group in enumerate(group_slices(slices)):
        parts = list[SliceMembers]()
        for part in group:
            end = ends.get(part)
            span = members.plan.span(part.name, part.first_row, end)
            parts.append(SliceMembers(part, span, end))
        output = run.work / "fetched" / f"{number:06}.index"
        ids = output.with_suffix(".ids")
        texts = output.with_suffix(".text") if settings.check else None
        spans = [part.span for part in parts]
        arguments = {
            "parts": tuple(parts),
            "members": MemberFile.of(members.members, spans),
            "keep": settings.keep,
            "output": output,
            "ids": ids,
            "texts": texts,
        }
        outputs = (output, ids, texts) if texts else (output, ids)
        yield Task(group[0].label, fetch_texts, arguments, outputs, total_size(group))


def _signature_tasks(run: StageRun, members: Sorted, shards: Sequence[SignatureShard], first: int) -> Iterator[Task]:
    """Yield a task for each group of shards of an index, with output files numbered from `first`."""
    groups = batched(shards, count=_SHARDS, size=_SIGNATURES, size_of=lambda shard: shard.documents)
    for number, group in enumerate(groups, first):
        spans = [members.plan.span(shard.file) for shard in group]
        output = run.work / "fetched" / f"{number:06}.index"
        texts = output.with_suffix(".text")
        arguments = {
            "shards": tuple(zip(group, spans, strict=True)),
            "members": MemberFile.of(members.members, spans),
            "output": output,
            "texts": texts,
        }
        yield Task(f"signatures {number}", fetch_signatures, arguments, (output, texts))


def _check_files(
    settings: RemovalSettings, plan: MemberPlan, files: Sequence[CorpusFile], shards: Sequence[SignatureShard]
) -> None:
    """Raise UsageError if clusters name a file that is neither in the corpus nor in an index."""
    known = {file.name for file in files} | {shard.file for shard in shards}
    unknown = sorted(set(plan.names) - known)
    indexed = [name for name in unknown if is_of_index(name)]
    missing = [name for name in unknown if not is_of_index(name)]
    if indexed and settings.check:
        raise UsageError(
            f"{settings.input_file} holds documents of an index, such as those of {indexed[0]!r}: give --index as "
            "generate_connected_components was given it, to compare them by their signatures"
        )
    if missing:
        raise UsageError(
            f"{settings.input_file} names {count_of(len(missing), 'file')} that --corpus does not have, "
            f"{missing[0]!r} the "
            f"first; it has {files[0].name!r}, for example. Give the folder whose files were signed: names "
            "start with the source"
        )


def _check_field(settings: RemovalSettings, fetched: Counts) -> None:
    """Raise UsageError if no document of a cluster has the policy's field with a number or a date in it."""
    without = fetched.total(WITHOUT_FIELD).documents
    without += fetched.total(UNREADABLE_FIELD).documents
    if without and not _count_clustered(fetched, of_index=False):
        field = ".".join(settings.keep.path)
        raise UsageError(
            f"--keep {settings.keep.name}:{field}: none of the {without:,} documents in clusters has a number or a "
            f"date in that field ({'; '.join(fetched.examples)}): name one that they have"
        )


def _count_clustered(fetched: Counts, of_index: bool) -> int:
    """Return how many documents of clusters were fetched from indexes, or from the corpus."""
    documents = 0
    for source in fetched.tallies:
        if is_of_index(source) == of_index:
            documents += fetched.total(CLUSTERED, source).documents
    return documents


def _check_signatures(plan: MemberPlan, fetched: Counts) -> None:
    """Raise UsageError if the indexes lack documents that clusters name."""
    named = 0
    for name in filter(is_of_index, plan.names):
        first, last = plan.span(name)
        named += last - first
    signed = _count_clustered(fetched, of_index=True)
    if signed != named:
        raise UsageError(
            f"--index holds signatures of {signed:,} of the {named:,} documents that clusters name: give the folders "
            "that generate_connected_components was given"
        )


def _scatter(run: StageRun, parts: list[int], fetched: FetchedFiles) -> list[FetchedFiles]:
    """Run the step scatter: copy what was fetched to files of each part of the clusters; return those of each part.

    A bundle of files, as many as there are parts, makes about as many; a part has no more than a task can hold open.
    """
    size = max(len(parts), _MIN_BUNDLE, -(-len(fetched.records) // MAX_OPEN))
    tasks = list[Task]()
    for number, start in enumerate(range(0, len(fetched.records), size)):
        records = fetched.records.paths[start : start + size]
        texts = fetched.texts.paths[start : start + size]
        folder = run.work / "scattered" / f"{len(parts)} parts" / f"{number:06}"
        outputs = tuple(folder / f"{part:04}.index" for part in range(len(parts)))
        text_outputs = tuple(path.with_suffix(".text") for path in outputs) if texts else ()
        arguments = {
            "fetched": FileSet(records),
            "texts": FileSet(texts),
            "parts": parts,
            "outputs": outputs,
            "text_outputs": text_outputs,
        }
        tasks.append(Task(f"{number:06} of {len(parts)}", scatter_fetched, arguments, outputs + text_outputs))
    run.step("scatter", tasks)
    files_of_parts = list[FetchedFiles]()
    for part in range(len(parts)):
        records_of_part = FileSet.of(tasks, part)
        texts_of_part = FileSet(())
        if len(fetched.texts):
            texts_of_part = FileSet.of(tasks, len(parts) + part)
        files_of_parts.append(FetchedFiles(records_of_part, texts_of_part))
    return files_of_parts


def decide(run: StageRun, settings: RemovalSettings, members: Sorted, fetched: FetchedFiles) -> Decided:
    """Run the steps scatter and, with a task for each part of the clusters, decide on the fetched texts."""
    plan = members.plan
    sources = SourceRuns.of(plan.names)
    files_of_parts = _scatter(run, plan.parts, fetched)
    tasks = list[Task]()
    for number, (low, high) in enumerate(pairwise([*plan.parts, None])):
        output = run.work / "decided" / f"{number:06}.bin"
        arguments = {
            "fetched": files_of_parts[number].records,
            "texts": files_of_parts[number].texts,
            "indexed": None if settings.check else members.indexed,
            "low": low,
            "high": high,
            "sources": sources,
            "check": settings.check,
            "output": output,
        }
        tasks.append(Task(output.stem, decide_part, arguments, (output,), memory=run.options.memory_per_worker))
    counts = run.step("decide", tasks).counts
    return Decided(plan.names, FileSet.of(tasks), counts)


def decide_without_documents(run: StageRun, settings: RemovalSettings) -> Decided:
    """Run the step decide where keys and sources alone say which document of a cluster is kept: one task."""
    output = run.work / "decided.bin"
    arguments = {
        "input_file": settings.input_file, "keep": settings.keep, "dropped": settings.dropped, "output": output,
    }  # fmt: skip
    task = Task("by key", decide_by_key, arguments, (output,), memory=run.options.memory_bytes)
    decided = run.step("decide", [task])
    return Decided(decided.values(list[str])[0], FileSet((output,)), decided.counts)


def write(
    run: StageRun,
    settings: RemovalSettings,
    decided: Decided,
    fetched: FileSet | None,
    table: Path,
    pickle: Path | None,
) -> None:
    """Run the step write: one task writes the table and, if asked for, SlimPajama's pickle.

    Where documents have ids of their own, another writes the clusters with them.
    """
    ids = None
    if fetched:
        folder = run.work / "ids"
        ids = IdFiles(folder / "keys.bin", folder / "ends.bin", folder / "texts.bin")
        run.step("ids", [Task("ids", join_ids, {"fetched": fetched, **ids._asdict()}, tuple(ids))])
    arguments = {"names": decided.names, "decided": decided.removals, "table": table, "pickle": pickle, "ids": ids}
    outputs = (table, pickle) if pickle else (table,)
    tasks = [Task("write", write_removals, arguments, outputs, memory=run.options.memory_bytes)]
    if ids:
        output = clusters_next_to(table)
        named = {"input_file": settings.input_file, "ids": ids, "output": output}
        tasks.append(Task("clusters", write_clusters, named, (output,)))
    run.step("write", tasks)


def clusters_next_to(table: Path) -> Path:
    """Return the table of the clusters with the documents' own ids, next to that of removed documents."""
    return table.with_name(f"{table.stem}_clusters.parquet")
