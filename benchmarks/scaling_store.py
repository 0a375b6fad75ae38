"""A bucket in memory that counts its requests: objects have names and sizes, and only small ones have contents."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from obstore.exceptions import AlreadyExistsError

from gristmill.batches import batched
from gristmill.paths import object_name
from gristmill.storage import objects

BUCKET = Path("s3:/model")
_PAGE = 1000  # objects in an answer to a LIST, and in a request to delete
_Folder = dict[str, "int | bytes | _Folder"]


@dataclass
class CountingStore:
    """Takes the place of the module obstore in gristmill.storage.objects; see `in_use`.

    Attributes:
        requests: Number of requests by verb: GET, PUT, HEAD, LIST, DELETE.
        read: Bytes of the objects that were got.
    """

    requests: Counter[str] = field(default_factory=Counter)
    read: int = 0
    _root: _Folder = field(default_factory=dict)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Context: every path s3:/… is one in this store."""
        with patch.object(objects, "obstore", self), patch.object(objects, "_open", lambda *_: None):
            yield

    def add(self, path: Path, content: int | bytes) -> str:
        """Put an object of so many bytes, or with these, without a request; return its ETag."""
        *folders, name = object_name(path).key.split("/")
        return self._put(folders, name, content)

    def put(self, _: Any, key: str, data: bytes, *, mode: Any = None, use_multipart: bool = False) -> dict[str, str]:  # noqa: ARG002
        self.requests["PUT"] += 1
        *folders, name = key.split("/")
        if mode == "create" and self._find(key) is not None:
            raise AlreadyExistsError(key)
        return {"e_tag": self._put(folders, name, data)}

    def get(self, _: Any, key: str, *, options: Any = None) -> Any:  # noqa: ARG002
        self.requests["GET"] += 1
        found = self._find(key)
        if not isinstance(found, bytes):
            raise FileNotFoundError(key)
        self.read += len(found)
        return SimpleNamespace(meta=_meta(key, found), bytes=lambda: found, stream=lambda **_: iter([found]))

    def head(self, _: Any, key: str) -> dict[str, Any]:
        self.requests["HEAD"] += 1
        found = self._find(key)
        if found is None or isinstance(found, dict):
            raise FileNotFoundError(key)
        return _meta(key, found)

    def delete(self, _: Any, keys: Sequence[str]) -> None:
        self.requests["DELETE"] += -(-len(keys) // _PAGE)
        for key in keys:
            *folders, name = key.split("/")
            folder = self._find("/".join(folders))
            if isinstance(folder, dict):
                folder.pop(name, None)

    def list(self, _: Any, prefix: str | None, *, offset: Any, chunk_size: int) -> Iterator[list[dict[str, Any]]]:  # noqa: ARG002
        self.requests["LIST"] += 1
        folder = self._find(prefix or "")
        found = _walk(folder, f"{prefix}/" if prefix else "") if isinstance(folder, dict) else iter(())
        for number, page in enumerate(batched(found, chunk_size)):
            self.requests["LIST"] += number > 0
            yield [_meta(name, content) for name, content in page]

    def list_with_delimiter(self, _: Any, prefix: str | None) -> dict[str, Any]:
        found, before = self._find(prefix or ""), f"{prefix}/" if prefix else ""
        items = found.items() if isinstance(found, dict) else ()
        self.requests["LIST"] += 1 + len(items) // _PAGE
        folders = [before + name for name, content in items if isinstance(content, dict) and content]
        files = [_meta(before + name, content) for name, content in items if not isinstance(content, dict)]
        return {"common_prefixes": folders, "objects": files}

    def _put(self, folders: Sequence[str], name: str, content: int | bytes) -> str:
        at = self._root
        for folder in folders:
            found = at.setdefault(folder, {})
            assert isinstance(found, dict)
            at = found
        at[name] = content
        return _tag(content)

    def _find(self, key: str) -> "int | bytes | _Folder | None":
        at: int | bytes | _Folder | None = self._root
        for part in key.split("/") if key else ():
            at = at.get(part) if isinstance(at, dict) else None
        return at


def _walk(folder: _Folder, before: str) -> Iterator[tuple[str, int | bytes]]:
    """Every object below a folder, by name."""
    for name, content in sorted(folder.items()):
        if isinstance(content, dict):
            yield from _walk(content, f"{before}{name}/")
        else:
            yield before + name, content


def _meta(key: str, content: "int | bytes | _Folder") -> dict[str, Any]:
    size = content if isinstance(content, int) else len(content)
    return {"path": key, "size": size, "e_tag": _tag(content)}


def _tag(content: "int | bytes | _Folder") -> str:
    return '"tag"' if isinstance(content, int) else f'"{hash(content if isinstance(content, bytes) else 0):x}"'
