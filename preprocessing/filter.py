"""Stage: find the documents that are too short to learn from. Drops nothing, writes down which they are."""

import sys
from collections import defaultdict
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import numpy as np
from tyro.conf import Positional

from gristmill.command import command
from gristmill.counts import Counts
from gristmill.engine.ledger import Ledger
from gristmill.engine.stage import STATE_DIR, RunOptions, Task, note_count_mismatch, outputs_intact, run_stage
from gristmill.errors import UsageError
from gristmill.io.documents import list_source
from gristmill.io.files import atomic_write, locked
from gristmill.io.keys import write_keys
from gristmill.io.parquet_tables import is_table
from gristmill.io.readers import Slice, plan_slices, read_documents
from gristmill.io.writers import Rejects
from gristmill.text import matching_form, utf8_size

SHORT = "short"
KEPT = "kept"
ROWS = ".rows.npy"


def filter(
    input_dir: Positional[Path],
    output_file: Positional[Path],
    n_docs: Positional[int],
    dataset_name: Positional[str],
    threshold: Positional[int],
    options: RunOptions = RunOptions(),
) -> Counts:
    """Write the keys of all documents with fewer than `threshold` characters in the matching form.

    The form is lower case, without punctuation, with single spaces. Called for one data set after
    another with the same output file, it replaces the keys of that data set and keeps the others'.

    Args:
        input_dir: NORM/<dataset>/, or NORM/ with any data set in it or all.
        output_file: FILTERED.pickle, as SlimPajama's: {file: {rows}}; or .parquet, a table of file and row.
        n_docs: Not needed, as documents are counted; a number that differs is pointed out.
        dataset_name: The data set, or all.
        threshold: Fewest characters of a document that is kept; SlimPajama's is 200.
        options: Workers, memory, and when to stop; they change no output.

    Returns:
        Documents read, kept and short per source.
    """
    if threshold < 0:
        raise UsageError(f"threshold {threshold}: wanted 0 or more characters")
    is_table(output_file)  # refuses other suffixes before the work, not after
    state = output_file.parent / STATE_DIR
    name = f"filter-{output_file.name}"
    slices = [part for file in list_source(input_dir, dataset_name) for part in plan_slices(file)]
    tasks = [_slice_task(part, threshold, state / name / f"{part.label}{ROWS}") for part in slices]
    counts = run_stage(name, tasks, state, options, stale_prefix="" if dataset_name == "all" else f"{dataset_name}/")
    with locked(state / f"{name}.lock"):  # SlimPajama's users run one data set beside another
        _write_all(name, state, output_file, options)
    note_count_mismatch(n_docs, counts, options)
    return counts


def find_short(part: Slice, threshold: int, output: Path) -> Counts:
    """Write the rows of a slice's short documents, as int64, ascending."""
    counts, rows = Counts({}, []), []
    for document in read_documents(part, counts, Rejects(output)):
        short = is_short(document.text, threshold)
        counts.add(part.source, SHORT if short else KEPT, utf8_size(document.text))
        if short:
            rows.append(document.key.row)
    with atomic_write(output) as temporary, temporary.open("wb") as file:
        np.save(file, np.array(rows, np.int64))
    return counts


def is_short(text: str, threshold: int) -> bool:
    """Whether the matching form has fewer characters than that.

    The form of a beginning is the beginning of the form, and most documents are long enough by theirs.

    >>> is_short("a b c", 5), is_short("A,  b, c!", 6)
    (False, True)
    """
    return len(matching_form(text[: 4 * threshold])) < threshold and len(matching_form(text)) < threshold


def gather_rows(parts: dict[str, list[Path]], output_file: Path) -> Counts:
    """Put the rows of all slices into one key set."""
    write_keys(output_file, {file: np.concatenate([np.load(path) for path in paths]) for file, paths in parts.items()})
    return Counts({}, [])


def _slice_task(part: Slice, threshold: int, output: Path) -> Task:
    arguments = {"part": part, "threshold": threshold, "output": output}
    return Task(part.label, find_short, arguments, (Path(part.path),), (output,), part.size)


def _write_all(name: str, state: Path, output_file: Path, options: RunOptions) -> None:
    """Write the key set from every slice that the ledger holds, of this call and of earlier ones."""
    parts = defaultdict(list)
    for label, entry in sorted(Ledger(state / f"{name}.jsonl").read().items()):
        if outputs_intact(entry):
            rows = next(Path(path) for path in entry.outputs if path.endswith(ROWS))
            parts[label.rpartition("+")[0]].append(rows)
    inputs = tuple(path for paths in parts.values() for path in paths)
    task = Task("gather", gather_rows, {"parts": dict(parts), "output_file": output_file}, inputs, (output_file,))
    run_stage(f"{name}-gather", [task], state, options, summary=False)


if __name__ == "__main__":
    command(filter)
