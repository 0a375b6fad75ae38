"""Objects in buckets: read, write, list and delete them. Credentials come from the environment.

Every call takes paths of objects (see paths.py). Requests that fail for a passing reason are repeated, by obstore
or, where it does not, here; other errors become one sentence: FileNotFoundError for an object that is not there,
UsageError for what a user can fix, StorageError for the rest.
"""

import errno
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import from_url

from gristmill.errors import InputError, StorageError, UsageError
from gristmill.paths import ObjectName, hide_passwords, object_name
from gristmill.storage.listings import FileInfo, Level, kept_tree
from gristmill.storage.problems import Refusal, explain_control, explain_problem, has_controls, reject_bucket

PART_BYTES = 16 << 20  # of an upload in parts, at most 10,000 of them: objects of up to 160 GB
_LONGEST = 10_000  # parts
_READS = 5  # at most, of a small object that changes each time
RETRIES: Any = {"max_retries": 8, "retry_timeout": timedelta(seconds=90)}  # of obstore's requests
_ATTEMPTS = 4  # at a call, where obstore has not repeated the request
_HAS_REPEATED = re.compile(r"after (\d+) retries, max_retries: \1\b")  # as often as it may
_CLIENT: Any = {"connect_timeout": timedelta(seconds=10), "timeout": timedelta(seconds=300)}
_CHUNK_BYTES = 1 << 20
_IN_CONFLICT = "409"  # another conditional write of the object is being done
_IS_URL = re.compile(r"https?://(?:[^\s/]*@)?(?:[^\s/:@\[\]]+|\[[\da-f:.]+\])(?::\d{1,5})?(?:/\S*)?$", re.IGNORECASE)
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_Answer = TypeVar("_Answer")


def list_objects(folder: Path) -> Iterator[tuple[str, FileInfo]]:
    """Yield every object below a folder: its name relative to the folder, sorted as bytes, and its FileInfo.

    Empty objects whose names end in a slash, with which some programs mark folders, are left out.
    """
    known = kept_tree(object_name(folder), _list)
    if known:
        tree, inside = known
        yield from tree.below(inside)
    else:
        yield from _list(folder)


def _list(folder: Path) -> Iterator[tuple[str, FileInfo]]:
    name = object_name(folder)
    last: str | None = None  # of the objects listed so far

    def resume() -> Iterator[Any]:
        return iter(obstore.list(_store(name), name.key or None, offset=last, chunk_size=1000))

    for page in resumed(partial(_problems, folder), resume):
        for stored in page:
            last = stored["path"]
            info = _info(stored)
            relative = last[len(name.key) :].lstrip("/")
            if info.size or find_object(folder / relative) == info:  # a mark comes without its slash
                yield relative, info


def list_level(folder: Path) -> Level:
    """Return the names of the folders, and of the objects with their FileInfo, directly in a folder."""
    name = object_name(folder)
    if known := kept_tree(name, _list):
        return known[0].level(known[1])
    level = _repeated(folder, lambda: obstore.list_with_delimiter(_store(name), prefix=name.key or None))
    folders = [prefix.rstrip("/").rpartition("/")[2] for prefix in level["common_prefixes"]]
    files = dict[str, FileInfo]()
    for stored in level["objects"]:
        name_in_folder = stored["path"].rpartition("/")[2]
        files[name_in_folder] = _info(stored)
    return folders, files


def find_object(path: Path) -> FileInfo | None:
    """Return the FileInfo of an object, None if there is none."""
    name = object_name(path)
    if not name.key:
        return None
    try:
        return _info(_repeated(path, lambda: obstore.head(_store(name), name.key)))
    except FileNotFoundError:
        return None


class ChangedWhileRead(InputError):
    """An object is another one than when it was listed, or when its first bytes were read; made with its path."""

    def __str__(self) -> str:
        return f"{super().__str__()} was changed while it was read: run the same command again"


def read_object(path: Path) -> tuple[bytes, FileInfo]:
    """Return the bytes of a small object, and its FileInfo. Raises FileNotFoundError."""
    return read_chunks(partial(Chunks, path))


def read_chunks(open_chunks: Callable[[], "Chunks"]) -> tuple[bytes, FileInfo]:
    """Return the bytes of a small object and its FileInfo; one that is replaced, as a lease, is read anew."""
    for _ in range(_READS - 1):
        with suppress(ChangedWhileRead):
            return _join_chunks(open_chunks())
    return _join_chunks(open_chunks())


def _join_chunks(chunks: "Chunks") -> tuple[bytes, FileInfo]:
    return b"".join(chunks), chunks.info


def upload(source: Path, path: Path) -> FileInfo:
    """Put a local file under an object's name; return its FileInfo."""
    name = object_name(path)
    size = source.stat().st_size
    part = max(PART_BYTES, -(-size // _LONGEST))

    def put() -> Any:
        try:
            return obstore.put(_store(name), name.key, source, use_multipart=size > part, chunk_size=part)
        except FileNotFoundError as error:
            if Refusal.read(str(error)).code == "NoSuchBucket":
                raise  # else the upload in parts has ended, and the answer was lost
            raise StorageError(f"cannot write {name.url}: its multipart upload no longer exists") from error

    return FileInfo(size, e_tag=_tag(_repeated(path, put, writes=True)))


def write_object(path: Path, data: bytes) -> FileInfo:
    """Put bytes under an object's name."""
    name = object_name(path)
    done = _repeated(path, lambda: obstore.put(_store(name), name.key, data, use_multipart=False), writes=True)
    return FileInfo(len(data), e_tag=_tag(done))


def swap_object(path: Path, data: bytes, before: FileInfo | None) -> FileInfo | None:
    """Put bytes if the object is still as `before` (None: if there is none); return its FileInfo, None if it is not.

    An answer that is lost looks like a refusal: what is there is then compared with `data`.
    """
    name = object_name(path)

    def put() -> FileInfo | None:
        try:
            mode = "create" if before is None else _version(name, before)
            done = obstore.put(_store(name), name.key, data, mode=mode)  # type: ignore[arg-type]
            return FileInfo(len(data), e_tag=_tag(done))
        except (AlreadyExistsError, PreconditionError):
            return None
        except BaseError as error:
            if Refusal.read(str(error)).status != _IN_CONFLICT:
                raise
            return None

    try:
        if info := _repeated(path, put, writes=True):
            return info
        stored, info = read_object(path)
    except FileNotFoundError:
        return None
    if stored != data:
        return None
    return info


def delete_objects(paths: Iterable[Path]) -> None:
    """Delete objects; missing ones are deleted already."""
    by_store: dict[tuple[str, str], list[Path]] = {}
    for path in paths:
        name = object_name(path)
        by_store.setdefault((name.scheme, name.bucket), []).append(path)
    for some in by_store.values():
        try:
            _delete(some)
        except FileNotFoundError:  # as gs and az say
            for path in some:
                with suppress(FileNotFoundError):
                    _delete([path])


def _delete(paths: list[Path]) -> None:
    keys = [object_name(path).key for path in paths]
    store = _store(object_name(paths[0]))
    _repeated(paths[0], lambda: obstore.delete(store, keys), writes=True)


def _version(name: ObjectName, info: FileInfo) -> dict[str, str | None]:
    """Return the condition of a write that replaces this version of an object: on gs:// its generation."""
    if name.scheme != "gs":
        return {"e_tag": info.e_tag}
    head = obstore.head(_store(name), name.key)
    if _info(head) != info:
        raise PreconditionError(name.url)
    return {"e_tag": info.e_tag, "version": head["version"]}


def _info(meta: Any) -> FileInfo:
    return FileInfo(meta["size"], e_tag=_tag(meta))


def _tag(meta: Any) -> str:
    """Return the ETag, in quotes as in answers' headers; Azure's listings have it without."""
    tag: str = meta["e_tag"] or ""
    if tag and not tag.endswith('"'):
        tag = f'"{tag}"'
    return tag


def _store(name: ObjectName) -> Any:
    reject_bucket(name)
    if has_controls(name.key):
        raise explain_control(name)
    return _open(name.scheme, name.bucket)


@cache  # a client keeps connections
def _open(scheme: str, bucket: str) -> Any:
    endpoint = next(filter(None, map(os.environ.get, _ENDPOINTS)), "")
    if endpoint and not _IS_URL.match(endpoint):
        shown = hide_passwords(endpoint)
        raise UsageError(f"AWS_ENDPOINT_URL {shown!r} is not a URL: expected http://host:port or https://host")
    is_plain = endpoint.startswith("http://")  # a store on one's own network
    options = _CLIENT | {"allow_http": is_plain or os.environ.get("AWS_ALLOW_HTTP", "").lower() == "true"}
    return from_url(f"{scheme}://{bucket}", client_options=options, retry_config=RETRIES)


class Chunks:
    """The bytes of an object from `start` to `end`, in chunks; `info` is the object's as soon as the first has come.

    A request that ends too early is made again for the rest, of the same version of the object: raises InputError if
    there is another one.
    """

    def __init__(self, path: Path, start: int = 0, end: int | None = None) -> None:
        self.path = path
        self.start = start
        self.end = end
        self.info = FileInfo(-1)
        self._at = start

    def __iter__(self) -> Iterator[Any]:
        return resumed(partial(_problems, self.path), self._get)

    def write_to(self, target: Path) -> FileInfo:
        """Write the bytes to the same offsets of the local file `target`. Raises FileNotFoundError.

        The file is made if there is none; a hole before `start` takes no space.
        """
        with target.open("r+b" if target.exists() else "wb") as file:
            file.seek(self.start)
            for chunk in self:
                file.write(chunk)
        return self.info

    def sha256(self) -> str:
        """Return the SHA-256 of the bytes, in hexadecimal. Raises FileNotFoundError."""
        digest = hashlib.sha256()
        for chunk in self:
            digest.update(chunk)
        return digest.hexdigest()

    def ask(self, at: int) -> Iterator[tuple[FileInfo, Any]]:
        """Make a request for the bytes from `at` on; yield chunks with the object's FileInfo, the first one empty.

        Raises PreconditionError if the object is another one than before.
        """
        return _stream(object_name(self.path), at, self.end, self.info.e_tag)

    def _get(self) -> Iterator[Any]:
        if 0 <= self.info.size <= self._at or self._at == self.end:
            return
        try:
            for info, chunk in self.ask(self._at):
                if self.info.size >= 0 and info != self.info:
                    raise ChangedWhileRead(self.path)
                self.info = info
                self._at += len(chunk)
                if chunk:
                    yield chunk
        except PreconditionError as error:
            raise ChangedWhileRead(self.path) from error


def _stream(name: ObjectName, start: int, end: int | None, e_tag: str) -> Iterator[tuple[FileInfo, Any]]:
    """Yield the bytes of an object from `start` to `end`, by one request, in chunks with its FileInfo.

    The first is empty. Raises PreconditionError if the object has another ETag, unless `e_tag` is empty.
    """
    options = dict[str, Any]()
    if e_tag:
        options["if_match"] = e_tag
    if start or end:
        options["range"] = (start, end)
        if end is None:
            options["range"] = {"offset": start}
    response = obstore.get(_store(name), name.key, options=options)  # type: ignore[arg-type]
    info = _info(response.meta)
    yield info, b""
    for chunk in response.stream(min_chunk_size=_CHUNK_BYTES):
        yield info, chunk


def _repeated(path: Path, call: Callable[[], _Answer], writes: bool = False) -> _Answer:
    """Return what `call` returns; call it again after a transient failure."""
    return next(resumed(partial(_problems, path, writes), lambda: [call()]))


def resumed(
    problems: Callable[[], AbstractContextManager[None]],
    resume: Callable[[], Iterable[_Answer]],
    is_first_repeated: bool = False,
) -> Iterator[_Answer]:
    """Yield all that `resume` yields; it is called again after a failure that may pass, and continues.

    It is not where a library has repeated the request, or if it has failed too often, or for too long. `problems` is a
    context that converts errors. `is_first_repeated`: a library repeats each request that does not begin to answer.
    """
    failures = 0
    until = time.monotonic() + RETRIES["retry_timeout"].total_seconds()
    while True:
        has_begun = not is_first_repeated
        try:
            with problems():
                for item in resume():
                    failures = 0
                    has_begun = True
                    until = time.monotonic() + RETRIES["retry_timeout"].total_seconds()
                    yield item
            return
        except StorageError as error:
            failures += 1
            is_repeated = not has_begun or _HAS_REPEATED.search(str(error.__cause__))
            if is_repeated or failures >= _ATTEMPTS or time.monotonic() > until:
                raise


@contextmanager
def _problems(path: Path, writes: bool = False) -> Iterator[None]:
    """Context: convert an error of the object store; conditions that do not hold are raised unchanged."""
    try:
        yield
    except FileNotFoundError as error:
        problem = explain_problem(object_name(path), str(error), writes)
        if isinstance(problem, UsageError):  # there is no such bucket
            raise problem from error
        raise FileNotFoundError(errno.ENOENT, "there is no such object", str(path)) from error
    except (AlreadyExistsError, PreconditionError):
        raise
    except BaseError as error:
        raise explain_problem(object_name(path), str(error), writes) from error
