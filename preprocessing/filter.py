"""Stage: list the documents that are too short to learn from; the shuffle (pass1) drops them."""

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
ROWS_SUFFIX = ".rows.npy"


def filter(
    input_dir: Positional[Path],
    output_file: Positional[Path],
    n_docs: Positional[int],
    dataset_name: Positional[str],
    threshold: Positional[int],
    options: RunOptions = RunOptions(),
) -> Counts:
    """List the documents with fewer than `threshold` characters in the matching form. No document is removed here.

    The matching form is lower case, without ASCII punctuation, with single spaces. Run once for each data
    set with the same output file: each run replaces the keys of its own data set and keeps the others.

    Args:
        input_dir: NORM/<dataset>/; or NORM/, in which dataset_name chooses one data set or all.
        output_file: FILTERED.pickle, as SlimPajama's: {file: {rows}}; or .parquet, a table of file and row.
        n_docs: The expected number of documents; a note is printed if it differs from the count.
        dataset_name: Name of the data set, or all.
        threshold: Minimum characters in the matching form of a document to keep; SlimPajama's is 200.
        options: Workers, memory, and when to stop; they change no output.

    Returns:
        Documents read, kept and short, per source.
    """
    check_threshold(threshold)
    is_table(output_file)  # raises for an unknown suffix now, before the work
    state = output_file.parent / STATE_DIR
    name = f"filter-{output_file.name}"
    slices = [s for file in list_source(input_dir, dataset_name) for s in plan_slices(file)]
    tasks = [_slice_task(s, threshold, state / name / f"{s.label}{ROWS_SUFFIX}") for s in slices]
    counts = run_stage(name, tasks, state, options, stale_prefix="" if dataset_name == "all" else f"{dataset_name}/")
    with locked(state / f"{name}.lock"):  # several data sets may be filtered at the same time
        _run_merge(name, state, output_file, options)
    note_count_mismatch(n_docs, counts, options)
    return counts


def check_threshold(threshold: int) -> None:
    """Raise UsageError for a threshold that is not a number of characters."""
    if threshold < 0:
        raise UsageError(f"threshold {threshold}: wanted 0 or more characters, such as 200")


def _slice_task(corpus_slice: Slice, threshold: int, output: Path) -> Task:
    arguments = {"corpus_slice": corpus_slice, "threshold": threshold, "output": output}
    return Task(corpus_slice.label, find_short, arguments, (Path(corpus_slice.path),), (output,), corpus_slice.size)


def find_short(corpus_slice: Slice, threshold: int, output: Path) -> Counts:
    """Write the rows of a slice's short documents (.npy, int64, ascending)."""
    counts, rows = Counts({}, []), []
    for document in read_documents(corpus_slice, counts, Rejects(output)):
        short = is_short(document.text, threshold)
        counts.add(corpus_slice.source, SHORT if short else KEPT, utf8_size(document.text))
        if short:
            rows.append(document.key.row)
    with atomic_write(output) as temporary, temporary.open("wb") as file:
        np.save(file, np.array(rows, np.int64))
    return counts


def is_short(text: str, threshold: int) -> bool:
    """Whether the matching form of a text has fewer than `threshold` characters.

    Tries the first 4 × threshold characters alone, which are enough for most documents: the form of a
    whole text is not shorter than that of its beginning.

    >>> is_short("a b c", 5), is_short("A,  b, c!", 6)
    (False, True)
    """
    return len(matching_form(text[: 4 * threshold])) < threshold and len(matching_form(text)) < threshold


def _run_merge(name: str, state: Path, output_file: Path, options: RunOptions) -> None:
    """Run the step that merges the rows of all slices in the ledger, of this call and of earlier ones."""
    rows_files = defaultdict(list)
    for label, entry in sorted(Ledger(state / f"{name}.jsonl").read().items(), key=lambda item: _place(item[0])):
        if outputs_intact(entry):
            rows = next(Path(path) for path in entry.outputs if path.endswith(ROWS_SUFFIX))
            rows_files[label.rpartition("+")[0]].append(rows)
    inputs = tuple(path for paths in rows_files.values() for path in paths)
    arguments = {"rows_files": dict(rows_files), "output_file": output_file}
    task = Task("merge", merge_rows, arguments, inputs, (output_file,))
    run_stage(f"{name}-merge", [task], state, options, summary=False)


def _place(label: str) -> tuple[str, int]:
    """File and start of a slice's label, to sort by: as text, a+10 comes before a+9."""
    file, _, start = label.rpartition("+")
    return file, int(start)


def merge_rows(rows_files: dict[str, list[Path]], output_file: Path) -> Counts:
    """Write the key set: for each corpus file, the rows of all its slices."""
    keys = {file: np.concatenate([np.load(path) for path in paths]) for file, paths in rows_files.items()}
    write_keys(output_file, keys)
    return Counts({}, [])


if __name__ == "__main__":
    command(filter)
