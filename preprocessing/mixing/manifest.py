"""The manifest of pass 1, `pass1.json`: where pass 2 finds the rows of each part, and how they were made."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from gristmill.engine.task import FileSet
from gristmill.errors import InputError, UsageError
from gristmill.storage.files import is_file, read_file
from gristmill.storage.local import atomic_write_bytes
from preprocessing.mixing.shuffle_buckets import SUFFIX, Share

MANIFEST_NAME = "pass1.json"  # in the folder of pass 1, with a folder for each source


class BucketManifest(msgspec.Struct, forbid_unknown_fields=True):
    """What pass 1 wrote. Paths are relative to the manifest's folder."""

    parts: int  # number of parts that pass 2 writes
    seed: int
    weights: dict[str, float]  # epochs of each source
    documents: dict[str, int]  # source → documents that may be held out
    content: str  # SHA-256 of all that was mixed
    holdout_files: dict[str, str]  # files of the documents' holdout numbers → their source
    bucket_files: list[str] = []  # files that hold rows of all parts; none if each part has files of its own
    buckets: int = 0  # in each of `bucket_files`; a bucket is of parts // buckets consecutive parts
    files_a_part: int = 0  # that hold rows of one part alone, see part_path

    def save(self, path: Path) -> None:
        """Write pass1.json atomically."""
        atomic_write_bytes(path, msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n")

    @classmethod
    def load(cls, path: Path) -> "BucketManifest":
        """Read pass1.json; UsageError if there is none, InputError if it is damaged or an earlier version's."""
        if not is_file(path):
            raise UsageError(f"{path.parent} holds no {path.name}: wanted the folder that pass1 wrote. Run pass1")
        try:
            return msgspec.json.decode(read_file(path), type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is damaged or of an earlier version ({error}): run pass1 again") from error

    def files_of(self, folder: Path, parts: Iterable[int]) -> Iterator[tuple[int, FileSet]]:
        """Each part, and the files that hold its rows: one set for all parts, or a set for each."""
        shared = FileSet(tuple(folder / name for name in self.bucket_files))
        for part in parts:
            paths = (part_path(parts_folder(folder), part, i) for i in range(self.files_a_part))
            yield part, shared if self.bucket_files else FileSet(tuple(paths))

    def share(self, part: int) -> Share:
        """Where in its files the rows of a part are."""
        if not self.bucket_files:
            return Share(part, self.parts)
        parts_a_bucket = self.parts // self.buckets
        return Share(part, self.parts, part // parts_a_bucket, parts_a_bucket)


def manifest_path(folder: Path) -> Path:
    """Path of the manifest in the folder that pass 1 wrote."""
    return folder / MANIFEST_NAME


def part_path(folder: Path, part: int, number: int) -> Path:
    """Path of a bucket file that holds rows of the parts from `part` on."""
    return folder / f"{part}-{number}{SUFFIX}"


def parts_folder(folder: Path) -> Path:
    """Folder of the bucket files of single parts, in the folder that pass 1 wrote."""
    return folder / "parts"
