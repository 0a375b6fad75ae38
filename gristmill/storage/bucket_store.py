"""BucketStore: objects in buckets, s3://, gs:// and az://."""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path

from gristmill.storage import objects
from gristmill.storage.listings import FileInfo, Level, keep_listing
from gristmill.storage.remote_store import RemoteStore

_UPLOADS = 8  # at a time, of files that are held in memory


class BucketStore(RemoteStore):
    """Objects in buckets."""

    def find_file(self, path: Path) -> FileInfo | None:
        """See Store."""
        return objects.find_object(path)

    def chunks(self, path: Path, start: int = 0, end: int | None = None) -> objects.Chunks:
        """See RemoteStore."""
        return objects.Chunks(path, start, end)

    def list_all(self, folder: Path) -> Iterator[tuple[str, FileInfo]]:
        """See RemoteStore."""
        return objects.list_objects(folder)

    def list_level(self, folder: Path) -> Level:
        """See Store."""
        return objects.list_level(folder)

    def refresh(self, folder: Path) -> None:
        """See Store; nothing is kept but by `list_once`."""

    def list_once(self, folder: Path) -> AbstractContextManager[None]:
        """See Store; what is written there in the meantime is not seen."""
        return keep_listing(folder)

    def reject_writes(self, path: Path) -> None:
        """See Store."""

    def write(self, path: Path, data: bytes) -> None:
        """See Store."""
        objects.write_object(path, data)

    def create(self, path: Path, data: bytes) -> bool:
        """See Store."""
        return objects.swap_object(path, data, None) is not None

    def upload(self, copies: Mapping[Path, Path]) -> dict[Path, FileInfo]:
        """See RemoteStore.

        Large files are put one at a time, each in several parts at a time. If some cannot be put, the first error in
        the order of `copies` is raised, errors of large ones last, and what waits is not put.
        """
        large = list[Path]()
        small = list[Path]()
        for path, copy in copies.items():
            if copy.stat().st_size > objects.PART_BYTES:
                large.append(path)
            else:
                small.append(path)
        done = dict[Path, FileInfo]()
        if small:
            with ThreadPoolExecutor(min(_UPLOADS, len(small))) as pool:
                done |= zip(small, pool.map(lambda path: objects.upload(copies[path], path), small), strict=True)
        for path in large:
            done[path] = objects.upload(copies[path], path)
        return done

    def remove(self, paths: Iterable[Path], root: Path | None) -> None:
        """See Store."""
        objects.delete_objects(paths)

    def remove_folder(self, folder: Path) -> None:
        """See Store."""
        objects.delete_objects([folder / name for name, _ in self.list_all(folder)])
