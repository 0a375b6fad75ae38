"""Store: a kind of place where files are, and what can be done there; `stores.store_of` chooses the one of a path.

A local disk, buckets and the Hugging Face Hub are stores. A caller asks the store of a path to do something. Where it
must know what a store can do, as it chooses between two ways of working, it asks for one of the capabilities.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Protocol

from gristmill.storage.listings import FileInfo, Level

HIDDEN = "hidden"  # reasons why a file cannot be read
LOOP = "link to a parent folder"
DANGLING = "dangling link"
SPECIAL = "not a regular file"


class Found(NamedTuple):
    """A file, its size in bytes, and '' or the reason why it cannot be read; a hidden folder counts as one file."""

    path: Path
    size: int
    reason: str = ""


class Store(Protocol):
    """A kind of place where files are.

    Attributes:
        needs_copies: Nothing but a request can open a file there: tasks work on copies on a local disk, and what is
            read or written costs a transfer.
        has_file_locks: The operating system locks files there, for several processes at a time if they like, and
            unlocks them when a process dies. Else a lock is a lease of one process.
        requests_at_a_time: How many small files are best read at a time.
        poll_seconds: How long to wait between two looks at what other processes write there.
    """

    needs_copies: bool
    has_file_locks: bool
    requests_at_a_time: int
    poll_seconds: float

    def resolve(self, path: Path) -> Path:
        """Return the path without links, the same in every working folder."""

    def find_file(self, path: Path) -> FileInfo | None:
        """Return the size and version of a file; None if there is none."""

    def is_file(self, path: Path) -> bool:
        """Return whether there is a file of this name."""

    def is_folder(self, path: Path) -> bool:
        """Return whether there is a folder of this name."""

    def list_level(self, folder: Path) -> Level:
        """Return the names of the folders, and the files, directly in a folder."""

    def list_names(self, folder: Path) -> list[str]:
        """Return the names of the files and folders directly in a folder."""

    def walk(self, folder: Path) -> Iterator[Path]:
        """Yield every file below `folder`, if there is one, by name; skip hidden files and folders."""

    def walk_all(self, folder: Path, skipped: str) -> Iterator[Found]:
        """Yield every file below a folder, unreadable ones, too, except in folders called `skipped`."""

    def folders_with(self, folder: Path, name: str) -> Iterator[Path]:
        """Yield the folders that have a folder called `name` directly in them, from `folder` on down."""

    def refresh(self, folder: Path) -> None:
        """Forget what is known of a data set that changes rarely, of which listings are kept."""

    def list_once(self, folder: Path) -> AbstractContextManager[None]:
        """Context: a folder whose listing costs requests is listed once, whoever asks."""

    def read(self, path: Path) -> bytes:
        """Return a small file's bytes. Raise FileNotFoundError, or InputError if it cannot be read."""

    def hash_file(self, path: Path) -> str:
        """Return the SHA-256 of a file's bytes, in hexadecimal."""

    def copy_first_bytes(self, path: Path, size: int, folder: Path) -> Path:
        """Return a local file that begins with at least `size` bytes of a file: the file itself, or one in `folder`."""

    def reject_writes(self, path: Path) -> None:
        """Raise UsageError if the store is one that is only read."""

    def check_writable(self, folder: Path) -> None:
        """Raise UsageError or OutputError if it is known without a request that `folder` cannot be written."""

    def write(self, path: Path, data: bytes) -> None:
        """Write a small file atomically."""

    def write_unflushed(self, path: Path, data: bytes) -> None:
        """Write a small file atomically, but leave open when it reaches the disk: a power cut may empty it."""

    def create(self, path: Path, data: bytes) -> bool:
        """Write a small file and return True if there is none of this name, else return False."""

    def remove(self, paths: Iterable[Path], root: Path | None) -> None:
        """Remove files, and the folders in `root` that are empty then, if a folder can be empty there."""

    def remove_folder(self, folder: Path) -> None:
        """Remove a folder with all that is in it, if it is there."""

    def remove_partial_files(self, folder: str, names: Collection[str]) -> None:
        """Remove what interrupted attempts to write files called `names` in a folder have left."""

    def remove_if_unused(self, folder: Path) -> None:
        """Remove all temporary files in a folder, and the folder if it is empty then."""

    def locked(self, path: Path) -> AbstractContextManager[None]:
        """Context: hold a lock among the processes of this machine, where several of them may write at a time."""
