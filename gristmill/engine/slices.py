"""Steps that cut a corpus into slices and read them; small slices are grouped, and damaged files are left out."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from gristmill.counts import WORKER_DIED, Counts, Damage
from gristmill.engine.execution.worker_deaths import READING, note_place, rows_of_deaths, times_suspected
from gristmill.engine.run import StageRun
from gristmill.engine.staleness.lineage import is_hash, writer_of
from gristmill.engine.staleness.records import StepResult
from gristmill.engine.task import Result, Task
from gristmill.errors import DamagedFile, InputError
from gristmill.io import readers
from gristmill.io.documents import ONE_SLICE, CorpusFile, Slice, SliceStart, slices_at
from gristmill.io.readers import find_cuts, is_cut, read_corpus

SMALL_BYTES = 256 << 10  # smaller slices are grouped
GROUP_BYTES = 4 << 20  # a group is not larger: enough tasks are left for all workers
_GROUP_FILES = 256  # in a group, on average
_CHECK = "check"  # name of the step that reads files to their end of which a slice is damaged

SliceGroup = tuple[Slice, ...]
_Rest = ParamSpec("_Rest")
_Result = TypeVar("_Result")


def cut_corpus(run: StageRun, files: Sequence[CorpusFile]) -> list[Slice]:
    """Return the slices of all files, as cut_raw_corpus. Raises DamagedFile if one that must be cut is damaged."""
    slices = cut_raw_corpus(run, files)
    for part in slices:
        if part.damage:
            raise DamagedFile(part.path, *part.damage)
    return slices


def cut_raw_corpus(run: StageRun, files: Sequence[CorpusFile]) -> list[Slice]:
    """Return the slices of all files, in order; slices of damaged files, if that is known, are marked for read_slices.

    The tasks of the step `cut` find where large files are cut. Stages write a frame of .zst for each slice that they
    read, so what they wrote can be cut again.
    """
    large = [file for file in files if is_cut(file, has_frames=is_hash(run.tag(file.path)))]
    cuts = dict[str, list[SliceStart]]()
    damaged = dict[str, Damage]()
    if large:
        tasks = list[Task]()
        for file in large:
            arguments = {"file": file, "slice_bytes": readers.SLICE_BYTES}
            tasks.append(Task(file.name, find_slices, arguments, size=file.size))
        starts = run.step("cut", tasks)
        known_to_be_damaged = [file for file in large if run.has_run(_CHECK, file.name)]
        checked = run.step(_CHECK, [_check_task(file) for file in known_to_be_damaged])
        damaged = starts.counts.damaged | checked.counts.damaged
        cuts = {file.name: file_cuts for file, file_cuts in zip(large, starts.values(list[SliceStart]), strict=True)}
    slices = list[Slice]()
    for file in files:
        for part in slices_at(file, cuts.get(file.name, ONE_SLICE)):
            slices.append(_mark(part, damaged.get(part.name)))
    return slices


def read_slices(
    run: StageRun, step: str, slices: Sequence[Slice], plan: Callable[[list[SliceGroup]], Iterable[Task]]
) -> StepResult:
    """Run a step of tasks that `plan` makes of groups of slices, and that leave out damaged files of raw corpora.

    Where a slice of a large file turns out to be damaged, the tasks of all its slices run again, without it. Raises
    InputError if a stage wrote a damaged file.
    """
    done = run.step(step, plan(group_slices(slices)))
    damaged = done.counts.damaged
    _reject_written(slices, damaged)
    checks = dict[str, Task]()  # of files that were read in pieces, by name
    damage_of = dict[str, Damage]()
    for part in slices:
        if part.name in damaged and is_piece(part) and not part.damage:
            checks[part.name] = _check_task(part)
            damage_of[part.name] = damaged[part.name]
    if not checks:
        return done
    checked = run.step(_CHECK, checks.values())
    damage_of |= checked.counts.damaged
    marked = [_mark(part, damage_of.get(part.name)) for part in slices]
    return run.step(step, plan(group_slices(marked)))


def is_piece(part: Slice) -> bool:
    """Return whether a slice is only a part of its file."""
    return part.start > 0 or part.end is not None


def leaves_out_damaged(
    function: Callable[Concatenate[SliceGroup, _Rest], _Result],
) -> Callable[Concatenate[SliceGroup, _Rest], _Result]:
    """Make a task's function start over without the files of its group that are damaged.

    It is called again with the same slices, of which the damaged ones are marked and have no documents.
    """

    @wraps(function)
    def work(group: SliceGroup, *arguments: _Rest.args, **named: _Rest.kwargs) -> _Result:
        try:
            return function(group, *arguments, **named)
        except DamagedFile as error:
            if error.path not in {part.path for part in group}:
                raise
            marked = list[Slice]()
            for part in group:
                if part.path == error.path:
                    damage: Damage | None = _describe(error)
                else:
                    damage = _find_damage(part)
                marked.append(_mark(part, damage))
        return function(tuple(marked), *arguments, **named)

    return work


def group_slices(slices: Iterable[Slice]) -> list[SliceGroup]:
    """Gather consecutive small files of one source, so that 10,000 tiny files do not make 10,000 tasks.

    Parts of a larger file stay alone. Where a group ends depends on its file names and sizes, and mostly on its last:
    a new file in the corpus changes its own group, or a few after it.
    """
    groups: list[list[Slice]] = []
    left = 0
    is_open = False
    for part in slices:
        is_small = part.size < SMALL_BYTES and not is_piece(part)
        if is_open and is_small and part.size <= left and part.source == groups[-1][-1].source:
            groups[-1].append(part)
        else:
            groups.append([part])
            left = GROUP_BYTES
        left -= part.size
        name_hash = hashlib.blake2b(part.name.encode(), digest_size=4).digest()
        is_open = is_small and int.from_bytes(name_hash, "little") % _GROUP_FILES > 0
    return [tuple(group) for group in groups]


def find_slices(file: CorpusFile, slice_bytes: int) -> Result:
    """Task: find where the slices of a file start; one slice if it is damaged."""
    try:
        return Result(Counts({}, []), find_cuts(file, slice_bytes))
    except DamagedFile as error:
        return Result(Counts({}, [], {file.name: _describe(error)}), ONE_SLICE)


def _check_task(file: CorpusFile | Slice) -> Task:
    part = Slice(file.path, file.name, text_column=file.text_column, reading=file.reading)
    return Task(file.name, check_file, {"part": part}, size=file.size, sets_aside=True)


def check_file(part: Slice) -> Counts:
    """Task: read a file to its end; the counts say whether it is damaged."""
    damage = _find_damage(part)
    damaged = dict[str, Damage]()
    if damage:
        damaged[part.name] = damage
    return Counts({}, [], damaged)


def _find_damage(part: Slice) -> Damage | None:
    """Read the file of a slice to its end; return what is wrong with it, None if nothing is."""
    try:
        note_reading(part)
        deque(read_corpus(part.path, part.text_column, on_malformed="skip", reading=part.reading), maxlen=0)
    except DamagedFile as error:
        return _describe(error)
    return None


def note_reading(part: Slice) -> None:
    """Note that a slice is read. Raises DamagedFile if workers died of reading it, the last time alone."""
    how = rows_of_deaths(part.label).get(READING)
    if how is not None:
        raise DamagedFile(
            part.path, f"{WORKER_DIED} of reading it",
            f"a worker process died while it was read ({how}). Fix it, or remove it to continue without it.",
        )  # fmt: skip
    note_place(part.label, READING, is_alone=times_suspected(part.label, READING) > 0)


def _describe(error: DamagedFile) -> Damage:
    return Damage(str(error.path), error.fault, error.detail)


def _mark(part: Slice, damage: Damage | None) -> Slice:
    """Return the slice, marked if its file is damaged."""
    if damage is None:
        return part
    return replace(part, damage=(damage.fault, damage.detail))


def _reject_written(slices: Sequence[Slice], damaged: dict[str, Damage]) -> None:
    """Raise InputError if a stage wrote one of the damaged files: what is lost there must be written again."""
    for part in slices:
        if part.name not in damaged:
            continue
        stage = writer_of(part.path)
        if stage:
            detail = damaged[part.name].detail
            raise InputError(
                f"{part.path} is damaged, and {stage} wrote it: {detail} It is not raw input, so it is not left out: "
                f"remove it, run {stage} again, which writes it, then this command"
            )
