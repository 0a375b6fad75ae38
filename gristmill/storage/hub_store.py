"""HubStore: datasets on the Hugging Face Hub, hf://, which are only read."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

from gristmill.errors import UsageError
from gristmill.paths import object_name
from gristmill.storage import hub
from gristmill.storage.listings import FileInfo, Level
from gristmill.storage.objects import Chunks, resumed
from gristmill.storage.remote_store import RemoteStore


class HubStore(RemoteStore):
    """Datasets on the Hugging Face Hub."""

    def find_file(self, path: Path) -> FileInfo | None:
        """See Store."""
        return hub.find_file(object_name(path))

    def chunks(self, path: Path, start: int = 0, end: int | None = None) -> Chunks:
        """See RemoteStore."""
        return _HubChunks(path, start, end)

    def list_all(self, folder: Path) -> Iterator[tuple[str, FileInfo]]:
        """See RemoteStore."""
        name = object_name(folder)
        yield from hub.tree(name).below(name.key)

    def list_level(self, folder: Path) -> Level:
        """See Store."""
        name = object_name(folder)
        return hub.tree(name).level(name.key)

    def refresh(self, folder: Path) -> None:
        """See Store: look again which commit the revision leads to."""
        hub.refresh(object_name(folder))

    def list_once(self, folder: Path) -> AbstractContextManager[None]:
        """See Store; the tree of a commit is kept anyway."""
        return nullcontext()

    def reject_writes(self, path: Path) -> NoReturn:
        """See Store."""
        raise UsageError(
            f"cannot write {object_name(path).url}: datasets on the Hugging Face Hub are only read: give a local "
            "folder, or s3://, gs:// or az://"
        )

    def write(self, path: Path, data: bytes) -> NoReturn:
        """See Store."""
        self.reject_writes(path)

    def create(self, path: Path, data: bytes) -> NoReturn:
        """See Store."""
        self.reject_writes(path)

    def upload(self, copies: Mapping[Path, Path]) -> NoReturn:
        """See RemoteStore."""
        self.reject_writes(next(iter(copies)))

    def remove(self, paths: Iterable[Path], root: Path | None) -> NoReturn:
        """See Store."""
        self.reject_writes(next(iter(paths)))

    def remove_folder(self, folder: Path) -> NoReturn:
        """See Store."""
        self.reject_writes(folder)


class _HubChunks(Chunks):
    """The bytes of a file of a dataset; huggingface_hub repeats a request that does not begin to answer."""

    def __iter__(self) -> Iterator[Any]:
        return resumed(nullcontext, self._get, is_first_repeated=True)

    def ask(self, at: int) -> Iterator[tuple[FileInfo, Any]]:
        """Make a request for the bytes from `at` on; see hub.stream."""
        return hub.stream(object_name(self.path), at, self.end)
