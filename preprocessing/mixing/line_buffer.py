"""A buffer of lines: in memory while they are few, beyond that in a temporary file, whose pages the system may drop."""

import io
import mmap
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import numpy as np
from numpy.typing import NDArray


class LineBuffer:
    """Bytes, appended piece by piece and read as a whole; a file without a name in `folder` if they exceed `room`.

    `room` None: they are always in memory. To be closed.
    """

    def __init__(self, folder: Path, room: int | None) -> None:
        self.size = 0
        self._folder, self._room = folder, room
        self._stored: io.BytesIO | IO[bytes] = io.BytesIO()

    def append(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        size = self.size + len(data)
        if self._room is not None and size > self._room and isinstance(self._stored, io.BytesIO):
            self._move_to_file(self._stored)
        self._stored.write(data)
        self.size = size

    def view(self) -> NDArray[np.uint8]:
        """All bytes (size), without a copy; read them before the next call of `append` or `clear`."""
        if isinstance(self._stored, io.BytesIO):
            return np.frombuffer(self._stored.getbuffer(), np.uint8)
        if not self.size:
            return np.empty(0, np.uint8)  # no bytes cannot be mapped
        self._stored.flush()
        return np.frombuffer(mmap.mmap(self._stored.fileno(), self.size, access=mmap.ACCESS_READ), np.uint8)

    def clear(self) -> None:
        """Forget all bytes; a file is written again from its beginning."""
        self.size = 0
        if isinstance(self._stored, io.BytesIO):
            self._stored = io.BytesIO()  # one that is viewed cannot shrink
        else:
            self._stored.seek(0)

    def close(self) -> None:
        """Remove the file; memory goes with the last view of it."""
        if not isinstance(self._stored, io.BytesIO):
            self._stored.close()

    def _move_to_file(self, memory: io.BytesIO) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._stored = TemporaryFile(dir=self._folder)  # noqa: SIM115 (until close)
        self._stored.write(memory.getbuffer()[: self.size])
