"""Steps of the removal stage as tasks: sort → fetch → decide → write."""

from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, pairwise
from pathlib import Path

import msgspec

from dedup.candidates.document_ids import is_of_index
from dedup.candidates.input_shards import SignatureShard
from dedup.removal.clusters import MEMBER, Clusters
from dedup.removal.decisions import decide_part, remove_all_but_first
from dedup.removal.keep_policy import KEEP_ORDER, Keep, KeepOrder, Longest, Newest
from dedup.removal.members import INDEX_MEMBERS, MEMBERS, PLAN, MemberPlan, sort_members, span_of_slice
from dedup.removal.removal_table import REMOVAL, RemovalCounts, write_removals
from dedup.removal.similarity import SimilarityCheck
from dedup.removal.texts import CLUSTERED, fetch_signatures, fetch_texts, fetched_path
from gristmill.counts import Counts
from gristmill.engine.stage import STATE_DIR, MemoryBudget, RunOptions, Task, run_stage
from gristmill.errors import UsageError
from gristmill.io.documents import CorpusFile
from gristmill.io.external_sort import ExternalSorter, read_records
from gristmill.io.keys import read_keys
from gristmill.io.parquet_tables import ROW_GROUP_SIZE
from gristmill.io.readers import plan_slices

NAME = "generate_duplicates_dict"
DIGEST = 12  # characters of the options' hash in the name of the work folder
_FETCH = "fetch"


@dataclass(frozen=True)
class RemovalSettings:
    """The options that change the output, unlike RunOptions."""

    input_file: Path
    out_file: Path
    keep: Keep
    dropped: tuple[Path, ...]
    check: SimilarityCheck | None

    @property
    def reads_corpus(self) -> bool:
        """Whether documents are read, so that the steps sort, fetch and decide are needed."""
        return self.check is not None or isinstance(self.keep, Longest | Newest)

    @property
    def inputs(self) -> tuple[Path, ...]:
        """Input files that exist: the task that reads a missing one raises the error."""
        return tuple(path for path in (self.input_file, *self.dropped) if path.is_file())

    @property
    def work(self) -> Path:
        """The folder for intermediate files, which runs with other options do not share."""
        digest = sha256(repr(self).encode()).hexdigest()[:DIGEST]
        return self.out_file.parent / STATE_DIR / f"{NAME}-{self.out_file.name}-{digest}"


def sort(settings: RemovalSettings, options: RunOptions) -> MemberPlan:
    """Run the step sort, which sorts all members by file and row; return the plan for the later steps."""
    work = settings.work
    arguments = {
        "input_file": settings.input_file, "keep": settings.keep, "dropped": settings.dropped, "folder": work,
        "budget": MemoryBudget(options.memory_bytes),
    }  # fmt: skip
    outputs = (work / MEMBERS, work / INDEX_MEMBERS, work / PLAN)
    run_stage("sort", [Task("sort", sort_members, arguments, settings.inputs, outputs)], work, options, summary=False)
    return MemberPlan.load(work)


def fetch(
    settings: RemovalSettings,
    plan: MemberPlan,
    files: list[CorpusFile],
    shards: list[SignatureShard],
    options: RunOptions,
) -> tuple[Counts, int]:
    """Run the step fetch: copy the members' texts and signatures; return the counts and the number of slices.

    UsageError if the corpus `files` lack a file that clusters name, or the index `shards` a document.
    """
    _check_files(settings, plan, files, shards)
    share = MemoryBudget(options.memory_bytes // options.processes)
    tasks = _text_tasks(settings, plan, files, share)
    tasks += _signature_tasks(settings, plan, shards, len(tasks), share)
    counts = run_stage(_FETCH, tasks, settings.work, options, summary=False)
    if settings.check:
        _check_signatures(plan, counts)
    return counts, len(tasks)


def _text_tasks(
    settings: RemovalSettings, plan: MemberPlan, files: list[CorpusFile], share: MemoryBudget
) -> list[Task]:
    """A task for each slice of each file that has members."""
    tasks: list[Task] = []
    names, members = set(plan.names), settings.work / MEMBERS
    for file in files:
        slices = plan_slices(file) if file.name in names else []
        for part, following in zip(slices, [*slices[1:], None], strict=bool(slices)):
            output = fetched_path(settings.work, len(tasks))
            arguments = {
                "part": part, "number": len(tasks), "span": span_of_slice(part, following, plan, members),
                "members": members, "keep": settings.keep, "has_texts": settings.check is not None,
                "output": output, "budget": share,
            }  # fmt: skip
            outputs = (output, output.with_suffix(".text"))
            tasks.append(Task(part.label, fetch_texts, arguments, (Path(part.path), members), outputs, part.size))
    return tasks


def _signature_tasks(
    settings: RemovalSettings, plan: MemberPlan, shards: list[SignatureShard], first: int, share: MemoryBudget
) -> list[Task]:
    """A task for each shard of an index whose file has members, numbered from `first`."""
    names, members = set(plan.names), settings.work / MEMBERS
    tasks = []
    for number, shard in enumerate((shard for shard in shards if shard.file in names), first):
        output = fetched_path(settings.work, number)
        arguments = {
            "shard": shard, "number": number, "span": plan.span(shard.file), "members": members, "output": output,
            "budget": share,
        }  # fmt: skip
        outputs = (output, output.with_suffix(".text"))
        tasks.append(Task(f"signatures {number}", fetch_signatures, arguments, (shard.path, members), outputs))
    return tasks


def _check_files(
    settings: RemovalSettings, plan: MemberPlan, files: list[CorpusFile], shards: list[SignatureShard]
) -> None:
    """UsageError if clusters name a file that is neither in the corpus nor in an index."""
    known = {file.name for file in files} | {shard.file for shard in shards}
    unknown = sorted(set(plan.names) - known)
    indexed = [name for name in unknown if is_of_index(name)]
    if indexed and settings.check:
        raise UsageError(
            f"{settings.input_file} holds documents of an index, such as those of {indexed[0]!r}: give --index as "
            "generate_connected_components was given it, to compare them by their signatures"
        )
    if missing := [name for name in unknown if not is_of_index(name)]:
        raise UsageError(
            f"{settings.input_file} names {len(missing):,} files that --corpus does not have, {missing[0]!r} the "
            f"first; it has {files[0].name!r}, for example. Give the folder whose files were signed: names "
            "start with the source"
        )


def _check_signatures(plan: MemberPlan, fetched: Counts) -> None:
    """UsageError if the indexes lack documents that clusters name."""
    spans = map(plan.span, filter(is_of_index, plan.names))
    named = sum(last - first for first, last in spans)
    found = sum(fetched.total(CLUSTERED, source).documents for source in fetched.tallies if is_of_index(source))
    if found != named:
        raise UsageError(
            f"--index holds signatures of {found:,} of the {named:,} documents that clusters name: give the folders "
            "that generate_connected_components was given"
        )


def decide(settings: RemovalSettings, plan: MemberPlan, slices: int, options: RunOptions) -> Counts:
    """Run the step decide on the texts that the step fetch copied from `slices` slices: a task for each part."""
    work = settings.work
    fetched = work / f"{_FETCH}.jsonl"  # the ledger is the input: it grows whenever a slice is fetched again
    inputs = (work / PLAN, *([fetched] if slices else []))
    tasks = []
    for output, (low, high) in zip(_decided_paths(work, plan), pairwise([*plan.parts, None]), strict=True):
        arguments = {
            "work": work, "slices": slices, "low": low, "high": high, "check": settings.check, "output": output,
            "budget": MemoryBudget(options.memory_bytes // options.processes),
        }  # fmt: skip
        tasks.append(Task(output.stem, decide_part, arguments, inputs, (output, output.with_suffix(".json"))))
    return run_stage("decide", tasks, work, options, summary=False)


def _decided_paths(work: Path, plan: MemberPlan) -> list[Path]:
    return [work / "decided" / f"{number:06}.bin" for number in range(len(plan.parts))]


def plan_write(
    settings: RemovalSettings, files: list[CorpusFile], shards: list[SignatureShard], options: RunOptions
) -> Task:
    """Plan the step write.

    Its inputs are the files that all steps read, so that it is redone if any of them changes.
    """
    outputs = tuple(dict.fromkeys([settings.out_file, settings.out_file.with_suffix(".parquet")]))
    inputs = (*settings.inputs, *(file.path for file in files), *(shard.path for shard in shards))
    size = settings.input_file.stat().st_size if settings.input_file.is_file() else 0
    arguments = {"settings": settings, "budget": MemoryBudget(options.memory_bytes)}
    function = write_decided if settings.reads_corpus else write_by_key
    return Task("write", function, arguments, inputs, outputs, size)


def write_decided(settings: RemovalSettings, budget: MemoryBudget) -> Counts:
    """Task: write the outputs from the decisions in the work folder."""
    plan, counts = MemberPlan.load(settings.work), Counts({}, [])
    decided = _decided_paths(settings.work, plan)
    for path in decided:
        counts.merge(msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=Counts))
    found = chain.from_iterable(read_records(path, REMOVAL, ROW_GROUP_SIZE) for path in decided)
    write_removals(settings.out_file, plan.names, found, _runs(settings, "removals"), budget)
    return counts


def write_by_key(settings: RemovalSettings, budget: MemoryBudget) -> Counts:
    """Task: write the outputs from the clusters alone, whose documents are ordered by their keys and sources."""
    clusters = Clusters.open(settings.input_file)
    counts = RemovalCounts(clusters.names)
    order = KeepOrder(clusters.names, settings.keep, [read_keys(path, clusters.names) for path in settings.dropped])
    blocks, runs = map(order.assign, clusters.blocks()), _runs(settings, "removals")
    if order.is_input_order:
        write_removals(settings.out_file, clusters.names, remove_all_but_first(blocks, counts), runs, budget)
    else:
        with ExternalSorter(_runs(settings, "order"), MEMBER, KEEP_ORDER, budget // 2) as sorter:
            for block in blocks:
                sorter.add(block)
            removals = remove_all_but_first(sorter, counts)
            write_removals(settings.out_file, clusters.names, removals, runs, budget // 2)
    return counts.counts()


def _runs(settings: RemovalSettings, name: str) -> Path:
    """A folder for the runs of an external sort."""
    return settings.out_file.parent / STATE_DIR / f"{NAME}-{settings.out_file.name}-{name}.runs"
