"""The summary line of a stage's run, and a note on the number of documents that was expected."""

import sys

from gristmill.counts import INCOMING, READ, Counts
from gristmill.engine.options import RunOptions
from gristmill.wording import count_of

_PASSED_ON = ("written", "kept", "signed", "unique", "clustered", "sampled")  # reasons that a summary names first


def print_summary(stage: str, counts: Counts, ran: int, tasks: int, seconds: float) -> None:
    """Print one line: documents read, repeated, and by outgoing reason, files not read, speed, tasks skipped."""
    incoming = list[str]()
    outgoing = list[str]()
    for reason in sorted({READ, *counts.reasons}, key=_summary_order):
        documents = counts.total(reason).documents
        if documents or reason == READ:
            parts = incoming if reason in INCOMING else outgoing
            parts.append(f"{documents:,} {reason}")
    files = ""
    unread = counts.unread_files()
    if unread:
        files += f" | files not read: {unread}"
    if counts.damaged:
        files += f" | left out: {counts.damaged_files()}"
    done = _done_in_words(counts, ran, tasks, seconds)
    sums = f"{' + '.join(incoming)} = {' + '.join(outgoing) or 'nothing'}"
    print(f"{stage}: {sums}{files} | {done}", file=sys.stderr, flush=True)


def _summary_order(reason: str) -> tuple[bool, bool, str]:
    """Return the place of a reason in a summary: what was read, what was passed on, and all others by name."""
    return reason != READ, reason not in _PASSED_ON, reason


def _done_in_words(counts: Counts, ran: int, tasks: int, seconds: float) -> str:
    """Return how long the tasks took that ran, and how many were done before."""
    if not ran:
        return "done already, nothing to do"
    megabytes = counts.total(READ).bytes / 1e6
    text = f"{seconds:.1f} s"
    if megabytes:
        text = f"{megabytes:,.1f} MB in {seconds:.1f} s ({megabytes / seconds:,.1f} MB/s)"
    if ran < tasks:
        text += f", {tasks - ran} of {count_of(tasks, 'task')} done before"
    return text


def note_count_mismatch(n_docs: int, counts: Counts, options: RunOptions) -> None:
    """Print a note if `n_docs` from the command line differs from the number of documents read; 0 or less: unknown."""
    documents = counts.total(READ).documents
    if n_docs > 0 and n_docs != documents and not options.quiet:
        print(f"note: n_docs is {n_docs:,}, but {documents:,} documents were found; all are used", file=sys.stderr)
