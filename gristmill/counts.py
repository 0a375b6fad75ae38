"""Counts of documents, bytes and files per source and reason; documents are conserved.

A stage counts each document twice: as read, and under the reason it leaves by (written, or the
reason it was dropped). Per source, `read + repeated + further parts` must equal the sum of all other reasons;
otherwise documents were lost and the stage fails. Bytes are UTF-8 bytes of the text, or of the raw
line of a malformed record. A corpus file is counted once: under `read`, or, with its size on disk and
no documents, under `not read: <reason>`.
"""

from collections.abc import Callable, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from gristmill.errors import ConservationError, TooManyMalformed, UsageError
from gristmill.wording import count_of, verb_for

READ = "read"
WRITTEN = "written"
REPEATED = "repeated"  # further copies of a document whose source has a weight above 1
CHANGED = "changed"  # bytes, not documents, by which normalisation changed the length of texts
MALFORMED = "malformed"
FAILED = "failed"  # begins the reason of a document on which a function failed
WORKER_DIED = "a worker process died"  # on a document: then follows FAILED
SKIPPED = "skipped"  # records of a web archive that are no documents, such as images
NO_FIELD = "no"  # begins the reason of a record without the field of the text
TEXT_ADVICE = "Give --text_column NAME, or `column` in the table of the source, if the text is"
NOT_READ = "not read"  # files, not documents
LEFT_OUT = "left out by weight"
HELD_OUT = "holdout"  # documents for evaluation
IN_HOLDOUT = "in the holdout"  # documents whose text is held out
PARTS = "further parts"  # documents that a function of yours made of one, but for the first of them
INCOMING = (READ, REPEATED, PARTS)  # reasons that add documents; all others remove them
TOTAL = "total (*/)"  # label of the row of totals; no source has a slash in its name
DAMAGED = f"{NOT_READ}: damaged"  # before the fault: files that cannot be read to their end
SOURCE_LOSS = 0.5  # a source that loses a larger share of its documents looks wrong
TIMES_MEDIAN = 3.0  # so does a source whose share lost is more than this times the median of the others
_FEW = 20  # documents: a source that loses fewer does not look wrong
_MUCH = 0.1  # a share: a source that loses a smaller one is not compared with the others
_REPAIRS = {"functions": "Fix the function", "the tokenizer": "Give another tokenizer"}  # of what fails on documents
MAX_EXAMPLES = 5  # malformed records listed in an error message


class Tally(msgspec.Struct):
    """Number of documents, their total size in bytes, and the number of files."""

    documents: int = 0
    bytes: int = 0
    files: int = 0

    def add(self, documents: int, size: int, files: int = 0) -> None:
        """Add `documents` with a total of `size` bytes, and `files`."""
        self.documents += documents
        self.bytes += size
        self.files += files


class Damage(msgspec.Struct, frozen=True):
    """Why a corpus file is left out: its path, the fault in a few words, and in sentences, with what to try."""

    path: str
    fault: str
    detail: str


class LargeCluster(msgspec.Struct, frozen=True):
    """A cluster: its size, the key of one document; of sampled pairs of documents how many, and how many are alike."""

    size: int
    example: str
    pairs: int = 0
    alike: int = 0


class Counts(msgspec.Struct):
    """Tallies per source and reason (`tallies[source][reason]`), and examples of malformed records and of failures.

    `damaged` has the files that are left out, by name in the corpus; `stored` is the size on disk of the files read.
    `clusters` are the largest ones, where the stage finds clusters. `lengths[source][n]` are documents read that are
    from 2^(n-1) bytes to less than 2^n long.

    `replaced` is how much personal data was replaced in the documents written, by kind.

    >>> counts = Counts()
    >>> counts.add("book", READ, 120)
    >>> counts.add("book", WRITTEN, 120)
    >>> counts.check_conserved("a stage")["book"]
    (1, 1)
    """

    tallies: dict[str, dict[str, Tally]] = {}
    examples: list[str] = []
    damaged: dict[str, Damage] = {}
    stored: int = 0
    clusters: list[LargeCluster] = []
    lengths: dict[str, list[int]] = {}
    failures: list[str] = []
    replaced: dict[str, int] = {}

    def add(self, source: str, reason: str, size: int, documents: int = 1, files: int = 0) -> None:
        """Count `documents`, with a total of `size` bytes, and `files` under a source and a reason."""
        self.tallies.setdefault(source, {}).setdefault(reason, Tally()).add(documents, size, files)

    def add_read(self, source: str, size: int) -> None:
        """Count a document that is read, and its length."""
        self.add(source, READ, size)
        lengths = self.lengths.setdefault(source, [])
        bits = size.bit_length()
        if len(lengths) <= bits:
            lengths.extend([0] * (bits + 1 - len(lengths)))
        lengths[bits] += 1

    def add_lengths(self, source: str, sizes: NDArray[np.int64], times: NDArray[np.int64] | None = None) -> None:
        """Count the lengths of documents (n) of these sizes in bytes, each so many `times`."""
        if not len(sizes):
            return
        _, bits = np.frexp(sizes.astype(np.float64))  # below 2^53 exact: the number of bits
        counted = np.bincount(bits, times).astype(np.int64).tolist()
        before = self.lengths.get(source, [])
        self.lengths[source] = list(map(sum, zip_longest(before, counted, fillvalue=0)))

    def add_read_file(self, source: str) -> None:
        """Count a file that is read; its documents are counted one by one."""
        self.add(source, READ, 0, documents=0, files=1)

    def add_unread_file(self, source: str, reason: str, size: int) -> None:
        """Count a file that is not read, of `size` bytes on disk."""
        self.add(source, f"{NOT_READ}: {reason}", size, documents=0, files=1)

    def add_damaged_file(self, source: str, name: str, damage: Damage, size: int, is_new: bool = True) -> None:
        """Count a file that is damaged, or a slice of `size` bytes of it; the file itself only if it `is_new`."""
        self.damaged[name] = damage
        self.add(source, f"{DAMAGED}: {damage.fault}", size, documents=0, files=int(is_new))

    def check_failed(self, stage: str, limit: float, table: Path | None, of: str = "functions") -> None:
        """Raise UsageError if functions failed on more than `limit`, a fraction, of the documents read.

        `table` lists these documents, if there is one; `of` is what failed, in place of functions.
        """
        failed = self.failed
        read = self.documents_read()
        if failed > limit * read:
            listed = f"All are listed in {table}. " if table else ""
            raise UsageError(
                f"{stage}: {of} failed on {failed:,} of {count_of(read, 'document')}, more than "
                f"--max_failed {limit:.2%} allows: {'; '.join(self.failures)}. {listed}{_REPAIRS[of]}, or raise "
                "--max_failed to leave them out"
            )

    @property
    def failed(self) -> int:
        """Return the number of documents on which a function failed, or a worker process died."""
        return self._total_of(f"{FAILED}: ").documents

    @property
    def has_failures(self) -> bool:
        """Return whether a function failed on a document, or a damaged file was left out."""
        return bool(self.failures or self.damaged)

    def add_replaced(self, counts: Mapping[str, int]) -> None:
        """Count personal data that was replaced in documents that are written, by kind."""
        for kind, count in counts.items():
            self.replaced[kind] = self.replaced.get(kind, 0) + count

    def add_failure(self, text: str) -> None:
        """Keep the description of a document on which a function failed; only the first MAX_EXAMPLES are kept."""
        if len(self.failures) < MAX_EXAMPLES:
            self.failures.append(text)

    def add_example(self, text: str) -> None:
        """Keep the description of a malformed record for error messages; only the first MAX_EXAMPLES are kept."""
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(text)

    def add_written(self, source: str, size: int, before: int) -> None:
        """Count a document as WRITTEN with `size` bytes, and the bytes it lost since it was read with `before`."""
        self.add(source, WRITTEN, size)
        if size != before:
            self.add(source, CHANGED, before - size, documents=0)

    def merge(self, other: "Counts") -> Self:
        """Add the counts of `other` to these, in place."""
        for source, reason, tally in other.rows():
            self.add(source, reason, tally.bytes, tally.documents, tally.files)
        self.examples = (self.examples + other.examples)[:MAX_EXAMPLES]
        self.failures = (self.failures + other.failures)[:MAX_EXAMPLES]
        self.damaged |= other.damaged
        self.add_replaced(other.replaced)
        self.stored += other.stored
        self.clusters = self.clusters + other.clusters
        for source, lengths in other.lengths.items():
            self.lengths[source] = list(map(sum, zip_longest(self.lengths.get(source, []), lengths, fillvalue=0)))
        return self

    def rows(self) -> Iterator[tuple[str, str, Tally]]:
        """Yield (source, reason, tally), by source."""
        for source, reasons in sorted(self.tallies.items()):
            for reason, tally in reasons.items():
                yield source, reason, tally

    def total(self, reason: str, source: str | None = None) -> Tally:
        """Return documents, bytes and files under one reason, of one source or of all."""
        total = Tally()
        for tallied_source, tallied_reason, tally in self.rows():
            if tallied_reason == reason and source in (None, tallied_source):
                total.add(tally.documents, tally.bytes, tally.files)
        return total

    def _total_of(self, prefix: str) -> Tally:
        """Return documents, bytes and files under all reasons that begin so."""
        total = Tally()
        for _, reason, tally in self.rows():
            if reason.startswith(prefix):
                total.add(tally.documents, tally.bytes, tally.files)
        return total

    def unread_files(self, source: str | None = None) -> str:
        """Return how many files of one source or of all were not read, by reason: '2 .csv, 1 hidden'; '' if none."""
        files: dict[str, int] = {}
        for tallied_source, reason, tally in self.rows():
            if reason.startswith(f"{NOT_READ}: ") and source in (None, tallied_source):
                name = reason.removeprefix(f"{NOT_READ}: ")
                files[name] = files.get(name, 0) + tally.files
        by_count = sorted(files.items(), key=lambda item: (-item[1], item[0]))
        return ", ".join(f"{count:,} {name}" for name, count in by_count)

    @property
    def malformed(self) -> int:
        """Return the total number of malformed records."""
        return self._sum_malformed().documents

    def _sum_malformed(self) -> Tally:
        total = Tally()
        for _, reason, tally in self.rows():
            if reason.startswith(MALFORMED):
                total.add(tally.documents, tally.bytes)
        return total

    @property
    def reasons(self) -> list[str]:
        """Return the reasons with at least one document: INCOMING first, then in order of appearance."""
        reasons = dict.fromkeys(INCOMING)
        for _, reason, _ in self.rows():
            reasons[reason] = None
        return [reason for reason in reasons if self.total(reason).documents]

    def documents_read(self, source: str | None = None) -> int:
        """Return how many records of one source or of all were read, without SKIPPED ones, which are no documents."""
        documents = self.total(READ, source).documents
        for reason in self.reasons:
            if reason.startswith(SKIPPED):
                documents -= self.total(reason, source).documents
        return documents

    def check_conserved(self, stage: str) -> dict[str, tuple[int, int]]:
        """Check that incoming and outgoing documents and bytes are equal per source.

        Returns (incoming documents, outgoing documents) by source. Raises ConservationError, whose
        message begins with `stage`, if they differ.
        """
        totals = {}
        for source in self.tallies:
            incoming = self._sum(source, incoming=True)
            outgoing = self._sum(source, incoming=False)
            if incoming != outgoing:
                raise ConservationError(
                    f"{stage}: source {source!r} does not add up: {count_of(incoming.documents, 'document')} "
                    f"({count_of(incoming.bytes, 'byte')}) came in, {outgoing.documents:,} "
                    f"({outgoing.bytes:,} bytes) are "
                    "accounted for. Do not use this result; please report it with the ledger (.gristmill/*.jsonl)."
                )
            totals[source] = (incoming.documents, outgoing.documents)
        return totals

    def _sum(self, source: str, incoming: bool) -> Tally:
        """Return the documents of a source that came in, or that left, and their bytes."""
        total = Tally()
        for reason, tally in self.tallies[source].items():
            if (reason in INCOMING) == incoming and not reason.startswith(NOT_READ):
                total.add(tally.documents, tally.bytes)
        return total

    def check_malformed(self, stage: str, limit: float) -> None:
        """Raise TooManyMalformed if more than `limit`, a fraction, of the records read is malformed, or of their bytes.

        One malformed record may be all of a file. Or if more than that of the bytes on disk are in damaged files. A
        limit of 0 allows no damaged file, even an empty one.
        """
        read = Tally(self.documents_read(), self.total(READ).bytes)
        malformed = self._sum_malformed()
        if malformed.documents > limit * read.documents or malformed.bytes > limit * read.bytes:
            raise TooManyMalformed(
                f"{stage}: {malformed.documents:,} of {count_of(read.documents, 'record')} "
                f"{verb_for(malformed.documents, 'is', 'are')} malformed "
                f"({malformed.documents / read.documents:.2%}, and {malformed.bytes / max(read.bytes, 1):.2%} of the "
                f"bytes), more than --max_malformed {limit:.2%} allows. The first: {'; '.join(self.examples)}. "
                f"They are in the *.malformed files next to the output. {self._advice()}, or raise --max_malformed."
            )
        size = self._total_of(DAMAGED).bytes
        share = size / (size + self.stored) if size + self.stored else 1.0
        if self.damaged and (share > limit or limit == 0):
            faults = [f"{damage.path}: {damage.detail}" for _, damage in sorted(self.damaged.items())]
            raise TooManyMalformed(
                f"{stage}: damaged files ({len(faults):,}) hold {share:.2%} of the bytes of the input, more than "
                f"--max_malformed {limit:.2%} allows. The first: {' '.join(faults[:MAX_EXAMPLES])} "
                "(Or raise --max_malformed: damaged files are then left out as a whole.)"
            )

    def _advice(self) -> str:
        """Return what to do about the malformed records, by their most frequent reason."""
        reasons = [reason for reason in self.reasons if reason.startswith(MALFORMED)]
        main_reason = max(reasons, key=lambda reason: self.total(reason).documents)
        if main_reason.startswith(f"{MALFORMED}: {NO_FIELD} "):
            return f"{TEXT_ADVICE} in another field, fix the input"
        return "Fix the input"

    def damaged_files(self) -> str:
        """Return the damaged files and their faults: 'book/a.gz (truncated gz), … and 2 more'; '' if none."""
        return list_faults({name: damage.fault for name, damage in self.damaged.items()})

    def __rich__(self) -> Table:
        """Return a table of documents per source and reason, and of the files read and not read."""
        columns = file_columns(self)
        headers = map(escape, self.reasons)  # a reason may name a column of the user's
        table = Table("source", *headers, *columns, box=None, header_style="bold", pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        sources: list[str | None] = [*sorted(self.tallies)]
        if len(sources) > 1:
            sources.append(None)  # all of them
        for source in sources:
            cells = [f"{self.total(reason, source).documents:,}" for reason in self.reasons]
            files = [write(source) for write in columns.values()]
            table.add_row(Text(source or TOTAL), *cells, *files, style="" if source else "bold")
        return table


def warn_of_losses(
    counts: Counts, of: str = "", max_share: float = SOURCE_LOSS, times: float = TIMES_MEDIAN, what: str = "source"
) -> dict[str, str]:
    """Return sources that lose over `max_share` of their documents, or far more than the median, with a sentence each.

    Lost is what was read and neither written nor held out, or only what left by the reason `of`. The sources may
    be other parts of a corpus, as `what` says. A limit of 0 is none.
    """
    lost = dict[str, dict[str, int]]()
    for source, reason, tally in counts.rows():
        if _is_lost(reason, of) and tally.documents:
            lost.setdefault(source, {})[reason] = tally.documents
    read = {source: counts.documents_read(source) for source in sorted(counts.tallies)}
    shares = dict[str, float]()
    for source, documents in read.items():
        if documents:
            shares[source] = sum(lost.get(source, {}).values()) / documents
    warnings = dict[str, str]()
    for source, share in shares.items():
        by_reason = lost.get(source, {})
        total = sum(by_reason.values())
        others = [other for name, other in shares.items() if name != source]
        is_more = times and others and share > max(_MUCH, times * median(others))
        if total < _FEW or not (is_more or (max_share and share > max_share)):
            continue
        main_reason = max(by_reason, key=lambda reason: (by_reason[reason], reason))
        reason_in_words = f"as {main_reason}"
        if len(by_reason) > 1:
            reason_in_words = f"{by_reason[main_reason]:,} of them as {main_reason}"
        compared = f"; the median of the others is {median(others):.1%}" if others else ""
        loss = f"{share:.0%} of its documents ({total:,} of {read[source]:,})"
        warnings[source] = f"the {what} {source} loses {loss}, {reason_in_words}{compared}"
    return warnings


def _is_lost(reason: str, of: str) -> bool:
    """Return whether documents under a reason are lost: under `of` or, if it is empty, under any that keeps none."""
    if of:
        return reason == of
    if reason in (*INCOMING, WRITTEN, LEFT_OUT, HELD_OUT):
        return False
    return not reason.startswith((NOT_READ, SKIPPED))


def list_faults(faults: dict[str, str]) -> str:
    """Return some files by name, with the fault of each, in words."""
    files = [f"{name} ({fault})" for name, fault in sorted(faults.items())]
    others = f" and {len(files) - MAX_EXAMPLES:,} more" if len(files) > MAX_EXAMPLES else ""
    return ", ".join(files[:MAX_EXAMPLES]) + others


def file_columns(counts: Counts) -> dict[str, Callable[[str | None], Text]]:
    """Return columns that show the files read and not read: what to write in them for a source, or for all."""
    columns: dict[str, Callable[[str | None], Text]] = {}
    if counts.total(READ).files:
        columns["files"] = lambda source: Text(f"{counts.total(READ, source).files:,}")
    if counts.unread_files():
        columns["files not read"] = lambda source: Text(counts.unread_files(source))
    return columns


def check_max_failed(limit: float) -> None:
    """Raise UsageError unless a limit for check_failed is a fraction below 1."""
    if not 0 <= limit < 1:
        raise UsageError(f"--max_failed {limit}: expected a fraction of 0 or more and less than 1, such as 0.001")
