"""Signature shards to compare: of a corpus, and of indexes (corpora deduplicated before)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec
import pyarrow as pa
import pyarrow.ipc

from dedup.candidates.document_ids import DocumentIds, index_name, is_of_index, scope_of
from dedup.candidates.signature_shards import (
    SMALL_BYTES,
    OpenShard,
    ShardHeader,
    Signatures,
    check_batches,
    open_shard,
    reject_mixed_sketches,
    shard_paths,
)
from dedup.minhash.signatures import Sketch
from gristmill.counts import Counts
from gristmill.engine.execution.staging import local_copies
from gristmill.engine.run import StageRun
from gristmill.engine.task import FileSet, Result, Task
from gristmill.errors import UsageError
from gristmill.io.files import STATE_DIR
from gristmill.storage.files import is_folder, resolved

Scope = Literal["global", "per-source"]
_GROUP = 256  # headers read by one task

ShardFolders = dict[str, FileSet]  # name of an index, or "" for the corpus → its shards


class ShardSummary(msgspec.Struct):
    """A shard's header, its number of documents, its first row and the one after its last (0 if it is empty)."""

    header: ShardHeader
    documents: int
    first: int
    end: int


@dataclass(frozen=True)
class SignatureShard:
    """A shard's path and header, its corpus file (index:<index>:<file> for an index's), documents and last row + 1."""

    path: Path
    header: ShardHeader
    file: str
    documents: int
    end: int

    def batches(self) -> Iterator[Signatures]:
        """Yield rows (n) and signatures (n × permutations), batch by batch. InputError if the shard is damaged."""
        for rows, values in check_batches(self.path, _read_batches(self.path), self.end):
            if len(rows):  # none where no document could be signed
                yield rows, values

    def salt(self, scope: Scope) -> int:
        """Return a salt for band digests (64 bits): equal for shards whose documents are compared."""
        if scope == "global":
            return 0
        digest = blake2b(scope_of(self.file).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little")


def list_shards_of(folder: Path | None, index: Sequence[str] = ()) -> ShardFolders:
    """Return the shards of a corpus, if there is one, and of its indexes, each a folder of shards, or NAME=FOLDER.

    UsageError if a folder holds none, or an index and the corpus are one, InputError if to_hash has not finished it.
    """
    shards = ShardFolders()
    if folder is not None:
        reject_own_index(index, folder)
        shards[""] = FileSet(tuple(shard_paths(folder)))
    for name, root in parse_indexes(index):
        shards[name] = FileSet(tuple(shard_paths(root)))
    return shards


def check_indexes(run: StageRun, shards: ShardFolders, index: Sequence[str]) -> None:
    """Refuse indexes that are not complete; see StageRun.check_listed."""
    _reject_runs(index)
    run.check_listed({root: shards[name].paths for name, root in parse_indexes(index)})


def list_signature_shards(run: StageRun, folders: ShardFolders) -> list[SignatureShard]:
    """Return all shards in key order, those of indexes first, from their headers, which the step `headers` reads.

    UsageError if they cannot be compared.
    """
    groups = list[tuple[str, tuple[Path, ...]]]()
    tasks = list[Task]()
    for name, files in folders.items():
        for start in range(0, len(files), _GROUP):
            paths = files.paths[start : start + _GROUP]
            tasks.append(Task(f"{len(tasks):06} {name}", summarize_shards, {"shards": FileSet(paths)}))
            groups.append((name, paths))
    summaries_of_groups = run.step("headers", tasks).values(list[ShardSummary])
    shards = list[SignatureShard]()
    first_rows = dict[Path, int]()  # no part of a SignatureShard, which is part of tasks' identities
    for (name, paths), summaries in zip(groups, summaries_of_groups, strict=True):
        for path, shard in zip(paths, summaries, strict=True):
            file = index_name(name, shard.header.file) if name else shard.header.file
            shards.append(SignatureShard(path, shard.header, file, shard.documents, shard.end))
            first_rows[path] = shard.first
    reject_mixed_sketches({shard.path: shard.header for shard in shards})
    shards.sort(key=lambda shard: (not is_of_index(shard.file), shard.file, shard.end))
    _reject_copies([shard for shard in shards if shard.documents], first_rows)
    return shards


def reject_own_index(index: Sequence[str], signatures: Path) -> None:
    """Raise UsageError if an index has shards of the corpus itself, of which no document would be kept."""
    own = resolved(signatures)
    for name, folder in parse_indexes(index):
        if own.is_relative_to(resolved(folder)) or resolved(folder).is_relative_to(own):
            raise UsageError(
                f"--index {name}={folder}: these signatures, in {signatures}, are of the corpus itself, so every "
                "document would be removed as its own duplicate: give those of another corpus"
            )


def _reject_copies(shards: Sequence[SignatureShard], first_rows: Mapping[Path, int]) -> None:
    """Raise UsageError if two shards, neighbours in key order, hold signatures of the same rows of files of one name.

    The files may be of two corpora. Shards of the parts of one file lie in one folder.
    """
    for one, other in pairwise(shards):
        if one.file != other.file:
            continue
        if first_rows[other.path] < one.end or one.path.parent != other.path.parent:
            raise UsageError(
                f"{one.path} and {other.path} both hold signatures of a file {one.file}, and documents are named by "
                "their file and row: remove one of them if they are of one corpus; else give the folder of one "
                "(and, to compare with the other, --index NAME=FOLDER)"
            )


def summarize_shards(shards: FileSet) -> Result:
    """Task: read the headers of shards, and their first and last rows; returns a ShardSummary for each."""
    summaries = list[ShardSummary]()
    for path in shards.paths:
        shard = open_shard(path)
        first, end = _span(shard)
        summaries.append(ShardSummary(shard.header, len(shard), first, end))
    return Result(Counts({}, []), summaries)


def assign_ids(shards: Sequence[SignatureShard], rows: Mapping[str, int] | None = None) -> DocumentIds:
    """Assign ids to the documents of all shards and, if `rows` is given, of files with at least rows[file] rows."""
    rows = dict(rows or {})
    for shard in shards:
        rows[shard.file] = max(rows.get(shard.file, 0), shard.end)
    return DocumentIds.of(rows)


def count_documents(shards: Sequence[SignatureShard]) -> dict[str, int]:
    """Return the number of signed documents of each file."""
    counts = dict[str, int]()
    for shard in shards:
        counts[shard.file] = counts.get(shard.file, 0) + shard.documents
    return counts


def check_index(index: Sequence[str], sketch: Sketch) -> None:
    """Raise UsageError unless each index is a folder of signature shards made with `sketch`.

    Reads the header of one shard of each, in a bucket of a copy; `list_signature_shards` checks all of them.
    """
    _reject_runs(index)
    for name, folder in parse_indexes(index):
        path = shard_paths(folder)[0]
        with local_copies([path]) as (copy,):
            actual = open_shard(copy).header.describe()
            expected = ShardHeader.of("", sketch).describe()
        if actual != expected:
            raise UsageError(
                f"--index {name}={folder} cannot be compared: {path} holds {actual}; the options ask for {expected}. "
                "Give the options that the index was made with"
            )


def _reject_runs(index: Sequence[str]) -> None:
    """Raise UsageError if an index is the output of `gristmill run`, of which signatures are a part."""
    for name, folder in parse_indexes(index):
        if is_folder(folder / STATE_DIR / "run") and is_folder(folder / "minhash"):
            raise UsageError(
                f"--index {name}={folder} is the output of a run; expected its signatures: "
                f"try --index {name}={folder / 'minhash'}"
            )


def parse_indexes(index: Sequence[str]) -> list[tuple[str, Path]]:
    """Return name and folder of each index, given as NAME=FOLDER or FOLDER. UsageError if two have one name."""
    indexes = [_parse_index(text) for text in index]
    if len(dict(indexes)) < len(indexes):
        raise UsageError(f"--index {' '.join(index)}: expected a different name for each, such as 2023=FOLDER")
    return indexes


def _parse_index(text: str) -> tuple[str, Path]:
    """Split NAME=FOLDER at the first `=`, unless that follows a `/` and so is part of a folder's name.

    >>> _parse_index("old=/data/dump=2024-01/minhash"), _parse_index("/data/dump=2024-01/minhash")
    (('old', PosixPath('/data/dump=2024-01/minhash')), ('minhash', PosixPath('/data/dump=2024-01/minhash')))
    """
    name, equals, folder = text.partition("=")
    is_named = bool(equals) and "/" not in name
    folder = folder if is_named else text
    path = Path(folder)
    name = name if is_named else path.resolve().name
    if not folder or not name or ":" in name:
        raise UsageError(
            f"--index {text or repr(text)}: expected a folder of shards, or NAME=FOLDER without : or / in the name"
        )
    return name, path


def _read_batches(path: Path) -> Iterator[pa.RecordBatch]:
    is_small = path.stat().st_size <= SMALL_BYTES
    # The file is not mapped: pages that were read would count as memory in use.
    with pa.BufferReader(path.read_bytes()) if is_small else pa.OSFile(str(path)) as file:
        reader = pa.ipc.open_file(file)
        yield from map(reader.get_batch, range(reader.num_record_batches))


def _span(shard: OpenShard) -> tuple[int, int]:
    """Return the shard's first row and the row after its last; (0, 0) for an empty shard."""
    filled = [batch for batch in shard.batches if batch.num_rows]
    if not filled:
        return 0, 0
    first_rows, _ = next(check_batches(shard.path, [filled[0]]))
    last_rows, _ = next(check_batches(shard.path, [filled[-1]]))
    return int(first_rows[0]), int(last_rows[-1]) + 1
