"""Files, local or in buckets, under one set of functions; which of the two follows from the path (see paths.py)."""

import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

from gristmill.errors import UsageError, wrap_read_errors, wrap_write_errors
from gristmill.paths import absolute, is_remote, object_name, unknown_scheme
from gristmill.storage import objects
from gristmill.storage.listings import FileInfo as FileInfo
from gristmill.storage.listings import Level
from gristmill.storage.local import atomic_write_bytes, locked, sha256_file

_THREADS = 32  # requests at a time
_UPLOADS = 8  # at a time, of files that are held in memory
HIDDEN = "hidden"  # reasons why a file cannot be read
LOOP = "link to a parent folder"
DANGLING = "dangling link"
SPECIAL = "not a regular file"


def reject_unknown_scheme(path: Path) -> None:
    """Raise UsageError if a path looks like a URL of another scheme than SCHEMES."""
    if fault := unknown_scheme(path):
        raise UsageError(fault)


def reject_remote(*paths: Path) -> None:
    """Raise UsageError if one of the paths is in a bucket, or of an unknown scheme, where only local files will do."""
    for path in paths:
        reject_unknown_scheme(path)
        if is_remote(path):
            raise UsageError(f"{object_name(path).url}: expected a folder of this machine")


def file_info(path: Path) -> FileInfo | None:
    """Size and version of a file; None if there is none. Links are followed."""
    if is_remote(path):
        return objects.find_object(path)
    try:
        found = path.stat()
    except OSError:
        return None
    return None if stat.S_ISDIR(found.st_mode) else FileInfo(found.st_size, found.st_mtime_ns)


def is_file(path: Path) -> bool:
    """Whether there is a file of this name. Raises InputError if the folder that it would be in cannot be searched."""
    if is_remote(path):
        return file_info(path) is not None
    with wrap_read_errors(path):
        return path.is_file()


def is_folder(path: Path) -> bool:
    """Whether there is a folder of this name: for objects, whether a name begins with it and a slash.

    Raises InputError if the folder that it would be in cannot be searched.
    """
    if not is_remote(path):
        with wrap_read_errors(path):
            return path.is_dir()
    return next(objects.list_objects(path), None) is not None


def exists(path: Path) -> bool:
    """Whether there is a file or a folder of this name."""
    return is_file(path) or is_folder(path)


def resolved(path: Path) -> Path:
    """The path without links, the same in every working folder."""
    return Path("/", *Path(object_name(path).url).parts) if is_remote(path) else path.resolve()


def list_level(folder: Path) -> Level:
    """The names of the folders, and the files, directly in a folder; nothing if there is no such folder.

    Links are followed; one to nothing is left out. Raises InputError if the folder cannot be read.
    """
    if is_remote(folder):
        return objects.list_level(folder)
    folders, files = list[str](), dict[str, FileInfo]()
    with wrap_read_errors(folder), suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                status = entry.stat()
                if stat.S_ISREG(status.st_mode):
                    files[entry.name] = FileInfo(status.st_size, status.st_mtime_ns)
                elif stat.S_ISDIR(status.st_mode):
                    folders.append(entry.name)
    return folders, files


def list_folder(folder: Path) -> dict[str, FileInfo]:
    """The files directly in a folder, as list_level."""
    return list_level(folder)[1]


def list_names(folder: Path) -> list[str]:
    """The names of the files and folders directly in a folder; nothing if there is no such folder.

    Raises InputError if it cannot be read.
    """
    if is_remote(folder):
        folders, files = objects.list_level(folder)
        return [*folders, *files]
    with wrap_read_errors(folder), suppress(FileNotFoundError, NotADirectoryError):
        return os.listdir(folder)  # noqa: PTH208  # a path of each would take ten times the memory
    return []


def read_file(path: Path) -> bytes:
    """A small file's bytes. Raises FileNotFoundError, and InputError if it cannot be read."""
    if is_remote(path):
        return objects.read_object(path)[0]
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError:
        with wrap_read_errors(path):
            raise


def read_files(paths: Iterable[Path]) -> Iterator[bytes]:
    """The bytes of small files, in order; those that are gone are left out."""
    paths = list(paths)
    if not any(map(is_remote, paths)):
        yield from (data for path in paths if (data := _read_if_there(path)) is not None)
        return
    with ThreadPoolExecutor(_THREADS) as pool:
        yield from (data for data in pool.map(_read_if_there, paths) if data is not None)


def upload_files(copies: Mapping[Path, Path]) -> dict[Path, FileInfo]:
    """Put local files under the names of objects, several at a time; return their FileInfo.

    `copies` are the files by object. Large ones are put one at a time, each in several parts at a time. If some cannot
    be put, the first error in the order of `copies` is raised, those of large ones last, and what waits is not put.
    """
    large = {path: None for path, copy in copies.items() if copy.stat().st_size > objects.PART_BYTES}
    small = [path for path in copies if path not in large]
    done = dict[Path, FileInfo]()
    if small:
        with ThreadPoolExecutor(min(_UPLOADS, len(small))) as pool:
            done |= zip(small, pool.map(lambda path: objects.upload(copies[path], path), small), strict=True)
    return done | {path: objects.upload(copies[path], path) for path in large}


def hash_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hexadecimal. Raises InputError if it cannot be read."""
    with wrap_read_errors(path):
        return objects.hash_object(path) if is_remote(path) else sha256_file(path)


def write_file(path: Path, data: bytes) -> None:
    """Write a small file atomically."""
    if is_remote(path):
        objects.write_object(path, data)
    else:
        atomic_write_bytes(path, data)


def reject_read_only(paths: Iterable[Path]) -> None:
    """Raise UsageError if one of the paths, where something is to be written, is on the Hugging Face Hub."""
    for name in (object_name(path) for path in paths if is_remote(path)):
        if name.scheme == "hf":
            raise UsageError(f"cannot write {name.url}: {objects.READ_ONLY}")


def create_file(path: Path, data: bytes) -> bool:
    """Write a small file if there is none of this name, else return False: only one of several processes succeeds.

    Raises FileNotFoundError if a local folder is not there.
    """
    if is_remote(path):
        return objects.swap_object(path, data, None) is not None
    try:
        with path.open("xb") as file:
            file.write(data)
    except FileExistsError:
        return False
    return True


def remove_files(paths: Iterable[Path], root: Path | None = None) -> None:
    """Remove files, and the folders in `root` that are empty then; those that are not there are no error."""
    paths, top = list(paths), absolute(root) if root else None
    objects.delete_objects(filter(is_remote, paths))
    for path in paths:
        if not is_remote(path):
            with wrap_write_errors(path):
                path.unlink(missing_ok=True)
            with suppress(OSError):  # a folder that is not empty
                for folder in absolute(path).parents:
                    if top not in folder.parents:
                        break
                    folder.rmdir()


def remove_folder(folder: Path) -> None:
    """Remove a folder with all that is in it, if it is there."""
    if is_remote(folder):
        objects.delete_objects([folder / name for name, _ in objects.list_objects(folder)])
    else:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Context: a lock among the processes of this machine; none in a bucket, where one process at a time writes."""
    with nullcontext() if is_remote(path) else locked(path):
        yield


def _read_if_there(path: Path) -> bytes | None:
    try:
        return read_file(path)
    except FileNotFoundError:
        return None


class Found(NamedTuple):
    """A file, its size in bytes, and '' or the reason why it cannot be read; a hidden folder counts as one file."""

    path: Path
    size: int
    reason: str = ""


def walk(folder: Path) -> Iterator[Path]:
    """Yield every file below `folder`, if there is one, by name; follow links, skip hidden files and folders."""
    if is_remote(folder):
        objects.refresh(folder)
    elif not folder.is_dir():
        return
    yield from (found.path for found in walk_all(folder) if found.reason not in (HIDDEN, LOOP))


def walk_all(folder: Path, skipped: str = "/") -> Iterator[Found]:
    """Yield every file below a folder, those that cannot be read included, except in folders called `skipped`."""
    if is_remote(folder):
        yield from _found_objects(folder, skipped, objects.list_objects(folder))
        return
    with wrap_read_errors(folder):
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    for entry in entries:
        path = folder / entry.name
        if entry.name == skipped:
            continue
        with wrap_read_errors(path):
            found = _look_at(entry, path)
        if found:
            yield found
        else:
            yield from walk_all(path, skipped)


def _look_at(entry: os.DirEntry[str], path: Path) -> Found | None:
    """Return the kind of a folder's entry; None for a folder that is walked."""
    if entry.name.startswith("."):
        return _unread(path, HIDDEN)
    if entry.is_symlink() and not path.exists():  # entry.is_dir() raises an OSError for a link to itself
        return _unread(path, DANGLING)
    if not entry.is_dir():
        return Found(path, entry.stat().st_size) if entry.is_file() else _unread(path, SPECIAL)
    return _unread(path, LOOP) if is_link_to_parent(path) else None


def is_link_to_parent(folder: Path) -> bool:
    """Whether a folder is a link to one of its own parents, which would be walked forever."""
    return folder.is_symlink() and folder.resolve() in (parent.resolve() for parent in folder.absolute().parents)


def _found_objects(folder: Path, skipped: str, listed: Iterable[tuple[str, FileInfo]]) -> Iterator[Found]:
    for name, info in listed:
        parts = name.split("/")
        if skipped in parts[:-1] or not name:
            continue
        hidden = any(part.startswith(".") for part in parts)
        if not name.endswith("/"):  # an empty object of this name marks a folder
            yield Found(folder / name, info.size, HIDDEN if hidden else "")


def _unread(path: Path, reason: str) -> Found:
    return Found(path, path.lstat().st_size, reason)
