"""Files, wherever they are: each function asks the store of its path (see store.py)."""

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import groupby
from pathlib import Path

from gristmill.errors import UsageError
from gristmill.paths import object_name, unknown_scheme
from gristmill.storage.listings import FileInfo as FileInfo
from gristmill.storage.listings import Level, Tree
from gristmill.storage.store import DANGLING as DANGLING
from gristmill.storage.store import HIDDEN as HIDDEN
from gristmill.storage.store import LOOP as LOOP
from gristmill.storage.store import SPECIAL as SPECIAL
from gristmill.storage.store import Found as Found
from gristmill.storage.stores import remote_store_of, store_of


def reject_unknown_scheme(path: Path) -> None:
    """Raise UsageError if a path looks like a URL of another scheme than SCHEMES."""
    if fault := unknown_scheme(path):
        raise UsageError(fault)


def reject_remote(*paths: Path, option: str = "") -> None:
    """Raise UsageError if one of the paths is in a bucket, or of an unknown scheme, where only local files will do.

    `option` is the name of the option that gave them.
    """
    for path in paths:
        reject_unknown_scheme(path)
        if store_of(path).needs_copies:
            raise UsageError(f"{option}{option and ' '}{object_name(path).url}: expected a folder of this machine")


def reject_read_only(paths: Iterable[Path]) -> None:
    """Raise UsageError if one of the paths, where something is to be written, is on the Hugging Face Hub."""
    for path in paths:
        store_of(path).reject_writes(path)


def check_writable(folder: Path) -> None:
    """Raise UsageError or OutputError if it is known without a request that `folder` cannot be written."""
    store_of(folder).check_writable(folder)


def file_info(path: Path) -> FileInfo | None:
    """Return the size and version of a file; None if there is none. Links are followed."""
    return store_of(path).find_file(path)


def is_file(path: Path) -> bool:
    """Return whether there is a file of this name.

    Raises InputError if the folder that it would be in cannot be searched.
    """
    return store_of(path).is_file(path)


def is_folder(path: Path) -> bool:
    """Return whether there is a folder of this name: for objects, whether a name begins with it and a slash.

    Raises InputError if the folder that it would be in cannot be searched.
    """
    return store_of(path).is_folder(path)


def exists(path: Path) -> bool:
    """Return whether there is a file or a folder of this name."""
    return is_file(path) or is_folder(path)


def resolved(path: Path) -> Path:
    """Return the path without links, the same in every working folder."""
    return store_of(path).resolve(path)


def list_level(folder: Path) -> Level:
    """Return the names of the folders, and the files, directly in a folder; nothing if there is no such folder.

    Links are followed; one to nothing is left out. Raises InputError if the folder cannot be read.
    """
    return store_of(folder).list_level(folder)


def list_tree(folder: Path) -> Tree | None:
    """Return all that is below a folder in a bucket, from one listing; None on a disk, which lists folder by folder."""
    if not store_of(folder).needs_copies:
        return None
    return Tree(remote_store_of(folder).list_all(folder))


def list_folder(folder: Path) -> dict[str, FileInfo]:
    """Return the files directly in a folder, as list_level."""
    return list_level(folder)[1]


def list_names(folder: Path) -> list[str]:
    """Return the names of the files and folders directly in a folder; nothing if there is no such folder.

    Raises InputError if it cannot be read.
    """
    return store_of(folder).list_names(folder)


def folders_with(folder: Path, name: str) -> Iterator[Path]:
    """Yield the folders that have a folder called `name` directly in them, from `folder` on down."""
    return store_of(folder).folders_with(folder, name)


def names_ending(folder: Path, suffix: str) -> list[str]:
    """Return the names directly in a folder that end so, ascending; see list_names."""
    return sorted(name for name in list_names(folder) if name.endswith(suffix))


def walk(folder: Path) -> Iterator[Path]:
    """Yield every file below `folder`, if there is one, by name; follow links, skip hidden files and folders."""
    return store_of(folder).walk(folder)


def walk_all(folder: Path, skipped: str = "/") -> Iterator[Found]:
    """Yield every file below a folder, unreadable ones, too, except in folders called `skipped`."""
    return store_of(folder).walk_all(folder, skipped)


def refresh(folder: Path) -> None:
    """Look at a dataset on the Hub anew, of which listings are kept."""
    store_of(folder).refresh(folder)


@contextmanager
def listed_once(*folders: Path) -> Iterator[None]:
    """Context: each folder in a bucket is listed once, whoever asks; what is written there in the meantime is not seen.

    `listings.list_kept_again` has them listed once more.
    """
    with ExitStack() as stack:
        for folder in folders:
            stack.enter_context(store_of(folder).list_once(folder))
        yield


def read_file(path: Path) -> bytes:
    """Return a small file's bytes. Raises FileNotFoundError, and InputError if it cannot be read."""
    return store_of(path).read(path)


def read_files(paths: Iterable[Path]) -> Iterator[bytes]:
    """Yield the bytes of small files, in order, without the files that are gone."""
    paths = list(paths)
    requests = max((store_of(path).requests_at_a_time for path in paths), default=1)
    if requests == 1:
        contents: Iterable[bytes | None] = map(_read_if_there, paths)
        yield from _without_none(contents)
        return
    with ThreadPoolExecutor(requests) as pool:
        yield from _without_none(pool.map(_read_if_there, paths))


def _without_none(contents: Iterable[bytes | None]) -> Iterator[bytes]:
    for content in contents:
        if content is not None:
            yield content


def _read_if_there(path: Path) -> bytes | None:
    try:
        return read_file(path)
    except FileNotFoundError:
        return None


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hexadecimal. Raises InputError if it cannot be read."""
    return store_of(path).hash_file(path)


def copy_first_bytes(path: Path, size: int, folder: Path) -> Path:
    """Return a local file that begins with at least `size` bytes of a file: the file itself, or one in `folder`."""
    return store_of(path).copy_first_bytes(path, size, folder)


def download(path: Path, target: Path, start: int = 0, end: int | None = None) -> FileInfo:
    """Write a remote file's bytes from `start` to `end` to the same offsets of the local file `target`.

    The file is made if there is none; a hole before `start` takes no space. Raises FileNotFoundError.
    """
    return remote_store_of(path).download(path, target, start, end)


def upload_files(copies: Mapping[Path, Path]) -> dict[Path, FileInfo]:
    """Write local files, given by their new paths in buckets, several at a time; return their FileInfo."""
    done = dict[Path, FileInfo]()
    for store, paths in groupby(copies, remote_store_of):
        done |= store.upload({path: copies[path] for path in paths})
    return done


def write_file(path: Path, data: bytes) -> None:
    """Write a small file atomically."""
    store_of(path).write(path, data)


def write_unflushed(path: Path, data: bytes) -> None:
    """Write a small file atomically, but leave open when it reaches the disk: a power cut may empty it."""
    store_of(path).write_unflushed(path, data)


def create_file(path: Path, data: bytes) -> bool:
    """Write a small file if there is none of this name, else return False: only one of several processes succeeds.

    Raises FileNotFoundError if a local folder is not there.
    """
    return store_of(path).create(path, data)


def remove_files(paths: Iterable[Path], root: Path | None = None) -> None:
    """Remove files, and the folders in `root` that are empty then; a missing file is no error."""
    for store, together in groupby(list(paths), store_of):
        store.remove(together, root)


def remove_folder(folder: Path) -> None:
    """Remove a folder with all that is in it, if it is there."""
    store_of(folder).remove_folder(folder)


def remove_partial_files(paths: Iterable[Path | str]) -> None:
    """Remove the temporary files of interrupted attempts to write `paths`; objects have none.

    Only for a process that excludes all others which may be writing `paths`, as by the lock of their stage.
    """
    names_in = defaultdict[str, set[str]](set)
    for folder, name in map(os.path.split, paths):
        names_in[folder].add(name)
    for folder, names in names_in.items():
        store_of(folder).remove_partial_files(folder, names)


def remove_if_unused(folder: Path) -> None:
    """Remove all temporary files in a folder, and the folder if it is empty then."""
    store_of(folder).remove_if_unused(folder)


def locked_file(path: Path) -> AbstractContextManager[None]:
    """Context: a lock among the processes of this machine; none in a bucket, where one process at a time writes."""
    return store_of(path).locked(path)
