"""The stage `choose_by_score` of a run: list the documents whose scores are too low, from facts. No text is read."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from math import floor
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gristmill.batches import batched
from gristmill.console import wide_console
from gristmill.counts import READ, Counts
from gristmill.engine.facts import count_files, list_facts, plan_facts
from gristmill.engine.key_sets import merge_task
from gristmill.engine.options import RunOptions
from gristmill.engine.run import StageRun, open_stage
from gristmill.engine.staleness.ledger import Ledger, run_name
from gristmill.engine.staleness.records import StepResult
from gristmill.engine.task import FileSet, Result, Stage, Task
from gristmill.errors import InputError
from gristmill.io.artefacts import is_table
from gristmill.io.documents import source_of
from gristmill.io.external_sort import ExternalSorter
from gristmill.io.facts import paths_of_facts, written_by_file
from gristmill.io.files import STATE_DIR
from gristmill.io.keys import KeyBlocks, write_keys
from gristmill.storage.files import read_file
from gristmill.storage.local import atomic_write_bytes
from preprocessing.scoring.score_choice import Choice, Cut, Cuts, ScoreBands, is_kept
from preprocessing.scoring.score_ranks import GRID, ScoreRanks
from preprocessing.scoring.score_statistics import ScoreSums, join_sums, score_table
from preprocessing.steps.text_digest import TEXT_DIGEST

STAGE = Stage("choose_by_score", version=4, libraries=("pyarrow",))
KEPT = "kept"
_FIND = "find"  # the step whose tasks look at all scores
_FACTS_FILES = 64  # read by one task
_SCORE = np.dtype([("group", "<u4"), ("score", "<f4")])


def list_low_scores(
    facts_dir: Path,
    output_file: Path,
    choices: Sequence[Choice],
    options: RunOptions = RunOptions(),
    bands_file: Path | None = None,
    stage: Stage = STAGE,
) -> tuple[Counts, list[Cut]]:
    """List the documents that one of the choices does not keep.

    Args:
        facts_dir: Folder of facts that a pass wrote whose steps noted the scores.
        output_file: The key set, .pickle or .parquet.
        choices: What is kept, by score; a document goes by the first that does not keep it.
        options: Workers, memory, and when to stop; they change no output.
        bands_file: The file to write, .json, of the limits between the bands that a choice has, for the mix.
        stage: The name under which records are kept, where a run chooses twice.

    Returns:
        Documents read, kept and left out by each score, per source; and the limits that quantiles give.
    """
    is_table(output_file)  # raises for an unknown suffix now, before the work
    choices = tuple(choices)
    reads = {facts_dir: list_facts(facts_dir)}
    with open_stage(
        stage,
        output_file.parent,
        options,
        reads=reads,
        files=[output_file, *([bands_file] if bands_file else [])],
        label=output_file.name,
    ) as run:
        files = plan_facts(run, facts_dir)
        paths = paths_of_facts(facts_dir, files)
        ranks = _find_ranks(run, FileSet(tuple(paths)), choices)
        cuts = _find_cuts(run, FileSet(tuple(paths)), choices, ranks)
        tasks = list[Task]()
        for bundle in batched(paths, count=_FACTS_FILES):
            name = bundle[0].relative_to(facts_dir).as_posix()
            output = run.ledger.root / STATE_DIR / run.output / f"{name}.low.parquet"
            arguments = {
                "facts": FileSet(tuple(bundle)), "choices": choices, "cuts": cuts, "ranks": ranks, "output": output,
            }  # fmt: skip
            tasks.append(Task(name, find_low_rows, arguments, (output,)))
        listed = run.step(_FIND, tasks)
        run.step("merge", [merge_task(listed.paths(), output_file, options.memory_bytes)])
        banded = [choice for choice in choices if choice.bands]
        if bands_file:
            sources = sorted(listed.counts.tallies)
            arguments = {"choice": banded[0], "cuts": cuts, "sources": sources, "ranks": ranks, "output": bands_file}
            run.step("bands", [Task("bands", write_bands, arguments, (bands_file,))])
        read = run.note("files that are read", count_files(files))
        counts = run.finish(listed.counts.merge(read))
    if run.ran and not options.quiet:
        joined = join_sums(listed.joined_values(ScoreSums))
        limits = Cuts(cuts)
        kept: dict[tuple[str, str], float] = {}
        for choice in choices:
            for source in joined.get(choice.name, {}):
                kept[choice.name, source] = limits.limit(choice, source)
        wide_console().print(score_table(joined, kept))
    return counts, cuts


def _find_ranks(run: StageRun, facts: FileSet, choices: Sequence[Choice]) -> Path | None:
    """Return the file of the ranks that ensembles need; None without ensembles."""
    members = dict[tuple[str, bool], None]()  # in order, each once
    for choice in choices:
        for fact in choice.members:
            members[fact, choice.of_all] = None
    if not members:
        return None
    tasks = list[Task]()
    for number, (fact, of_all) in enumerate(members):
        output = run.work / "ranks" / f"{number}.json"
        member = Choice(fact, fact, of_all=of_all)
        arguments = {"facts": facts, "choice": member, "output": output}
        tasks.append(Task(f"{fact} {number}", find_quantiles, arguments, (output,), memory=run.options.memory_bytes))
    run.step("ranks of members", tasks)
    output = run.work / "ranks.json"
    joining = {"members": FileSet(tuple(task.outputs[0] for task in tasks)), "output": output}
    run.step("ranks", [Task("ranks", join_ranks, joining, (output,))])
    return output


def join_ranks(members: FileSet, output: Path) -> None:
    """Task: write the ranks of all groups, from the limits of each member."""
    limits = defaultdict[str, dict[str, list[float]]](dict)
    for path in members.paths:
        for cut in msgspec.json.decode(path.read_bytes(), type=list[Cut]):
            limits[cut.group].setdefault(cut.name, []).append(cut.limit)
    atomic_write_bytes(output, msgspec.json.encode(ScoreRanks.of(limits)))


def _read_ranks(path: Path | None) -> ScoreRanks | None:
    return msgspec.json.decode(read_file(path), type=ScoreRanks) if path else None


def _find_cuts(run: StageRun, facts: FileSet, choices: Sequence[Choice], ranks: Path | None) -> list[Cut]:
    """Return the limits of all groups, for the choices by a quantile."""
    tasks = list[Task]()
    for number, choice in enumerate(choices):
        if choice.quantiles:
            output = run.work / "cuts" / f"{number}.json"
            arguments = {"facts": facts, "choice": choice, "ranks": ranks, "output": output}
            tasks.append(Task(choice.name, find_cuts, arguments, (output,), memory=run.options.memory_bytes))
    return run.step("cuts", tasks).joined_values(Cut)


def find_quantiles(facts: FileSet, choice: Choice, output: Path, memory: int) -> None:
    """Task: write the limits of each group at the quantiles GRID, by which documents are ranked."""
    with _open_sorter(output, memory) as sorter:
        cuts = _cuts_at(GRID, facts, choice, None, sorter)
    atomic_write_bytes(output, msgspec.json.encode(cuts))


def find_cuts(facts: FileSet, choice: Choice, ranks: Path | None, output: Path, memory: int) -> Result:
    """Task: write the limit of each group that each quantile of a choice gives; the value is the same."""
    with _open_sorter(output, memory) as sorter:
        cuts = _cuts_at(choice.quantiles, facts, choice, ranks, sorter)
    atomic_write_bytes(output, msgspec.json.encode(cuts))
    return Result(Counts({}, []), msgspec.to_builtins(cuts))


def _open_sorter(output: Path, memory: int) -> ExternalSorter:
    return ExternalSorter(output.with_name(f"{output.name}.sorted"), _SCORE, ("group", "score"), memory // 2)


def _cuts_at(
    quantiles: Sequence[float], facts: FileSet, choice: Choice, ranks: Path | None, sorter: ExternalSorter
) -> list[Cut]:
    """Return the limit of each group that each quantile gives, as NumPy computes it from all its scores."""
    known_ranks = _read_ranks(ranks)
    numbers: dict[str, int] = {}
    sizes = list[int]()
    for path in facts.paths:
        for name, rows in written_by_file(path, choice.facts):
            number = numbers.setdefault(choice.group(source_of(name)), len(numbers))
            if number == len(sizes):
                sizes.append(0)
            sizes[number] += rows.num_rows
            records = np.empty(rows.num_rows, _SCORE)
            records["group"] = number
            records["score"] = _scores(rows, choice, source_of(name), known_ranks, path)
            sorter.add(records)
    starts = np.cumsum([0, *sizes])[:-1].tolist()
    positions = set[int]()
    for start, size in zip(starts, sizes, strict=True):
        for quantile in quantiles:
            positions.update(_neighbours(start, size, quantile))
    scores = _scores_at(sorter, sorted(positions))
    cuts = list[Cut]()
    for group, number in numbers.items():
        for quantile in quantiles:
            rank = (sizes[number] - 1) * quantile
            lower, upper = _neighbours(starts[number], sizes[number], quantile)
            both = np.array([scores[lower], scores[upper]])
            limit = float(np.quantile(both, rank - floor(rank)))
            cuts.append(Cut(choice.name, group, quantile, limit))
    return cuts


def _neighbours(start: int, size: int, quantile: float) -> tuple[int, int]:
    """Return the positions of the two scores between which a quantile lies, of `size` ascending ones from `start`."""
    rank = floor((size - 1) * quantile)
    return start + rank, start + min(rank + 1, size - 1)


def _scores_at(sorter: ExternalSorter, positions: Sequence[int]) -> dict[int, float]:
    """Return the scores at some positions, ascending, of the sorted records."""
    scores: dict[int, float] = {}
    start = 0
    first = 0  # of the positions that are not read yet
    for block in sorter:
        stop = start + len(block)
        end = bisect_left(positions, stop, first)
        for position in positions[first:end]:
            scores[position] = float(block["score"][position - start])
        start = stop
        first = end
    return scores


def find_low_rows(
    facts: FileSet, choices: tuple[Choice, ...], cuts: list[Cut], ranks: Path | None, output: Path
) -> Result:
    """Task: write the keys of the documents in some files of facts that one of the choices does not keep.

    The value is how their scores are distributed: a list of ScoreSums.
    """
    counts = Counts({}, [])
    low = KeyBlocks()
    limits = Cuts(cuts)
    sums: dict[tuple[str, str], ScoreSums] = {}
    known_ranks = _read_ranks(ranks)
    scores_read = dict[str, None]()  # in order
    has_curve = False
    for choice in choices:
        scores_read |= dict.fromkeys(choice.facts)
        has_curve |= bool(choice.keep)
    columns = list(scores_read)
    if has_curve:
        columns.append(TEXT_DIGEST[0])
    for path in facts.paths:
        for name, rows in written_by_file(path, ("bytes", *columns)):
            source = source_of(name)
            sizes = rows["bytes"].to_numpy()
            left = np.ones(rows.num_rows, np.bool_)
            digests = np.empty(0, np.uint64)
            if has_curve:
                digests = rows[TEXT_DIGEST[0]].to_numpy()
            counts.add(source, READ, int(sizes.sum()), rows.num_rows)
            for choice in choices:
                scores = _scores(rows, choice, source, known_ranks, path)
                of_source = sums.setdefault((choice.name, source), ScoreSums(choice.name, source))
                of_source.add(scores, sizes)
                limit = limits.limit(choice, source)
                if np.isfinite(limit):
                    of_source.add_near(limit, scores, name, rows["row"].to_numpy())
                is_low = left & ~is_kept(choice, limits, source, scores, digests)
                left &= ~is_low
                if is_low.any():
                    counts.add(source, choice.reason, int(sizes[is_low].sum()), int(is_low.sum()))
            if left.any():
                counts.add(source, KEPT, int(sizes[left].sum()), int(left.sum()))
            low.add(name, rows["row"].to_numpy()[~left])
    write_keys(output, low.join())
    return Result(counts, msgspec.to_builtins(list(sums.values())))


def read_score_sums(output_file: Path, stage: Stage = STAGE) -> dict[str, dict[str, ScoreSums]]:
    """Return how the scores are distributed that a key set was made of, by score and source, as was recorded."""
    ledger = Ledger(output_file.parent / STATE_DIR, run_name(stage.name, output_file.name))
    records = [record for record in ledger.read().values() if record.step == _FIND]
    return join_sums(StepResult(records, ledger.root).joined_values(ScoreSums))


def write_bands(choice: Choice, cuts: list[Cut], sources: list[str], ranks: Path | None, output: Path) -> None:
    """Task: write the bands of a score, the limits between them, and the ranks that an ensemble is made of."""
    bands = ScoreBands.of(choice, Cuts(cuts), sources, _read_ranks(ranks))
    atomic_write_bytes(output, msgspec.json.encode(bands))


def _scores(rows: pa.Table, choice: Choice, source: str, ranks: ScoreRanks | None, path: Path) -> NDArray[np.float32]:
    """Return the score (n) of each document of a source that a choice is made by."""
    noted = {fact: _noted(rows, fact, path) for fact in choice.facts}
    if not choice.members:
        return noted[choice.fact]
    assert ranks is not None
    return ranks.groups[choice.group(source)].mean(noted)


def _noted(rows: pa.Table, fact: str, path: Path) -> NDArray[np.float32]:
    column = rows.column(fact)
    if column.null_count:
        raise InputError(f"{path} has documents without the score {fact}: expected one for each; run prepare again")
    scores: NDArray[np.float32] = column.to_numpy()
    return scores
