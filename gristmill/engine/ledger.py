"""The ledger of a stage: a .jsonl file with a line per finished task: fingerprint, outputs and counts."""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from gristmill.counts import Counts
from gristmill.errors import wrap_write_errors


class LedgerEntry(msgspec.Struct):
    """A finished task. `outputs`: size in bytes by absolute path; the file has relative paths: folders can move."""

    task: str
    fingerprint: str
    outputs: dict[str, int]
    counts: Counts


class Ledger:
    """Append-only file of entries; the last entry of a task is the valid one.

    Several processes may append at once (SlimPajama's users start one per data set): each line is
    written in one call, and a line cut short by a kill is skipped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, LedgerEntry]:
        """The last entry of each task, by task name; none if there is no file."""
        if not self.path.exists():
            return {}
        entries = (_decode(line) for line in self.path.read_bytes().splitlines())
        return {entry.task: self._convert_paths(entry, os.path.join) for entry in entries if entry}

    def append(self, entry: LedgerEntry) -> None:
        """Append an entry. Raises OutputError if the file cannot be written."""
        relative = self._convert_paths(entry, lambda folder, path: os.path.relpath(path, folder))
        with wrap_write_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab", buffering=0) as file:
                # Begin on a new line: the last one may have been cut short.
                file.write(b"\n" + msgspec.json.encode(relative) + b"\n")

    def _convert_paths(self, entry: LedgerEntry, convert: Callable[[str, str], str]) -> LedgerEntry:
        folder = os.path.abspath(self.path.parent)
        outputs = {os.path.normpath(convert(folder, path)): size for path, size in entry.outputs.items()}
        return LedgerEntry(entry.task, entry.fingerprint, outputs, entry.counts)


def _decode(line: bytes) -> LedgerEntry | None:
    try:
        return msgspec.json.decode(line, type=LedgerEntry)
    except msgspec.DecodeError:
        return None
