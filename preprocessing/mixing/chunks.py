"""Chunks of pass 2, which runs on some parts at a time: those made from an earlier pass 1 are marked or refused."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gristmill.engine.ledger import DoneRecord
from gristmill.engine.run import StageRun, StepResult
from gristmill.errors import OutputError, UsageError
from gristmill.io.files import STATE_DIR, mark_finished, mark_unfinished, marked_stages
from gristmill.storage.files import is_folder, resolved
from gristmill.storage.names import absolute
from gristmill.urls import is_remote

SPLIT = "split"  # name of the step that makes the parts
_OUTDATED = "has not read what pass1 wrote last, or had another --holdout"


@contextmanager
def mark_outdated_chunks(run: StageRun, split: StepResult, folders: Sequence[Path]) -> Iterator[None]:
    """Context, in which the run is finished: chunks of an earlier pass 1, or another holdout, are marked as unfinished.

    Their documents would be there twice or never, or be held out in other shares. `split` are the parts of this run.
    The marks are set before the run's own is removed. That of a chunk is removed when pass 2 has made its parts again,
    in whichever chunk.
    """
    outdated = {f"{run.stage.name}-{chunk}-parts" for chunk in _outdated_chunks(run, split)}
    for folder in folders:
        for stage in outdated:
            mark_unfinished(folder, stage, _OUTDATED)
    yield
    for folder in folders:
        for stage in {*marked_stages(folder, _OUTDATED)} - outdated:
            mark_finished(folder, stage)


def _outdated_chunks(run: StageRun, split: StepResult) -> set[str]:
    """Names of the chunks with parts of an earlier pass 1; none after a run of all parts, which removes them."""
    if run.claims.plans == "":
        return set()
    now, own = _content(split.records[0]), {record.id for record in split.records}
    others = [record for record in run.all_records().values() if record.step == SPLIT and record.id not in own]
    return {Path(record.outputs[0].path).parent.name for record in others if _content(record) != now}


def _content(record: DoneRecord) -> tuple[str | None, ...]:
    """What pass 1 had mixed, of which a part was made, and what is held out of it: arguments of its task."""
    return tuple(record.identity.get(f"argument {name}") for name in ("content", "limits"))


def name_from(train_dir: Path, holdout_dir: Path) -> Path:
    """The path of the holdout by the name of the nearest folder that it shares with the train set.

    The ledger beside the train set names the holdout relative to it, which must not depend on the links by which either
    was named.
    """
    holdout_dir = absolute(holdout_dir)
    if not (is_remote(train_dir) or is_remote(holdout_dir)):
        place = resolved(holdout_dir.parent) / holdout_dir.name
        for folder in list(absolute(train_dir).parents)[:-1]:
            if place.is_relative_to(resolved(folder)):
                return folder / place.relative_to(resolved(folder))
    return holdout_dir


def reject_other_holdout(run: StageRun, train_dir: Path, holdout_dir: Path) -> None:
    """Raise if the parts in the train folder have their holdout elsewhere, or the holdout folder is none of pass 2's.

    UsageError, as the holdout that is there would be removed; OutputError, as files of others would be replaced.
    """
    parts = [record for record in run.ledger.read().values() if record.step == SPLIT]
    folders = {run.ledger.path(record.outputs[1]).parent.parent for record in parts}
    for folder in sorted(folders):
        if resolved(folder) != resolved(holdout_dir) and is_folder(folder):
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


def note_missing_parts(run: StageRun, parts: int) -> None:
    """Print a note if some of the parts are in no chunk yet: their documents are in no train set."""
    found = {int(name.removeprefix("part ")) for step, name in run.ledger.read() if step == SPLIT}
    missing = sorted({*range(parts)} - found)
    if missing:
        print(
            f"note: {len(missing):,} of the {parts:,} parts are in no chunk yet, such as part {missing[0]}: run pass2 "
            "for the other twentieths, too (0 20 are all), before the train set is read as a whole",
            file=sys.stderr,
        )


def reject_other_parts(run: StageRun, parts: int, folders: Sequence[Path]) -> None:
    """Raise OutputError if an earlier pass 1 made more parts, and some of them are there."""
    found = [int(name.removeprefix("part ")) for step, name in run.ledger.read() if step == SPLIT]
    if max(found, default=0) >= parts:
        raise OutputError(
            f"{folders[0]} holds part {max(found)} of an earlier pass1, which made more parts: run pass2 for all parts "
            f"at once (0 20), which removes it, or remove {' and '.join(map(str, folders))}"
        )
