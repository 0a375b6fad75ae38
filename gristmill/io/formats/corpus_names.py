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
