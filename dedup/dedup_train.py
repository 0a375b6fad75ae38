"""Stage: drop the train documents whose text is also in the holdout, by SHA-256 (decontamination).

Holdout → sorted digests → train documents whose digest is not among them.
"""

import mmap
import sys
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

from itertools import chain

import numpy as np
from tyro.conf import Positional

from gristmill.batches import batched
from gristmill.command import command
from gristmill.counts import IN_HOLDOUT, WRITTEN, Counts
from gristmill.engine.options import RunOptions
from gristmill.engine.run import open_stage
from gristmill.engine.slices import SliceGroup, group_slices
from gristmill.engine.staleness.outputs import reject_overlapping_folders, reject_unknown_files
from gristmill.engine.task import Stage, Task
from gristmill.errors import UsageError
from gristmill.io.corpus import list_corpus
from gristmill.io.documents import CORPUS_SUFFIXES, CorpusFile, Slice, normal_name, paths_of, total_size
from gristmill.io.external_sort import ExternalSorter, write_records
from gristmill.io.files import STATE_DIR
from gristmill.io.readers import read_documents
from gristmill.io.writers import Rejects, open_jsonl_writer
from gristmill.storage.files import FileInfo, file_info, is_folder, list_names
from gristmill.text import text_digest

STAGE = Stage("dedup_train", version=1, libraries=("zstandard", "zlib"))
DIGESTED = "digested"
_DIGEST = np.dtype([(name, "<u8") for name in "abcd"])  # SHA-256 as numbers that sort as its bytes do
_BATCH = 4096  # digests sorted together
_TRAIN_SHARE = 16  # bytes of train files that a task reads, for a byte of the digests of the holdout


def dedup_train(
    chunk: Positional[int],
    src_dir: Path,
    tgt_dir: Path,
    out_dir: Path,
    options: RunOptions = RunOptions(),
    text_column: str = "text",
) -> Counts:
    """Write a chunk of the train set without the documents whose text is in the holdout.

    Args:
        chunk: Number of the chunk: the folder chunk<number> of src_dir.
        src_dir: OUT/train, the train set that pass2 wrote.
        tgt_dir: OUT/holdout, the holdout of all chunks.
        out_dir: OUT/train_deduped, the output folder.
        options: Workers, memory, and when to stop; they change no output.
        text_column: The column or field of the text.

    Returns:
        Documents read, written and in the holdout, per source.
    """
    folder = src_dir / f"chunk{chunk}"
    if not is_folder(folder):
        chunks = sorted(name for name in list_names(src_dir) if name.startswith("chunk"))
        chunks_in_words = ", ".join(chunks) or "no chunk"
        raise UsageError(f"{folder}: expected a chunk that pass2 wrote; {src_dir} has {chunks_in_words}")
    for source in (src_dir, tgt_dir):
        reject_overlapping_folders(source, out_dir)
    if folder.resolve().is_relative_to(tgt_dir.resolve()) or tgt_dir.resolve().is_relative_to(folder.resolve()):
        raise UsageError(
            f"--src_dir {src_dir} --tgt_dir {tgt_dir}: one contains the other and would lose all documents"
        )
    files = list_corpus(folder, f"chunk{chunk}/", text_column)
    for file in files:
        if file.name != normal_name(file.name):  # the output has the same name
            raise UsageError(f"{file.path}: expected a file named .jsonl, .jsonl.gz or .jsonl.zst, as pass2 writes")
    digests = _digest_holdout(list_corpus(tgt_dir, text_column=text_column), tgt_dir, out_dir, options)
    with open_stage(
        STAGE, out_dir, options, reads=[src_dir, tgt_dir], publishes=[out_dir], part=f"chunk{chunk}"
    ) as run:
        run.check_listed({folder: paths_of(files)})
        reject_unknown_files(out_dir, (out_dir / file.name for file in files), CORPUS_SUFFIXES, run.ledger)
        tasks = list[Task]()
        for group in _groups_for(file_info(digests), files):
            outputs = tuple(out_dir / part.name for part in group)
            arguments = {"digests": digests, "outputs": outputs}
            tasks.append(Task.on_slices(group, decontaminate_files, arguments, outputs))
        return run.finish(run.step("decontaminate", tasks).counts)


def _groups_for(digests: FileInfo | None, files: list[CorpusFile]) -> Iterator[SliceGroup]:
    """Yield groups of train files, each at least _TRAIN_SHARE times as large as the digests, which every task reads.

    Else what tasks fetch would grow with the square of the corpus.
    """
    assert digests is not None
    groups = group_slices(map(_whole, files))
    for batch in batched(groups, size=_TRAIN_SHARE * digests.size, size_of=total_size):
        yield tuple(chain.from_iterable(batch))


def _whole(file: CorpusFile) -> Slice:
    return Slice(file.path, file.name, size=file.size, text_column=file.text_column)


def _digest_holdout(files: list[CorpusFile], tgt_dir: Path, out_dir: Path, options: RunOptions) -> Path:
    """Write the digests of the holdout, once for all chunks; several of which may run at the same time."""
    digests = out_dir / STATE_DIR / "holdout.sha256"
    quiet = replace(options, quiet=True)
    with open_stage(STAGE, out_dir, quiet, label="digests", reads={tgt_dir: paths_of(files)}) as run:
        arguments = {"slices": list(map(_whole, files)), "output": digests}
        size = total_size(files)
        task = Task("digests", write_digests, arguments, (digests,), size, options.memory_bytes)
        run.finish(run.step("digest", [task]).counts)
    return digests


def write_digests(slices: list[Slice], output: Path, memory: int) -> Counts:
    """Task: write the SHA-256 digests of all holdout texts, sorted, 32 bytes each; count the holdout per source."""
    counts = Counts({}, [])
    runs = output.with_name(f"{output.name}.runs")
    with ExternalSorter(runs, _DIGEST, _DIGEST.names or (), memory // 2) as sorter:
        for digests in batched(_iter_digests(slices, Rejects(output), counts), _BATCH):
            sorter.add(np.frombuffer(b"".join(digests), ">u8").astype("<u8").view(_DIGEST))
        write_records(output, (digests.view("<u8").astype(">u8") for digests in sorter))
    return counts


def _iter_digests(slices: list[Slice], rejects: Rejects, counts: Counts) -> Iterator[bytes]:
    """Yield the digests of all documents; one file for all rejects, as a new one would remove those before."""
    for part in slices:
        for document in read_documents(part, counts, rejects, by_original_source=True):
            counts.add(document.original_key.source, DIGESTED, document.read_bytes)
            yield text_digest(document.text)


def decontaminate_files(group: SliceGroup, digests: Path, outputs: tuple[Path, ...]) -> Counts:
    """Task: write the documents of some train files whose text is not in the holdout."""
    counts = Counts({}, [])
    holdout = Digests(digests)
    for part, output in zip(group, outputs, strict=True):
        with open_jsonl_writer(output) as sink:
            for document in read_documents(part, counts, Rejects(output), by_original_source=True):
                reason = IN_HOLDOUT if text_digest(document.text) in holdout else WRITTEN
                if reason == WRITTEN:
                    sink.write(document.to_json())
                counts.add(document.original_key.source, reason, document.read_bytes)
    return counts


class Digests:
    """The sorted digests in a file, which is mapped: all workers share its pages."""

    def __init__(self, path: Path) -> None:
        self.count = path.stat().st_size // _DIGEST.itemsize
        with path.open("rb") as file:
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if self.count else b""

    def __contains__(self, digest: bytes) -> bool:
        position = bisect_left(range(self.count), digest, key=self._at)
        return self._at(position) == digest

    def _at(self, number: int) -> bytes:
        return self.data[number * _DIGEST.itemsize : (number + 1) * _DIGEST.itemsize]


if __name__ == "__main__":
    command(dedup_train)
