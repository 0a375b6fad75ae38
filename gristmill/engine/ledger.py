"""The ledger of a stage: a line for each finished task, with its fingerprint, outputs and counts."""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from gristmill.counts import Counts
from gristmill.errors import writing


class Entry(msgspec.Struct):
    """One finished task in a ledger."""

    task: str
    fingerprint: str
    outputs: dict[str, int]  # absolute path (in the file: relative to it, so that a folder can move) → size
    counts: Counts


class Ledger:
    """An append-only file of entries; the last one of a task counts.

    Several processes may append at once (SlimPajama's users start one per data set): a line is
    written in one call, and a line torn by a kill is passed over.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> dict[str, Entry]:
        """The last entry of every task."""
        if not self.path.exists():
            return {}
        entries = (_decode(line) for line in self.path.read_bytes().splitlines())
        return {entry.task: self._with_paths(entry, os.path.join) for entry in entries if entry}

    def append(self, entry: Entry) -> None:
        relative = self._with_paths(entry, lambda folder, path: os.path.relpath(path, folder))
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("ab", buffering=0) as file:
                # A torn line before ours must not swallow it: begin on a new one.
                file.write(b"\n" + msgspec.json.encode(relative) + b"\n")

    def _with_paths(self, entry: Entry, convert: Callable[[str, str], str]) -> Entry:
        folder = os.path.abspath(self.path.parent)
        outputs = {os.path.normpath(convert(folder, path)): size for path, size in entry.outputs.items()}
        return Entry(entry.task, entry.fingerprint, outputs, entry.counts)


def _decode(line: bytes) -> Entry | None:
    try:
        return msgspec.json.decode(line, type=Entry)
    except msgspec.DecodeError:
        return None
