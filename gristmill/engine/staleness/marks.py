"""Marks of what a run has not finished, a folder or single files: no stage reads what is marked."""

from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from gristmill.io.files import INTERRUPTED, is_unfinished, mark_finished, mark_unfinished


@dataclass
class Marks:
    """The marks of what a run writes, `folders` and single `files` of one folder; set before its first task.

    Context: after an error that came before any change of the output, the marks are as before.
    """

    name: str  # of the run
    folders: tuple[Path, ...]
    files: tuple[Path, ...]
    stay: bool = False  # after an error, too, as the output has changed
    _new: list[Path] = field(default_factory=list)  # folders that have been marked

    @property
    def _places(self) -> dict[Path, tuple[Path, ...]]:
        """Return the folders with marks, and the single files that each is of; none: it is of all in the folder."""
        places = dict[Path, tuple[Path, ...]]()
        if self.files:
            places[self.files[0].parent] = self.files
        return places | dict.fromkeys(self.folders, ())

    def set(self, reason: str = "") -> None:
        """Mark what the run writes as unfinished; a mark that is there stays, unless there is another reason."""
        for folder, files in self._places.items():
            if reason or not is_unfinished(folder, self.name):
                self._new.append(folder)
                mark_unfinished(folder, self.name, files, reason or INTERRUPTED)

    def remove(self) -> None:
        """Remove the marks of a run that has ended."""
        for folder in self._places:
            mark_finished(folder, self.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if not isinstance(error, Exception) or self.stay:
            return
        for folder in self._new:
            mark_finished(folder, self.name)
