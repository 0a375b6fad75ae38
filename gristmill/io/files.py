"""Atomic writes, locks, listing and hashing of files, and marks of unfinished stages.

A stage that writes a folder of files, such as NORM/, marks it before it writes the first file and removes the
mark after the last; no stage reads a folder that is marked. A mark is a file `.gristmill/STAGE.unfinished` in the
folder; it holds the reason.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from gristmill.errors import InputError
from gristmill.storage.local import PARTIAL as PARTIAL
from gristmill.storage.local import atomic_write as atomic_write
from gristmill.storage.local import atomic_write_bytes as atomic_write_bytes
from gristmill.storage.local import concatenate as concatenate
from gristmill.storage.local import flush_all as flush_all
from gristmill.storage.local import flush_later as flush_later
from gristmill.storage.local import flush_to_disk as flush_to_disk
from gristmill.storage.local import locked as locked
from gristmill.storage.local import partial_path as partial_path
from gristmill.storage.local import remove_partial_files as remove_partial_files
from gristmill.storage.local import sha256_file as sha256_file
from gristmill.storage.local import unique_partial_path as unique_partial_path

STATE_DIR = ".gristmill"  # folder in a stage's output folder, for its ledger and intermediate files
_MARK_SUFFIX = ".unfinished"
INTERRUPTED = "was interrupted"


def walk(folder: Path) -> Iterator[Path]:
    """Yield every file below `folder`, by name within a folder; follow links, skip hidden files and folders."""
    for directory, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(
            name for name in folders if not name.startswith(".") and not is_link_to_parent(Path(directory, name))
        )
        yield from (Path(directory, name) for name in sorted(files) if not name.startswith("."))


def is_link_to_parent(folder: Path) -> bool:
    """Whether a folder is a link to one of its own parents, which would be walked forever."""
    return folder.is_symlink() and folder.resolve() in (parent.resolve() for parent in folder.absolute().parents)


def rejects_path(output: Path) -> Path:
    """Path of the file for malformed records found while writing `output`."""
    return output.with_name(output.name + ".malformed")


def mark_unfinished(folder: Path, stage: str, reason: str = INTERRUPTED) -> None:
    """Mark the output of a stage in `folder` as unfinished."""
    atomic_write_bytes(_mark_path(folder, stage), reason.encode())


def mark_finished(folder: Path, stage: str) -> None:
    """Remove the stage's mark from `folder`, if there is one."""
    _mark_path(folder, stage).unlink(missing_ok=True)


def clear_marks(folder: Path, stage: str) -> None:
    """Remove the marks of all runs of a stage, of the whole or of parts of its work, from `folder`."""
    for mark in (
        *folder.glob(f"{STATE_DIR}/{stage}{_MARK_SUFFIX}"),
        *folder.glob(f"{STATE_DIR}/{stage}-*{_MARK_SUFFIX}"),
    ):
        mark.unlink(missing_ok=True)


def is_unfinished(folder: Path, stage: str) -> bool:
    """Whether `folder` has the stage's mark."""
    return _mark_path(folder, stage).exists()


def marked_stages(folder: Path, reason: str) -> list[str]:
    """The stages that have a mark with this reason in `folder`."""
    marks = (folder / STATE_DIR).glob(f"*{_MARK_SUFFIX}")
    return [mark.name.removesuffix(_MARK_SUFFIX) for mark in marks if mark.read_text(encoding="utf-8") == reason]


def reject_unfinished(folder: Path) -> None:
    """Raise InputError if a stage has not finished writing `folder`, a parent of it, or a folder below it."""
    for root in dict.fromkeys((*folder.absolute().parents, *folder.resolve().parents)):
        _reject_marks(folder, root)
    for directory, folders, _ in os.walk(folder, followlinks=True):
        if STATE_DIR in folders:
            _reject_marks(folder, Path(directory))
        folders[:] = [name for name in folders if name[0] != "." and not is_link_to_parent(Path(directory, name))]


def _reject_marks(folder: Path, root: Path) -> None:
    for mark in sorted(root.glob(f"{STATE_DIR}/*{_MARK_SUFFIX}")):
        stage = mark.name.removesuffix(_MARK_SUFFIX)
        reason = mark.read_text(encoding="utf-8", errors="replace") or INTERRUPTED
        raise InputError(
            f"{folder} is not complete: {stage}, which writes {root}, {reason}. Run {stage.partition('-')[0]} again to "
            f"its end, with the same options. (If {root} is complete in spite of that, remove {mark}.)"
        )


def _mark_path(folder: Path, stage: str) -> Path:
    return folder / STATE_DIR / f"{stage}{_MARK_SUFFIX}"
