"""Chunks of pass 2, which may run on some parts at a time: each part is in one chunk, and none is missing."""

import sys
from collections.abc import Iterator
from pathlib import Path

from gristmill.engine.run import StageRun
from gristmill.errors import OutputError, UsageError
from gristmill.io.files import STATE_DIR
from gristmill.storage.files import is_file, is_folder
from gristmill.urls import is_remote

SPLIT = "split"  # name of the step that makes the parts


def _written(run: StageRun) -> Iterator[tuple[int, Path, Path]]:
    """The parts that all calls of pass 2 have written: number, train file and holdout file."""
    for ledger in (run.ledger, *run.ledger.others):
        for (step, name), record in ledger.read().items():
            if step == SPLIT:
                train, holdout = map(ledger.path, record.outputs[:2])
                yield int(name.removeprefix("part ")), train, holdout


def reject_other_holdout(run: StageRun, train_dir: Path, holdout_dir: Path) -> None:
    """Raise if the parts in the train folder have their holdout elsewhere, or the holdout folder is none of pass 2's.

    UsageError, as the holdout that is there would be removed; OutputError, as files of others would be replaced.
    """
    folders = {holdout.parent.parent for _, _, holdout in _written(run)}
    for folder in sorted(folders - {holdout_dir}):
        if is_folder(folder):
            raise UsageError(
                f"{train_dir} was split with --holdout_dir {folder}, which would lose its files: give that one, or "
                "another --train_dir, or remove both"
            )
    is_copy = bool(folders) and not is_remote(holdout_dir) and not is_folder(holdout_dir / STATE_DIR)
    if is_copy and any(holdout_dir.glob("*")):
        raise OutputError(
            f"{holdout_dir} is not the holdout of {train_dir}, which was copied without it, and its files could be "
            "replaced: give another --holdout_dir, or remove it"
        )


def reject_other_parts(run: StageRun, chosen: range, parts: int, chunk_dir: Path) -> None:
    """Raise OutputError if a `chosen` part is in another chunk, too, or there are more parts than pass 1 made now."""
    for number, train, _ in _written(run):
        is_elsewhere = number in chosen and train.parent != chunk_dir
        if (is_elsewhere or number >= parts) and is_file(train):
            raise OutputError(
                f"{train} is of an earlier pass2, and its documents would be there twice: run pass2 for all parts at "
                f"once (0 20), which removes it, or remove {train.parent}"
            )


def note_missing_parts(run: StageRun, parts: int) -> None:
    """Print a note if some of the parts are in no chunk yet: their documents are in no train set."""
    missing = sorted({*range(parts)} - {number for number, _, _ in _written(run)})
    if missing:
        print(
            f"note: {len(missing):,} of the {parts:,} parts are in no chunk yet, such as part {missing[0]}: run pass2 "
            "for the other twentieths, too (0 20 are all), before the train set is read as a whole",
            file=sys.stderr,
        )
