"""Marks of unfinished stages: a folder whose stage was interrupted is refused by every stage that reads it.

A stage that writes a folder of files, such as NORM/, marks it before it writes the first file and removes the
mark after the last. A mark is a file `.gristmill/STAGE.unfinished` in the folder; it holds the reason.
"""

from collections.abc import Iterable
from pathlib import Path

from gristmill.errors import InputError
from gristmill.io.files import atomic_write_bytes

STATE_DIR = ".gristmill"  # folder in a stage's output folder, for its ledger and intermediate files
_SUFFIX = ".unfinished"
INTERRUPTED = "was interrupted"


def mark_unfinished(folder: Path, stage: str, reason: str = INTERRUPTED) -> None:
    """Mark the output of a stage in `folder` as unfinished."""
    atomic_write_bytes(_mark_path(folder, stage), reason.encode())


def mark_finished(folder: Path, stage: str) -> None:
    """Remove the stage's mark from `folder`, if there is one."""
    _mark_path(folder, stage).unlink(missing_ok=True)


def clear_marks(folder: Path, stage: str) -> None:
    """Remove the marks of all runs of a stage, of the whole or of parts of its work, from `folder`."""
    for mark in (*folder.glob(f"{STATE_DIR}/{stage}{_SUFFIX}"), *folder.glob(f"{STATE_DIR}/{stage}-*{_SUFFIX}")):
        mark.unlink(missing_ok=True)


def is_unfinished(folder: Path, stage: str) -> bool:
    """Whether `folder` has the stage's mark."""
    return _mark_path(folder, stage).exists()


def marked_stages(folder: Path, reason: str) -> list[str]:
    """The stages that have a mark with this reason in `folder`."""
    marks = (folder / STATE_DIR).glob(f"*{_SUFFIX}")
    return [mark.name.removesuffix(_SUFFIX) for mark in marks if mark.read_text(encoding="utf-8") == reason]


def reject_unfinished(folder: Path) -> None:
    """Raise InputError if a stage has not finished writing `folder`, a parent of it, or a folder directly in it."""
    own = folder.absolute()
    for root in (own, *own.parents):
        _reject_marks(folder, root.glob(f"{STATE_DIR}/*{_SUFFIX}"))
    _reject_marks(folder, own.glob(f"*/{STATE_DIR}/*{_SUFFIX}"))


def _reject_marks(folder: Path, marks: Iterable[Path]) -> None:
    for mark in sorted(marks):
        stage, root = mark.name.removesuffix(_SUFFIX), mark.parent.parent
        reason = mark.read_text(encoding="utf-8", errors="replace") or INTERRUPTED
        raise InputError(
            f"{folder} is not complete: {stage}, which writes {root}, {reason}. Run {stage.partition('-')[0]} again to "
            f"its end, with the same options. (If {root} is complete in spite of that, remove {mark}.)"
        )


def _mark_path(folder: Path, stage: str) -> Path:
    return folder / STATE_DIR / f"{stage}{_SUFFIX}"
