"""The older stages of a mix, which write its text, and what a mix decided, for tests that compare both."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dedup.dedup_train import dedup_train
from gristmill.counts import READ, WRITTEN, Counts
from gristmill.engine.options import RunOptions
from preprocessing.mixing.decisions import HELD_OUT_COPY, load_decisions
from preprocessing.shuffle_holdout import pass1, pass2
from tests.preprocessing.conftest import keys_of

Times = Counter[str]  # of each key


def write_texts(norm: Path, out: Path, holdout: float, quiet: RunOptions, **arguments: Any) -> Counts:
    """Run pass1, pass2 and dedup_train, and return the documents by the reason that they left the three by."""
    mixed = pass1(norm, out / "pass1", options=quiet, **arguments)
    split = pass2(0, 10**9, 1, out / "pass1", out / "train", out / "holdout", holdout, quiet)
    cleaned = dedup_train(1, out / "train", out / "holdout", out / "train_deduped", options=quiet)
    counts = Counts({}, [])
    for stage, between in ((mixed, WRITTEN), (split, WRITTEN), (cleaned, "")):
        for source, reason, tally in stage.rows():
            is_between = reason == between or (reason == READ and stage is not mixed)
            if not is_between:
                counts.add(source, reason, tally.bytes, tally.documents, tally.files)
    return counts


def read_texts_written(out: Path, read: Callable[[Path], list[dict[str, Any]]]) -> tuple[Times, Times]:
    """Return how often each key is in the train set, and in the holdout, that write_texts wrote."""
    return Counter(keys_of(read(out / "train_deduped"))), Counter(keys_of(read(out / "holdout")))


def read_decisions(mix_dir: Path) -> tuple[Times, Times]:
    """Return how often each key is in the train set, and in the holdout, as a mix decided."""
    train = Counter[str]()
    holdout = Counter[str]()
    for path in mix_dir.rglob("*.decisions.parquet"):
        for file in load_decisions(path).values():
            for row, copies in zip(file.rows.tolist(), file.copies.tolist(), strict=True):
                key = f"{file.name}@{row}"
                if copies == HELD_OUT_COPY:
                    holdout[key] += 1
                else:
                    train[key] += copies
    return train, holdout


def tallies_of(counts: Counts) -> dict[tuple[str, str], tuple[int, int, int]]:
    """Return documents, bytes and files by source and reason."""
    return {(source, reason): (it.documents, it.bytes, it.files) for source, reason, it in counts.rows()}
