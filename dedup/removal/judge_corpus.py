"""Removals that take a look at the documents: the tasks that gather them, part them by cluster, and judge them."""

import time
from dataclasses import dataclass
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

from dedup.candidates.document_ids import is_of_index
from dedup.candidates.input_shards import SignatureShard
from dedup.removal.gather import (
    CLUSTERED,
    INDEXED_MEMBERS,
    MEMBERS,
    PLAN,
    UNREADABLE,
    WITHOUT,
    Plan,
    gather_signatures,
    gather_slice,
    gathered_path,
    members_of,
    sort_members,
)
from dedup.removal.judging import Verification, judge_part
from dedup.removal.keeping import Keep, Newest
from dedup.removal.removals import DUPLICATE, SPARED
from gristmill.counts import READ, Counts
from gristmill.engine.stage import MemoryBudget, RunOptions, Task, run_stage
from gristmill.errors import UsageError
from gristmill.io.documents import CorpusFile
from gristmill.io.readers import plan_slices

GATHER = "gather"
DIGEST = 12  # characters that tell the work of one set of options from that of another


@dataclass(frozen=True)
class Settings:
    """What is asked for."""

    input_file: Path
    out_file: Path
    keep: Keep
    dropped: tuple[Path, ...]
    verification: Verification | None

    @property
    def digest(self) -> str:
        return sha256(repr(self).encode()).hexdigest()[:DIGEST]

    @property
    def inputs(self) -> tuple[Path, ...]:
        """Those that are there: a task says what is wrong with the others."""
        return tuple(path for path in (self.input_file, *self.dropped) if path.is_file())


@dataclass(frozen=True)
class Sources:
    """Where the members of clusters stand: in our corpus, in an index."""

    files: list[CorpusFile]
    shards: list[SignatureShard]


def judged_parts(plan: Plan, work: Path) -> list[Path]:
    return [work / "judged" / f"{number:06}.bin" for number, _ in enumerate(plan.cuts)]


def gather_and_judge(settings: Settings, sources: Sources, work: Path, options: RunOptions) -> str:
    """Run what comes before the last task, and return what there is to say about it."""
    start = time.perf_counter()
    outputs = (work / MEMBERS, work / INDEXED_MEMBERS, work / PLAN)
    sort = {"input_file": settings.input_file, "keep": settings.keep, "dropped": settings.dropped, "folder": work}
    budget = {"budget": MemoryBudget(options.memory_bytes)}
    run_stage(
        "sort", [Task("sort", sort_members, sort | budget, settings.inputs, outputs)], work, options, summary=False
    )
    plan = Plan.load(work)
    _check_names(settings, plan, sources)
    share = MemoryBudget(options.memory_bytes // options.processes)
    gather = _gather_tasks(settings, plan, sources.files, work, share)
    gather += _index_tasks(plan, sources.shards, len(gather), work, share)
    gathered = run_stage(GATHER, gather, work, options, summary=False)
    if settings.verification:
        _check_signatures(plan, gathered)
    judged = run_stage("judge", _judge_tasks(settings, plan, len(gather), work, share), work, options, summary=False)
    return _say(settings, gathered, judged, time.perf_counter() - start)


def _gather_tasks(
    settings: Settings, plan: Plan, files: list[CorpusFile], work: Path, share: MemoryBudget
) -> list[Task]:
    """A task for every slice of a file that has members."""
    tasks: list[Task] = []
    wanted = set(plan.names)
    for file in files:
        slices = plan_slices(file) if file.name in wanted else []
        for part, following in zip(slices, [*slices[1:], None], strict=bool(slices)):
            output = gathered_path(work, len(tasks))
            arguments = {
                "part": part, "number": len(tasks), "places": members_of(part, following, plan, work / MEMBERS),
                "members": work / MEMBERS, "keep": settings.keep, "has_texts": settings.verification is not None,
                "output": output, "budget": share,
            }  # fmt: skip
            inputs, outputs = (Path(part.path), work / MEMBERS), (output, output.with_suffix(".text"))
            tasks.append(Task(part.label, gather_slice, arguments, inputs, outputs, part.size))
    return tasks


def _index_tasks(plan: Plan, shards: list[SignatureShard], first: int, work: Path, share: MemoryBudget) -> list[Task]:
    """A task for every shard of an index that may have members."""
    wanted = set(plan.names)
    tasks = []
    for number, shard in enumerate((shard for shard in shards if shard.file in wanted), first):
        output = gathered_path(work, number)
        arguments = {
            "shard": shard, "number": number, "places": plan.places(shard.file), "members": work / MEMBERS,
            "output": output, "budget": share,
        }  # fmt: skip
        inputs, outputs = (shard.path, work / MEMBERS), (output, output.with_suffix(".text"))
        tasks.append(Task(f"signatures {number}", gather_signatures, arguments, inputs, outputs))
    return tasks


def _judge_tasks(settings: Settings, plan: Plan, slices: int, work: Path, share: MemoryBudget) -> list[Task]:
    gathered = work / f"{GATHER}.jsonl"  # the ledger grows with everything that is gathered anew
    inputs = (work / PLAN, *([gathered] if slices else []))
    tasks = []
    for output, (low, high) in zip(judged_parts(plan, work), pairwise([*plan.cuts, None]), strict=True):
        arguments = {
            "folder": work, "slices": slices, "low": low, "high": high, "how": settings.verification,
            "output": output, "budget": share,
        }  # fmt: skip
        tasks.append(Task(output.stem, judge_part, arguments, inputs, (output, output.with_suffix(".json"))))
    return tasks


def _check_names(settings: Settings, plan: Plan, sources: Sources) -> None:
    """UsageError where clusters name a file that is neither in the corpus nor in an index."""
    known = {file.name for file in sources.files} | {shard.file for shard in sources.shards}
    unknown = sorted(set(plan.names) - known)
    indexed = [name for name in unknown if is_of_index(name)]
    if indexed and settings.verification:
        raise UsageError(
            f"{settings.input_file} holds documents of an index, such as those of {indexed[0]!r}: give --index as "
            "generate_connected_components was given it, to compare them by their signatures"
        )
    if strangers := [name for name in unknown if not is_of_index(name)]:
        raise UsageError(
            f"{settings.input_file} names {len(strangers):,} files that --corpus does not have, {strangers[0]!r} the "
            f"first; it has {sources.files[0].name!r}, for example. Give the folder whose files were signed: names "
            "start with the source"
        )


def _check_signatures(plan: Plan, gathered: Counts) -> None:
    """UsageError where the indexes lack documents that clusters name."""
    places = map(plan.places, filter(is_of_index, plan.names))
    wanted = sum(last - first for first, last in places)
    found = sum(gathered.total(CLUSTERED, source).documents for source in gathered.tallies if is_of_index(source))
    if found != wanted:
        raise UsageError(
            f"--index holds signatures of {found:,} of the {wanted:,} documents that clusters name: give the folders "
            "that generate_connected_components was given"
        )


def _say(settings: Settings, gathered: Counts, judged: Counts, seconds: float) -> str:
    """What the policy did not find, and what verification cost and gained."""
    lines = []
    missing, unreadable = gathered.total(WITHOUT).documents, gathered.total(UNREADABLE).documents
    if isinstance(settings.keep, Newest) and (missing or unreadable):
        lines.append(
            f"note: {settings.keep.field} is missing in {missing:,} of {judged.total(READ).documents:,} documents, and "
            f"neither a number nor a date in {unreadable:,}; they come last. {'; '.join(gathered.examples)}"
        )  # fmt: skip
    if settings.verification:
        confirmed, spared = judged.total(DUPLICATE).documents, judged.total(SPARED).documents
        text = sum(gathered.total(reason).bytes for reason in (CLUSTERED, WITHOUT, UNREADABLE))
        lines.append(
            f"verified {confirmed + spared:,} candidates: {confirmed:,} confirmed, {spared:,} spared; "
            f"read {text / 1e6:,.1f} MB of text in {seconds:.1f} s"
        )
    return "".join(f"{line}\n" for line in lines)
