"""The funnel: where every document of a run went, per source, adding up exactly."""

from pathlib import Path

import msgspec
from rich.table import Table
from rich.text import Text
from tyro.conf import Positional

from gristmill.counts import INCOMING, READ, WRITTEN, Counts, Tally
from gristmill.errors import ConservationError, UsageError
from gristmill.io.files import atomic_write_bytes
from gristmill.io.token_shards import Manifest

FILE = "funnel.json"
TRAIN = "train"
HELD_OUT = "holdout"


class Funnel(msgspec.Struct):
    """`funnel.json`: per source, documents and bytes in, what left and why, what remains, and tokens.

    For each source `read + repeated` equals the sum of all other entries of `went`, in documents and in bytes.
    """

    went: dict[str, dict[str, Tally]]
    tokens: dict[str, dict[str, int]]

    def save(self, folder: Path) -> None:
        atomic_write_bytes(folder / FILE, msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")

    def __rich__(self) -> Table:
        counts = Counts(self.went, [])
        lost = [reason for reason in counts.reasons if reason not in (*INCOMING, TRAIN, HELD_OUT)]
        gained = [reason for reason in INCOMING if reason in counts.reasons]
        columns = [*gained, *lost, HELD_OUT, TRAIN]
        table = Table("source", *(f"{_sign(name)}{name}" for name in columns), title="funnel: documents", box=None)
        for name in ("MB in", "MB train", "tokens train"):
            table.add_column(name)
        for column in table.columns[1:]:
            column.justify = "right"
        for source in [*sorted(self.went), None]:
            cells = [f"{counts.total(name, source).documents:,}" for name in columns]
            sizes = [f"{counts.total(name, source).bytes / 1e6:,.2f}" for name in (READ, TRAIN)]
            tokens = sum(self.tokens[TRAIN].get(s, 0) for s in ([source] if source else self.tokens[TRAIN]))
            table.add_row(Text(source or "all"), *cells, *sizes, f"{tokens:,}", style="" if source else "bold")
        return table


def show_funnel(out: Positional[Path]) -> Funnel:
    """Print the funnel of a finished run.

    Args:
        out: The folder that `gristmill run` wrote to.
    """
    path = out / FILE
    if not path.is_file():
        raise UsageError(f"{path}: wanted the funnel of a run, and there is none: let `gristmill run` end first")
    return msgspec.json.decode(path.read_bytes(), type=Funnel)


def build_funnel(
    normalized: Counts, mixed: Counts, split: Counts, cleaned: Counts, manifests: dict[str, Manifest]
) -> Funnel:
    """Join the books of the stages that drop documents. ConservationError unless they add up."""
    whole = Counts({}, [])
    for stage, skipped in (
        (normalized, (WRITTEN,)),
        (mixed, (READ, WRITTEN)),
        (split, (READ, WRITTEN)),
        (cleaned, (READ,)),
    ):
        for source, reason, tally in stage.rows():
            if reason not in skipped:
                whole.add(source, TRAIN if reason == WRITTEN else reason, tally.bytes, tally.documents)
    whole.check_conserved("the whole run")
    tokens = {
        name: {source: record.tokens for source, record in manifest.sources.items()}
        for name, manifest in manifests.items()
    }
    return Funnel(whole.tallies, tokens)


def check_handover(giver: str, given: Counts, reason: str, taker: str, taken: Counts, sizes: bool = True) -> None:
    """ConservationError unless what one stage let through is, source by source, what the next one read."""
    for source in sorted({*given.tallies, *taken.tallies}):
        out, into = given.total(reason, source), taken.total(READ, source)
        if (out.documents, out.bytes * sizes) != (into.documents, into.bytes * sizes):
            raise ConservationError(
                f"between {giver} and {taker}, source {source!r}: {out.documents:,} documents ({out.bytes:,} bytes) "
                f"were handed over and {into.documents:,} ({into.bytes:,} bytes) were read. Was a file in between "
                "changed by hand? Remove it and run again"
            )


def _sign(name: str) -> str:
    if name in (TRAIN, HELD_OUT):
        return "= "
    return "" if name == READ else "+ " if name in INCOMING else "- "
