"""FileInfo: the size and the version of a file or an object."""

from typing import NamedTuple


class FileInfo(NamedTuple):
    """Size in bytes, and what changes with the content: nanoseconds of a local file's modification, or an ETag."""

    size: int
    mtime_ns: int = 0
    e_tag: str = ""
