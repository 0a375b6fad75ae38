"""Checks of output folders that stages make themselves: no files of others in them, no overlap with the input."""

import time
from collections.abc import Iterable
from pathlib import Path

from gristmill.engine.staleness.ledger import Ledger
from gristmill.errors import OutputError, UsageError
from gristmill.paths import name_of
from gristmill.storage.files import walk
from gristmill.wording import count_of


def reject_unknown_files(folder: Path, planned: Iterable[Path], suffixes: tuple[str, ...], ledger: Ledger) -> None:
    """Raise OutputError if `folder` has files with these `suffixes` that are neither `planned` nor in the ledger.

    The next stage reads all of the folder, so files of another run would become part of its corpus.
    """
    unknown = set[str]()
    for path in walk(folder):
        if path.name.lower().endswith(suffixes):
            unknown.add(name_of(path))
    unknown -= set(map(name_of, planned))
    for wait in (0.0, 1.0):  # a concurrent process writes its file first and its record just after
        if unknown:
            time.sleep(wait)
            for writer in (ledger, *ledger.siblings):
                unknown -= writer.outputs().keys()
    if unknown:
        raise OutputError(
            f"{folder} holds {count_of(len(unknown), 'file')} that {ledger.file.stem} did not write, such as "
            f"{Path(min(unknown)).name!r}: another run may have written them, or the ledger {ledger.file} is damaged. "
            "Remove them, or give an empty or new folder"
        )


def reject_overlapping_folders(source: Path, target: Path) -> None:
    """Raise UsageError if the output folder `target` is the input folder `source`, or one lies inside the other."""
    if target.resolve().is_relative_to(source.resolve()):
        raise UsageError(
            f"output folder {target} is the input folder {source} or lies in it, and its files would be read as "
            "input: give a folder outside it"
        )
    if source.resolve().is_relative_to(target.resolve()):
        raise UsageError(
            f"input folder {source} lies in the output folder {target}, and later stages would read both: give "
            "another output folder"
        )
