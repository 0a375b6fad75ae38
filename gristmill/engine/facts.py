"""Reading the facts of a pass: the files in a folder, and what is in which, as a step of the stage that reads them."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from gristmill.counts import Counts
from gristmill.engine.run import StageRun
from gristmill.engine.task import Result, Task
from gristmill.errors import UsageError
from gristmill.io.documents import source_of
from gristmill.io.facts import INDEX_FILE, SUFFIX, FactsFile, read_index
from gristmill.io.files import list_finished


def list_facts(folder: Path) -> list[Path]:
    """Return the paths of all facts in a folder. UsageError if it has none, InputError if a pass is not finished."""
    paths = [file.path for file in list_finished(folder, "a folder of facts") if not file.reason]
    if folder / INDEX_FILE not in paths:
        raise UsageError(f"{folder}: expected the facts of a corpus, got no {INDEX_FILE}; run prepare first")
    return paths


def without_vectors(paths: Sequence[Path]) -> tuple[Path, ...]:
    """Return the paths of facts that are columns."""
    return tuple(path for path in paths if path.name.endswith(SUFFIX))


def plan_facts(run: StageRun, folder: Path, step: str = "facts") -> list[FactsFile]:
    """Return the files of facts in a folder in the order of keys, which a step reads."""
    task = Task(step, load_index, {"index": folder / INDEX_FILE})
    return run.step(step, [task]).values(list[FactsFile])[0]


def load_index(index: Path) -> Result:
    """Task: the value is the list of files of facts, and of what is in each."""
    return Result(Counts({}, []), msgspec.to_builtins(read_index(index)))


def count_files(files: Sequence[FactsFile]) -> Counts:
    """Return the number of files per source that documents were written to."""
    names = dict[str, None]()  # in order
    for file in files:
        names |= dict.fromkeys(file.corpus_files)
    counts = Counts({}, [])
    for name in names:
        counts.add_read_file(source_of(name))
    return counts
