"""Paths of files and of objects: `s3://bucket/key` is the path `s3:/bucket/key`, relative or below any folder.

So an object's path is joined, named and compared like any other. No local folder can be called `s3:`, `gs:`, `az:`
or `hf:`. Files are compared by name: the absolute path without `..` (name_of).
"""

import os
import re
from collections.abc import Iterator
from dataclasses import is_dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

SCHEMES = ("s3", "gs", "az", "hf")
_REMOTE = re.compile(rf"(?:^|/)({'|'.join(SCHEMES)}):(?=/|$)")
_SPELT = re.compile(rf"(?:(?<![\w.-])/[^\s'\"]*/|(?<![\w/.-])/)?\b({'|'.join(SCHEMES)}):/(?!/)")
_HUB_DATASET = re.compile(r"[^/]*/[^/]*/[^/@]*(?:@(?:refs/(?:pr|convert)/)?[^/]*)?|[^/]*/[^/]*|[^/]*")  # or a part
_USER = re.compile(r"(//|^)[^/\s]+@")
_UNKNOWN = re.compile(r"([A-Za-z][\w+.-]+):(?=/)")
_ODD_PART = re.compile(r"(?:^|/)\.{0,2}(?:/|\Z)")  # an empty part of a path, `.` or `..`


class ObjectName(NamedTuple):
    """An object or a folder of objects: `key` has no slash at its ends and is empty for a bucket.

    With the scheme hf, the bucket is datasets/ORG/NAME or datasets/ORG/NAME@REVISION.
    """

    scheme: str
    bucket: str
    key: str

    @property
    def url(self) -> str:
        """Return it as it is typed, such as s3://bucket/key."""
        url = f"{self.scheme}://{self.bucket}"
        if self.key:
            url += f"/{self.key}"
        return url


def scheme_of(path: Path | str) -> str:
    """Return the scheme of the path of an object or a folder of objects; '' for a local path.

    >>> scheme_of(Path("s3://bucket/a")), scheme_of(Path("/home/s3:/bucket/a")), scheme_of(Path("a/s3"))
    ('s3', 's3', '')
    """
    text = str(path)
    if ":" not in text:
        return ""
    match = _REMOTE.search(text)
    if match is None:
        return ""
    return match[1]


def below(root: Path, path: Path) -> Path:
    """Return the path of a file given relative to `root`; that of an object is returned as it is.

    >>> below(Path("/data"), Path("a")), below(Path("/data"), Path("s3://bucket/a"))
    (PosixPath('/data/a'), PosixPath('s3:/bucket/a'))
    """
    if scheme_of(path):
        return path
    return root / path


def object_name(path: Path | str) -> ObjectName:
    """Return the object of a path with a scheme.

    >>> object_name(Path("s3://bucket/a/b.txt"))
    ObjectName(scheme='s3', bucket='bucket', key='a/b.txt')
    >>> object_name(Path("hf://datasets/org/name@refs/pr/1/a/b.txt"))
    ObjectName(scheme='hf', bucket='datasets/org/name@refs/pr/1', key='a/b.txt')
    """
    text = os.fspath(path)
    match = _REMOTE.search(text)
    assert match, f"{path} is not remote"
    rest = os.path.normpath("/" + text[match.end() :]).lstrip("/")
    if match[1] == "hf":
        end = len(_HUB_DATASET.match(rest)[0])  # type: ignore[index]
    else:
        end = len(rest.partition("/")[0])
    return ObjectName(match[1], rest[:end], rest[end + 1 :])


def copy_name(folder: Path, path: Path) -> Path:
    """Return where the copy of a file is in a folder: below it by its full path, as two files may have one name.

    >>> copy_name(Path("/tmp"), Path("s3://bucket/a")), copy_name(Path("/tmp"), Path("/data/a"))
    (PosixPath('/tmp/s3/bucket/a'), PosixPath('/tmp/data/a'))
    """
    if scheme_of(path):
        name = object_name(path)
        return folder / name.scheme / name.bucket / name.key
    return folder / absolute(path).relative_to("/")


def is_top(path: Path | str) -> bool:
    """Return whether a path is that of a bucket, or above all buckets: there is nothing of ours above it."""
    return scheme_of(path) != "" and not object_name(path).key


def folders_above(path: Path) -> list[Path]:
    """Return the folders that hold `path`, from the innermost to the root, or to the bucket of an object.

    >>> folders_above(Path("s3://bucket/a/b")), folders_above(Path("/data/a"))
    ([PosixPath('s3:/bucket/a'), PosixPath('s3:/bucket')], [PosixPath('/data'), PosixPath('/')])
    """
    if not scheme_of(path):
        return list(path.parents)
    bucket = object_name(path).bucket
    folders = list[Path]()
    for parent in path.parents:
        if scheme_of(parent) and object_name(parent).bucket == bucket:
            folders.append(parent)
    return folders


def unknown_scheme(path: Path | str) -> str:
    """Return what is wrong with a path that looks like a URL of an unknown scheme, else ''.

    >>> unknown_scheme(Path("https://bucket/a"))
    'https://bucket/a: the scheme https is not known: expected a folder, or s3://, gs://, az://, hf://'
    >>> unknown_scheme(Path("s3://bucket/a")), unknown_scheme(Path("a:b"))
    ('', '')
    """
    text = os.fspath(path)
    match = _UNKNOWN.match(text)
    if not match or match[1] in SCHEMES:
        return ""
    url = f"{match[1]}://{text[match.end() :].lstrip('/')}"
    return f"{url}: the scheme {match[1]} is not known: expected a folder, or {'://, '.join(SCHEMES)}://"


def unknown_scheme_in(value: Any) -> str:
    """Return what is wrong with the first path of an unknown scheme in a value, at any depth, else ''.

    >>> unknown_scheme_in({"out": [Path("a"), Path("ftp://a")]}).partition(":")[0]
    'ftp'
    """
    return next(filter(None, map(unknown_scheme, paths_in(value))), "")


def paths_in(value: Any) -> Iterator[Path]:
    """Yield the paths in a value, at any depth of lists, dictionaries and dataclasses."""
    if isinstance(value, Path):
        yield value
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from paths_in(item)


def hide_passwords(text: str) -> str:
    """Return a message, or an endpoint, without the user names and passwords in its URLs.

    >>> hide_passwords("GET http://me:se@cret@host/a@b"), hide_passwords("me:secret@host")
    ('GET http://***@host/a@b', '***@host')
    """
    return _USER.sub(r"\1***@", text)


def spell_urls(text: str) -> str:
    """Return a message with the paths of objects written as URLs.

    >>> spell_urls("cannot read /home/me/s3:/bucket/a.jsonl: try s3:/bucket/b")
    'cannot read s3://bucket/a.jsonl: try s3://bucket/b'
    """
    return _SPELT.sub(r"\1://", text)


def name_of(path: Path | str) -> str:
    """Return the absolute path of a file, by which it is compared with others.

    >>> name_of("/a/./b.txt"), name_of("/s3:/bucket/a/../b.txt")
    ('/a/b.txt', '/s3:/bucket/b.txt')
    """
    text = str(path)
    is_absolute = text[:1] == "/"
    if not _ODD_PART.search(text, is_absolute):  # as most are, of the many that a large corpus has
        if is_absolute:
            return text
        return f"{os.getcwd().rstrip('/')}/{text}"  # noqa: PTH109
    if ".." in text and not scheme_of(text):  # after a link, `..` is the parent of what the link leads to
        return os.path.realpath(text)
    return os.path.abspath(text)


def absolute(path: Path) -> Path:
    """Return the absolute path; one that is absolute and has no `..` is returned as it is."""
    name = name_of(path)
    if name == str(path):
        return path
    return Path(name)


def join(folder: str, relative: str) -> str:
    """Return the absolute path of a file, given relative to a folder of such a name.

    >>> join("/a/b", "c.txt"), join("/a/b", "../c.txt"), join("/", "c.txt")
    ('/a/b/c.txt', '/a/c.txt', '/c.txt')
    """
    while relative.startswith("../"):
        folder = folder.rpartition("/")[0] or "/"
        relative = relative[3:]
    if folder != "/" and not _ODD_PART.search(relative):
        return f"{folder}/{relative}"
    return os.path.normpath(os.path.join(folder, relative))


def relative_to(folder: str, name: str) -> str:
    """Return the path of a file relative to a folder, both given as absolute paths.

    >>> relative_to("/a/b", "/a/b/c.txt"), relative_to("/a/b", "/a/c.txt")
    ('c.txt', '../c.txt')
    """
    if name.startswith(f"{folder}/"):
        return name[len(folder) + 1 :]
    if folder == "/" or f"{folder}/".startswith(f"{name.rstrip('/')}/"):
        return os.path.relpath(name, folder)
    above, slash, file = name.rpartition("/")
    return f"{_folder_relative_to(folder, above or slash)}/{file}"


@lru_cache(maxsize=1024)
def _folder_relative_to(folder: str, other: str) -> str:
    return os.path.relpath(other, folder)


def user_cache() -> Path:
    """Return this user's folder of what can be computed again. Raises RuntimeError for a user without a home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gristmill"
