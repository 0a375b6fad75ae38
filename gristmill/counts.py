"""Counts of documents and bytes, by source and reason, which must balance: what is read is accounted for.

A stage counts a document when it reads it and again where it leaves it: written, or dropped for a
reason. `read + repeated = everything else`, per source, or documents went missing and the stage
fails. Bytes are UTF-8 bytes of text (of the raw line, for a malformed record).
"""

from collections.abc import Iterator
from typing import Self

import msgspec
from rich.table import Table
from rich.text import Text

from gristmill.errors import ConservationError, TooManyMalformed

READ = "read"
WRITTEN = "written"
REPEATED = "repeated"  # a weight above 1 writes a document more than once
CHANGED = "changed"  # no document, only bytes: what normalisation made longer or shorter
MALFORMED = "malformed"
INCOMING = (READ, REPEATED)
EXAMPLES = 5  # malformed records named in an error


class Tally(msgspec.Struct):
    """So many documents of so many bytes."""

    documents: int = 0
    bytes: int = 0

    def add(self, documents: int, size: int) -> None:
        self.documents += documents
        self.bytes += size


class Counts(msgspec.Struct):
    """`tallies[source][reason]`, and where the first malformed records stand.

    >>> counts = Counts()
    >>> counts.add("book", READ, 120)
    >>> counts.add("book", WRITTEN, 120)
    >>> counts.check_conserved("a stage")["book"]
    (1, 1)
    """

    tallies: dict[str, dict[str, Tally]] = {}
    examples: list[str] = []

    def add(self, source: str, reason: str, size: int, documents: int = 1) -> None:
        """Count `documents` of `size` bytes in all under a source and a reason."""
        self.tallies.setdefault(source, {}).setdefault(reason, Tally()).add(documents, size)

    def add_example(self, text: str) -> None:
        """Name a malformed record; the first few are kept."""
        if len(self.examples) < EXAMPLES:
            self.examples.append(text)

    def merge(self, other: "Counts") -> Self:
        """Add another's counts to these."""
        for source, reason, tally in other.rows():
            self.add(source, reason, tally.bytes, tally.documents)
        self.examples = (self.examples + other.examples)[:EXAMPLES]
        return self

    def rows(self) -> Iterator[tuple[str, str, Tally]]:
        """Every (source, reason, tally)."""
        for source, reasons in sorted(self.tallies.items()):
            for reason, tally in reasons.items():
                yield source, reason, tally

    def total(self, reason: str, source: str | None = None) -> Tally:
        """Documents and bytes of one reason, over one source or all."""
        found = Tally()
        for where, why, tally in self.rows():
            if why == reason and source in (None, where):
                found.add(tally.documents, tally.bytes)
        return found

    @property
    def malformed(self) -> int:
        """Records that are no documents, whatever the reason."""
        return sum(tally.documents for _, reason, tally in self.rows() if reason.startswith(MALFORMED))

    @property
    def reasons(self) -> list[str]:
        """Every reason in use, gains first, then in order of appearance."""
        seen = dict.fromkeys(INCOMING) | dict.fromkeys(reason for _, reason, _ in self.rows())
        return [reason for reason in seen if self.total(reason).documents]

    def check_conserved(self, stage: str) -> dict[str, tuple[int, int]]:
        """Documents that came in and that are accounted for, per source; ConservationError if they differ."""
        sides = {}
        for source in self.tallies:
            came = self._sum(source, gains=True)
            went = self._sum(source, gains=False)
            if came != went:
                raise ConservationError(
                    f"{stage}: source {source!r} does not add up: {came.documents:,} documents ({came.bytes:,} bytes) "
                    f"came in, {went.documents:,} ({went.bytes:,} bytes) are accounted for. "
                    "Nothing of this result can be trusted; please report it with the ledger beside the output."
                )
            sides[source] = (came.documents, went.documents)
        return sides

    def _sum(self, source: str, gains: bool) -> Tally:
        found = Tally()
        for reason, tally in self.tallies[source].items():
            if (reason in INCOMING) == gains:
                found.add(tally.documents, tally.bytes)
        return found

    def check_malformed(self, stage: str, limit: float) -> None:
        """TooManyMalformed when more than `limit` (a fraction) of the records read are malformed."""
        read = self.total(READ).documents
        if self.malformed > limit * read:
            raise TooManyMalformed(
                f"{stage}: {self.malformed:,} of {read:,} records are malformed ({self.malformed / read:.2%}), "
                f"more than --max_malformed {limit:.2%} allows. The first: {'; '.join(self.examples)}. "
                "They are kept in the *.malformed files beside the output. Mend the input, or raise --max_malformed."
            )

    def __rich__(self) -> Table:
        """Documents per source and reason."""
        table = Table("source", *self.reasons, box=None, header_style="bold", pad_edge=False)
        for column in table.columns[1:]:
            column.justify = "right"
        for source, found in sorted(self.tallies.items()):
            table.add_row(Text(source), *(f"{found.get(reason, Tally()).documents:,}" for reason in self.reasons))
        if len(self.tallies) > 1:
            table.add_row("all", *(f"{self.total(reason).documents:,}" for reason in self.reasons), style="bold")
        return table
