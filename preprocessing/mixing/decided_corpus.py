"""The corpus of a mix, cut into slices that are read together with the decisions on their documents."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np

from gristmill.engine.slices import SliceGroup
from gristmill.engine.task import FileSet
from gristmill.errors import InputError
from gristmill.io.documents import CorpusFile, Slice, names_of
from gristmill.io.files import list_finished
from preprocessing.mixing.decisions import DecidedFile, load_decisions
from preprocessing.mixing.mix_manifest import MixManifest

_NO_END = 1 << 62  # row after the last slice of a file, whose rows are not counted


@dataclass(frozen=True)
class GroupDecisions:
    """The files with the decisions on the documents of a group of slices, and the row after the last of each slice."""

    files: FileSet
    ends: tuple[int, ...]

    def load(self, group: SliceGroup) -> Iterator[tuple[Slice, DecidedFile]]:
        """Yield each slice that has documents in the mix, and the decisions on them. InputError for a damaged file."""
        names = set(names_of(group))
        by_file = defaultdict[str, list[DecidedFile]](list)
        for path in self.files.paths:
            for name, decided in load_decisions(path).items():
                if name in names:
                    by_file[name].append(decided)
        for part, end in zip(group, self.ends, strict=True):
            pieces = list[DecidedFile]()
            for decided in by_file[part.name]:
                piece = decided.between(part.first_row, end)
                if len(piece.rows):
                    pieces.append(piece)
            if pieces:
                yield part, _join(pieces)


def _join(pieces: Sequence[DecidedFile]) -> DecidedFile:
    """Return the decisions on consecutive rows of one file, which are in several files of decisions, as one."""
    return DecidedFile(
        pieces[0].name,
        rows=np.concatenate([piece.rows for piece in pieces]),
        copies=np.concatenate([piece.copies for piece in pieces]),
        sizes=np.concatenate([piece.sizes for piece in pieces]),
        bands=np.concatenate([piece.bands for piece in pieces]),
    )


def find_decisions(groups: Sequence[SliceGroup], manifest: MixManifest, mix_dir: Path) -> list[GroupDecisions]:
    """Return the decisions on each group of slices; the groups have the slices of all files of a corpus, in order."""
    slices = list[Slice]()
    for group in groups:
        slices += group
    ends = dict[str, int]()  # by label
    for part, following in zip_longest(slices, slices[1:]):
        ends[part.label] = _NO_END
        if following and following.name == part.name:
            ends[part.label] = following.first_row
    decisions_of = dict[str, list[tuple[int, int, Path]]]()
    for file in manifest.files:
        for written in file.slices:
            decisions_of.setdefault(written.file, []).append((written.first, written.end, mix_dir / file.path))
    decisions = list[GroupDecisions]()
    for group in groups:
        paths = dict[Path, None]()
        ends_of_group = list[int]()
        for part in group:
            end_of_slice = ends[part.label]
            ends_of_group.append(end_of_slice)
            for first, end, path in decisions_of[part.name]:
                if first < end_of_slice and end > part.first_row:
                    paths[path] = None
        decisions.append(GroupDecisions(FileSet(tuple(paths)), tuple(ends_of_group)))
    return decisions


def open_mix(mix_dir: Path) -> tuple[MixManifest, list[Path]]:
    """Return how a mix was decided, and its files. UsageError if there is none, InputError if mix has not finished."""
    paths = [finished.path for finished in list_finished(mix_dir, "the folder that mix wrote") if not finished.reason]
    return MixManifest.load(mix_dir), paths


def reject_other_corpus(files: Sequence[CorpusFile], manifest: MixManifest, mix_dir: Path) -> None:
    """Raise InputError unless the corpus has the files that a mix decided on."""
    named = set[str]()
    for file in manifest.files:
        named.update(written.file for written in file.slices)
    read = {file.name for file in files}
    odd = sorted(named ^ read)
    if odd:
        raise InputError(
            f"{mix_dir} decides on another corpus: expected the files that mix read, got a difference in {odd[0]}. "
            "Run mix again"
        )
