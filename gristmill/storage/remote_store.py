"""RemoteStore: what buckets and the Hugging Face Hub have in common: files are reached by requests, and copied."""

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

from gristmill.errors import wrap_read_errors
from gristmill.paths import object_name
from gristmill.storage.listings import FileInfo
from gristmill.storage.objects import Chunks, read_chunks
from gristmill.storage.store import HIDDEN, LOOP, Found, Store


class RemoteStore(Store):
    """Files that are reached by requests."""

    needs_copies = True
    has_file_locks = False
    requests_at_a_time = 32
    poll_seconds = 2.0

    @abstractmethod
    def chunks(self, path: Path, start: int = 0, end: int | None = None) -> Chunks:
        """Return the bytes of a file from `start` to `end`, in chunks, as they come."""

    @abstractmethod
    def list_all(self, folder: Path) -> Iterator[tuple[str, FileInfo]]:
        """Yield every file below a folder: its name relative to the folder, sorted, and its FileInfo."""

    @abstractmethod
    def upload(self, copies: Mapping[Path, Path]) -> dict[Path, FileInfo]:
        """Write local files, given by their new paths, several at a time; return their FileInfo."""

    def download(self, path: Path, target: Path, start: int = 0, end: int | None = None) -> FileInfo:
        """Write a file's bytes from `start` to `end` to the same offsets of the local file `target`.

        The file is made if there is none; a hole before `start` takes no space. Raises FileNotFoundError.
        """
        return self.chunks(path, start, end).write_to(target)

    def resolve(self, path: Path) -> Path:
        """See Store."""
        return Path("/", *Path(object_name(path).url).parts)

    def is_file(self, path: Path) -> bool:
        """See Store."""
        return self.find_file(path) is not None

    def is_folder(self, path: Path) -> bool:
        """See Store: whether a name begins with it and a slash."""
        return next(self.list_all(path), None) is not None

    def list_names(self, folder: Path) -> list[str]:
        """See Store."""
        folders, files = self.list_level(folder)
        return [*folders, *files]

    def walk(self, folder: Path) -> Iterator[Path]:
        """See Store."""
        self.refresh(folder)
        for file in self.walk_all(folder, "/"):
            if file.reason not in (HIDDEN, LOOP):
                yield file.path

    def walk_all(self, folder: Path, skipped: str) -> Iterator[Found]:
        """See Store."""
        for name, info in self.list_all(folder):
            parts = name.split("/")
            if skipped in parts[:-1] or not name:
                continue
            is_hidden = any(part.startswith(".") for part in parts)
            if not name.endswith("/"):  # an empty object of this name marks a folder
                yield Found(folder / name, info.size, HIDDEN if is_hidden else "")

    def folders_with(self, folder: Path, name: str) -> Iterator[Path]:
        """See Store; from one listing."""
        inside = f"{name}/"
        parents = set[str]()
        for file, _ in self.list_all(folder):
            if inside in file:
                parents.add(file.rpartition(inside)[0])
        for parent in sorted(parents):
            yield folder / parent

    def read(self, path: Path) -> bytes:
        """See Store."""
        data, _ = read_chunks(partial(self.chunks, path))
        return data

    def hash_file(self, path: Path) -> str:
        """See Store. Raises InputError if it is not there."""
        with wrap_read_errors(path):
            return self.chunks(path).sha256()

    def copy_first_bytes(self, path: Path, size: int, folder: Path) -> Path:
        """See Store; a copy of these bytes."""
        copy = folder / path.name
        self.download(path, copy, 0, size)
        return copy

    def check_writable(self, folder: Path) -> None:
        """See Store; the first request that writes says what is wrong."""
        self.reject_writes(folder)

    def write_unflushed(self, path: Path, data: bytes) -> None:
        """See Store."""
        self.write(path, data)

    def remove_partial_files(self, folder: str, names: Collection[str]) -> None:
        """See Store; an interrupted write leaves nothing."""

    def remove_if_unused(self, folder: Path) -> None:
        """See Store; there are no folders without files."""

    def locked(self, path: Path) -> AbstractContextManager[None]:
        """See Store; one process at a time writes there."""
        return nullcontext()
