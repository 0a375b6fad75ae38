"""Names of corpus files: which can be parts of keys, and of files on the disks where tasks work on copies.

Names of objects may be such as no file can have: a file and a folder of one name, or parts of a thousand bytes.
"""

import re
from collections.abc import Iterable
from pathlib import Path

from gristmill.errors import UsageError

INDEX_PREFIX = "index:"  # of the file names of an index, a corpus deduplicated before; no corpus file has it
_MAX_FILE_BYTES = 200  # of a file's own name: outputs add suffixes
_MAX_PART_BYTES = 255  # of file systems
_NAMED = 8  # folders that an error lists
_PAIR_SEPARATOR = re.compile(r"@\d+ :: ")  # between the two keys of a line in duplicate_pairs.txt


def corpus_name(name: str) -> str:
    """The name of a corpus file, relative to its root, unchanged. Raises UsageError if it cannot be part of a key."""
    if not name.isprintable() or _PAIR_SEPARATOR.search(name) or name.startswith(INDEX_PREFIX):
        raise UsageError(
            f"the file name {name!r} cannot be part of a key: wanted printable characters without '@<number> :: ', and "
            f"not {INDEX_PREFIX!r} at the beginning, which documents of an index have; rename it"
        )
    *folders, file = name.split("/")
    if len(file.encode()) > _MAX_FILE_BYTES:
        raise UsageError(
            f"file name {name!r} is too long: wanted at most {_MAX_FILE_BYTES} bytes, as outputs add some; rename it"
        )
    for folder in folders:
        if len(folder.encode()) > _MAX_PART_BYTES:
            raise UsageError(
                f"the folder {folder!r} of {name!r} has a name of {len(folder.encode()):,} bytes: wanted at most "
                f"{_MAX_PART_BYTES}, as on a disk, where tasks work on copies; rename it"
            )
    return name


def reject_unknown_source(root: Path, source: str, names: Iterable[str]) -> None:
    """Raise UsageError if a folder of another name than `source` holds all files in folders, as a corpus root does.

    With a file of its own it is taken as the source's; `names` are those of its files, `<source>/…`.
    """
    if source in ("all", root.absolute().name):
        return
    paths = [name.split("/") for name in names]
    if all(len(path) > 2 for path in paths):
        folders = sorted({path[1] for path in paths})
        more = f" and {len(folders) - _NAMED:,} more" if len(folders) > _NAMED else ""
        raise UsageError(
            f"data set {source!r}: {root} has another name, and no folder of this one: it holds "
            f"{', '.join(folders[:_NAMED])}{more}. Give the name of one of these, or all"
        )


def reject_clashes(root: Path, names: Iterable[str]) -> None:
    """Raise UsageError if two files below `root` could not both be on a disk; `names` are sorted."""
    beginnings: list[str] = []  # earlier names with which the present one begins
    for name in names:
        while beginnings and not name.startswith(beginnings[-1]):
            beginnings.pop()
        for other in beginnings:
            if name == other:
                raise UsageError(f"{root / name} is there twice, with a slash at its end and without: rename one")
            if name.startswith(f"{other}/"):
                raise UsageError(
                    f"{root / other} is a file, and in {root / name} it is a folder: wanted names that can be on one "
                    "disk, where tasks work on copies; rename one of them"
                )
        beginnings.append(name)
