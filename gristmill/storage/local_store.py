"""LocalStore: the disks of this machine, and other machines' disks that are mounted here."""

import errno
import os
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

from gristmill.errors import wrap_read_errors, wrap_write_errors
from gristmill.paths import absolute
from gristmill.storage.listings import FileInfo, Level
from gristmill.storage.local import PARTIAL, atomic_write_bytes, locked, sha256_file, unique_partial_path
from gristmill.storage.store import DANGLING, HIDDEN, LOOP, SPECIAL, Found, Store


class LocalStore(Store):
    """Files that the operating system opens."""

    needs_copies = False
    has_file_locks = True
    requests_at_a_time = 1
    poll_seconds = 0.2

    def resolve(self, path: Path) -> Path:
        """See Store."""
        return path.resolve()

    def find_file(self, path: Path) -> FileInfo | None:
        """See Store; links are followed."""
        try:
            status = path.stat()
        except OSError:
            return None
        if stat.S_ISDIR(status.st_mode):
            return None
        return FileInfo(status.st_size, status.st_mtime_ns)

    def is_file(self, path: Path) -> bool:
        """See Store. Raises InputError if the folder that it would be in cannot be searched."""
        with wrap_read_errors(path):
            return path.is_file()

    def is_folder(self, path: Path) -> bool:
        """See Store. Raises InputError if the folder that it would be in cannot be searched."""
        with wrap_read_errors(path):
            return path.is_dir()

    def list_level(self, folder: Path) -> Level:
        """See Store; links are followed, and one to nothing is left out. Raises InputError if it cannot be read."""
        folders = list[str]()
        files = dict[str, FileInfo]()
        with wrap_read_errors(folder), suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
            for entry in entries:
                with suppress(OSError):
                    status = entry.stat()
                    if stat.S_ISREG(status.st_mode):
                        files[entry.name] = FileInfo(status.st_size, status.st_mtime_ns)
                    elif stat.S_ISDIR(status.st_mode):
                        folders.append(entry.name)
        return folders, files

    def list_names(self, folder: Path) -> list[str]:
        """See Store. Raises InputError if it cannot be read."""
        with wrap_read_errors(folder), suppress(FileNotFoundError, NotADirectoryError):
            return os.listdir(folder)  # noqa: PTH208  # a path of each would take ten times the memory
        return []

    def walk(self, folder: Path) -> Iterator[Path]:
        """See Store; links are followed."""
        if folder.is_dir():
            for file in self.walk_all(folder, "/"):
                if file.reason not in (HIDDEN, LOOP):
                    yield file.path

    def walk_all(self, folder: Path, skipped: str) -> Iterator[Found]:
        """See Store; links are followed, unless they lead to a folder above them."""
        with wrap_read_errors(folder):
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        for entry in entries:
            path = folder / entry.name
            if entry.name == skipped:
                continue
            with wrap_read_errors(path):
                file = _look_at(entry, path)
            if file:
                yield file
            else:
                yield from self.walk_all(path, skipped)

    def folders_with(self, folder: Path, name: str) -> Iterator[Path]:
        """See Store; hidden folders are not searched."""
        for directory, folders, _ in os.walk(folder, followlinks=True):
            if name in folders:
                yield Path(directory)
            folders[:] = [below for below in folders if _is_searched(directory, below)]

    def refresh(self, folder: Path) -> None:
        """See Store; nothing is kept."""

    def list_once(self, folder: Path) -> AbstractContextManager[None]:
        """See Store; a listing costs next to nothing."""
        return nullcontext()

    def read(self, path: Path) -> bytes:
        """See Store."""
        try:
            return path.read_bytes()
        except FileNotFoundError:
            raise
        except OSError:
            with wrap_read_errors(path):
                raise

    def hash_file(self, path: Path) -> str:
        """See Store. Raises InputError if it cannot be read."""
        with wrap_read_errors(path):
            return sha256_file(path)

    def copy_first_bytes(self, path: Path, size: int, folder: Path) -> Path:
        """See Store; the file itself."""
        return path

    def reject_writes(self, path: Path) -> None:
        """See Store."""

    def check_writable(self, folder: Path) -> None:
        """See Store. The folder, or the one above it that exists, must be one, and writable."""
        with wrap_write_errors(folder):
            above = (folder, *folder.absolute().parents)
            existing = next(path for path in above if path.exists() or path.is_symlink())
            if not existing.is_dir():
                code = errno.EEXIST if existing == folder else errno.ENOTDIR
                raise OSError(code, os.strerror(code))
            if not os.access(existing, os.W_OK | os.X_OK):
                is_read_only = os.statvfs(existing).f_flag & os.ST_RDONLY
                code = errno.EROFS if is_read_only else errno.EACCES
                raise OSError(code, os.strerror(code))

    def write(self, path: Path, data: bytes) -> None:
        """See Store."""
        atomic_write_bytes(path, data)

    def write_unflushed(self, path: Path, data: bytes) -> None:
        """See Store; the folder is made if need be."""
        temporary = unique_partial_path(path)
        with wrap_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(data)
            temporary.replace(path)

    def create(self, path: Path, data: bytes) -> bool:
        """See Store. Raises FileNotFoundError if the folder is not there."""
        try:
            with path.open("xb") as file:
                file.write(data)
        except FileExistsError:
            return False
        return True

    def remove(self, paths: Iterable[Path], root: Path | None) -> None:
        """See Store."""
        top: Path | None = None
        if root:
            top = absolute(root)
        for path in paths:
            with wrap_write_errors(path):
                path.unlink(missing_ok=True)
            with suppress(OSError):  # a folder that is not empty
                for folder in absolute(path).parents:
                    if top not in folder.parents:
                        break
                    folder.rmdir()

    def remove_folder(self, folder: Path) -> None:
        """See Store."""
        shutil.rmtree(folder, ignore_errors=True)

    def remove_partial_files(self, folder: str, names: Collection[str]) -> None:
        """See Store."""
        with suppress(FileNotFoundError, NotADirectoryError):
            for name in os.listdir(folder or "."):  # noqa: PTH208
                if name.endswith(PARTIAL) and name.rsplit(".", 2)[0] in names:
                    Path(folder, name).unlink(missing_ok=True)

    def remove_if_unused(self, folder: Path) -> None:
        """See Store."""
        partial = [name for name in self.list_names(folder) if name.endswith(PARTIAL)]
        self.remove([folder / name for name in partial], None)
        with suppress(OSError):  # there are files, or there is no folder
            folder.rmdir()

    def locked(self, path: Path) -> AbstractContextManager[None]:
        """See Store."""
        return locked(path)


def is_link_to_parent(folder: Path) -> bool:
    """Return whether a folder is a link to one of its own parents, which would be walked forever."""
    if not folder.is_symlink():
        return False
    target = folder.resolve()
    return any(parent.resolve() == target for parent in folder.absolute().parents)


def _is_searched(directory: str, name: str) -> bool:
    return not name.startswith(".") and not is_link_to_parent(Path(directory, name))


def _look_at(entry: os.DirEntry[str], path: Path) -> Found | None:
    """Return the kind of a folder's entry; None for a folder that is walked."""
    if entry.name.startswith("."):
        return _unread(path, HIDDEN)
    if entry.is_symlink() and not path.exists():  # entry.is_dir() raises an OSError for a link to itself
        return _unread(path, DANGLING)
    if entry.is_file():
        return Found(path, entry.stat().st_size)
    if not entry.is_dir():
        return _unread(path, SPECIAL)
    if is_link_to_parent(path):
        return _unread(path, LOOP)
    return None


def _unread(path: Path, reason: str) -> Found:
    return Found(path, path.lstat().st_size, reason)
