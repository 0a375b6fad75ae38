"""HarvestedFiles: the files that harvest_corpus wrote into a folder, which alone it may replace."""

import hashlib
from pathlib import Path

from gristmill.errors import UsageError, wrap_write_errors
from gristmill.storage.local import atomic_write_bytes

MARKER = ".harvest"  # a line for each file, written before it: its SHA-256 and its name


class HarvestedFiles:
    """The files of a folder with a marker, or of a new one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.marker = folder, folder / MARKER
        self.lines = set(self.marker.read_bytes().splitlines()) if self.marker.exists() else set[bytes]()

    def replace(self, path: Path, data: bytes | None) -> None:
        """Write a file, if that changes it, or remove it if `data` is None; UsageError for a file of someone else's."""
        old = path.read_bytes() if path.exists() else None
        if old is not None and old != data and self._line(path, old) not in self.lines:
            raise UsageError(f"{path} was not written by this command, or changed since: move it elsewhere")
        with wrap_write_errors(path):
            if data is None:
                path.unlink()
            elif old != data:
                self.folder.mkdir(parents=True, exist_ok=True)
                with self.marker.open("ab") as file:
                    file.write(self._line(path, data) + b"\n")
                atomic_write_bytes(path, data)

    def _line(self, path: Path, data: bytes) -> bytes:
        return f"{hashlib.sha256(data).hexdigest()}  {path.relative_to(self.folder)}".encode()
