"""Steps that cut a corpus into slices, and groups of small slices: a task reads neither too much nor too little."""

import hashlib
from collections.abc import Iterable, Sequence

from gristmill.counts import Counts
from gristmill.engine.run import StageRun
from gristmill.engine.task import Result, Task
from gristmill.io import readers
from gristmill.io.documents import CorpusFile
from gristmill.io.readers import Slice, find_cuts, is_cut, slices_at

SMALL_BYTES = 256 << 10  # smaller slices are grouped
GROUP_BYTES = 4 << 20  # a group is not larger: enough tasks are left for all workers
_GROUP_FILES = 256  # in a group, on average

SliceGroup = tuple[Slice, ...]


def cut_corpus(run: StageRun, files: Sequence[CorpusFile]) -> list[Slice]:
    """The slices of all files, in order; the tasks of the step `cut` find where large files are cut."""
    large = [file for file in files if is_cut(file)]
    found = run.step("cut", [_cut_task(file) for file in large]) if large else None
    cuts = dict(zip((file.name for file in large), found.values(list[tuple[int, int]]), strict=True)) if found else {}
    return [part for file in files for part in slices_at(file, cuts.get(file.name, [(0, 0)]))]


def group_slices(slices: Iterable[Slice]) -> list[SliceGroup]:
    """Gather consecutive small files of one source, so that 10,000 tiny files do not make 10,000 tasks.

    Parts of a larger file stay alone. Where a group ends depends on its file names and sizes, and mostly on its last:
    a new file in the corpus changes its own group, or a few after it.
    """
    groups: list[list[Slice]] = []
    left, is_open = 0, False
    for part in slices:
        is_small = part.size < SMALL_BYTES and part.start == 0 and part.end is None
        if is_open and is_small and part.size <= left and part.source == groups[-1][-1].source:
            groups[-1].append(part)
        else:
            groups.append([part])
            left = GROUP_BYTES
        left -= part.size
        is_open = is_small and not _ends_group(part.name)
    return [tuple(group) for group in groups]


def _ends_group(name: str) -> bool:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little") % _GROUP_FILES == 0


def _cut_task(file: CorpusFile) -> Task:
    arguments = {"file": file, "slice_bytes": readers.SLICE_BYTES}
    return Task(file.name, cut_file, arguments, size=file.size)


def cut_file(file: CorpusFile, slice_bytes: int) -> Result:
    """Task: find where the slices of a file start, as (byte or row group, row)."""
    return Result(Counts({}, []), find_cuts(file, slice_bytes))
