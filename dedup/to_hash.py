"""Stage: compute a MinHash signature of every document, in one signature shard per corpus file.

Documents → matching form → shingles → hashes → signature → shard.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import numpy as np
import tyro
from numpy.typing import NDArray
from tyro.conf import Positional

from dedup.candidates.signature_shards import SUFFIX, write_shard
from dedup.minhash.matching_form import Unit
from dedup.minhash.schemes import Hash
from dedup.minhash.signatures import Sketch, memory_to_sign, note_compilation, signatures
from gristmill.batches import batched_in_chunks
from gristmill.budget import reserve_memory
from gristmill.command import command
from gristmill.counts import READ, Counts
from gristmill.engine.options import RunOptions
from gristmill.engine.report import note_count_mismatch
from gristmill.engine.run import StageRun, open_stage
from gristmill.engine.slices import SliceGroup, cut_raw_corpus, group_slices, leaves_out_damaged, read_slices
from gristmill.engine.staleness.outputs import reject_overlapping_folders, reject_unknown_files
from gristmill.engine.task import Result, Stage, Task
from gristmill.errors import UsageError, require
from gristmill.io.artefacts import is_table
from gristmill.io.corpus import list_source, source_folder
from gristmill.io.documents import Document, Slice, names_of, paths_of, rows_of
from gristmill.io.keys import Rows, is_among, read_split, split_keys
from gristmill.io.readers import read_documents
from gristmill.io.writers import Rejects
from gristmill.storage.files import is_file
from gristmill.text import utf8_size

STAGE = Stage("to_hash", version=2, libraries=("unicode", "pyarrow"))
SIGNED = "signed"
TOO_SHORT = "no shingle"  # shorter than a shingle; in SlimPajama they are all duplicates of one another
SKIPPED = "skipped"
BATCH_CHARACTERS = 4 << 20  # of the documents in a record batch of a shard
_CHUNK_CHARACTERS = 1 << 20  # hashed together: at most that of a text whose memory is held until the next is read
NO_ROWS = np.empty(0, np.int64)


def to_hash(
    dataset_name: Positional[str],
    input_dir: Positional[Path],
    output_dir: Positional[Path],
    n_docs: Positional[int],
    iter: Positional[str],  # noqa: ARG001
    index_start: Positional[int],
    index_end: Positional[int],
    width: Annotated[int, tyro.conf.arg(aliases=["-w"])] = 13,
    batch: Annotated[int, tyro.conf.arg(aliases=["-k"])] = 10_000,
    unit: Unit = "character",
    hash: Hash = "xxh32",
    permutations: int = 128,
    seed: int = 1,
    skip: Path | None = None,
    text_column: str = "text",
    options: RunOptions = RunOptions(),
) -> Counts:
    """Compute the signatures of the documents in files index_start ≤ i < index_end, in name order, of a data set.

    Writes one shard per file (several for a large file) below `output_dir`. A document shorter than a
    shingle gets no signature and is never a near-duplicate. With --unit word, a document without spaces between
    words, as in Chinese, has shingles of 13 characters.

    Args:
        dataset_name: Name of the data set, or all.
        input_dir: NORM/<dataset>/; or NORM/, in which dataset_name chooses one data set or all.
        output_dir: MINHASH/<dataset>/, the folder of signature shards to write; MINHASH/ if input_dir is NORM/.
        n_docs: The expected number of documents; a note is printed if it differs from the count.
        iter: SlimPajama's job number; accepted and ignored.
        index_start: Index of the first file.
        index_end: Index after the last file; may exceed the number of files.
        width: Length of a shingle in units.
        unit: The unit of shingles: character or word (datatrove's preset: --unit word -w 5 --permutations 112).
        batch: Maximum documents in a record batch of a shard.
        hash: xxh32 (datasketch 2.0's default scheme with XXH32), sha1 (datasketch 1.x: SlimPajama's values),
            sha1-affine32 (datasketch 2.0's defaults), xxh32-mersenne (datasketch 1.x with XXH32), or fss (fast
            similarity sketching: the fastest, but no other library's values).
        permutations: Number of slots of a signature.
        seed: Seed of the permutations.
        skip: Keys of documents to leave out, such as the copies that generate_exact_pairs found: a .parquet table or a
            .pickle.
        text_column: The column or field of the text.
        options: Workers, memory, and when to stop; they change no output.

    Returns:
        Documents read, signed, skipped and too short (no shingle), per source.
    """
    sketch = Sketch(hash, width, permutations, seed, unit)
    files = list_source(input_dir, dataset_name, text_column)
    chosen = files[index_start:index_end] if index_start >= 0 else []
    if not chosen or batch < 1:
        raise UsageError(
            f"files {index_start} to {index_end}, -k {batch}: {input_dir} has {len(files)} files, so expected "
            f"0 ≤ index_start < index_end, index_start below {len(files)}, and batches of 1 document or more"
        )
    if skip:
        is_table(skip)  # UsageError unless it is a .pickle or .parquet
        require(is_file(skip), f"--skip {skip}: expected a key set, but there is no file of that name")
    target = ShardTarget.of(dataset_name, input_dir, output_dir)
    reject_overlapping_folders(input_dir, target.folder)
    source = source_folder(input_dir, dataset_name)
    share = "" if chosen == files else f"{index_start}-{index_end}"
    with open_stage(
        STAGE, target.root, options, reads={source: paths_of(files)}, publishes=[target.folder],
        part="/".join(filter(None, (target.part, share))),
    ) as run:  # fmt: skip
        slices = cut_raw_corpus(run, chosen)
        reject_unknown_files(target.folder, map(target.shard, slices), (SUFFIX,), run.ledger)
        note_compilation(sketch, options.quiet)
        groups_of_files = list(map(names_of, group_slices(slices)))
        skipped, keys = plan_skipped(run, skip, groups_of_files, f"{target.prefix}keys")

        def plan(groups: list[SliceGroup]) -> Iterator[Task]:
            for group in groups:
                outputs = tuple(map(target.shard, group))
                keys_to_skip = skipped.get(names_of(group))
                given = {"outputs": outputs, "sketch": sketch, "batch": batch, "skip": keys_to_skip}
                yield Task.on_slices(group, sign_slices, given, outputs)

        signed = read_slices(run, "sign", slices, plan)
        counts = run.finish(signed.counts)
    note_count_mismatch(0 if share else n_docs, counts, options)
    if run.ran and not options.quiet:
        print_notes(counts, sketch, skip if keys else None)
    return counts


def count_signed(
    counts: Counts, source: str, sizes: NDArray[np.int64], is_signed: NDArray[np.bool_], is_skipped: NDArray[np.bool_]
) -> None:
    """Count documents (n) of these sizes by what became of each."""
    reasons = {SIGNED: is_signed, SKIPPED: is_skipped, TOO_SHORT: ~is_signed & ~is_skipped}
    for reason, chosen in reasons.items():
        if chosen.any():
            counts.add(source, reason, int(sizes[chosen].sum()), int(chosen.sum()))


@dataclass(frozen=True)
class ShardTarget:
    """Where shards are written: `folder`, in the `root` of all data sets, which has the ledger and the marks.

    `part` is the data set; empty for all, and for a folder of one data set that does not have its name.
    """

    root: Path
    folder: Path
    part: str
    dataset: str

    @classmethod
    def of(cls, dataset: str, input_dir: Path, output_dir: Path) -> "ShardTarget":
        """Build it from the command line's arguments."""
        if dataset != "all" and output_dir.absolute().name == dataset:
            return cls(output_dir.absolute().parent, output_dir, dataset, dataset)
        if source_folder(input_dir, dataset) != input_dir:
            return cls(output_dir, output_dir / dataset, dataset, dataset)
        return cls(output_dir, output_dir, "", dataset)

    @property
    def prefix(self) -> str:
        """Return the prefix of the names of this part's tasks."""
        return f"{self.part}/" if self.part else ""

    def shard(self, part: Slice) -> Path:
        """Return the path of a slice's shard."""
        name = part.label if self.dataset == "all" else part.label.removeprefix(f"{self.dataset}/")
        return self.folder / f"{name}{SUFFIX}"


@leaves_out_damaged
def sign_slices(group: SliceGroup, outputs: tuple[Path, ...], sketch: Sketch, batch: int, skip: Path | None) -> Counts:
    """Task: write a shard of signatures for each slice of a group, without the documents whose keys are in `skip`.

    `skip` is a file that split_keys wrote.
    """
    counts = Counts({}, [])
    keys = read_split(skip, names_of(group)) if skip else {}
    for part, output in zip(group, outputs, strict=True):
        _sign_slice(part, output, sketch, batch, keys.get(part.name, NO_ROWS), counts)
    return counts


def _sign_slice(part: Slice, output: Path, sketch: Sketch, batch: int, skipped: Rows, counts: Counts) -> None:
    documents = read_documents(part, counts, Rejects(output))
    chunks = batched_in_chunks(
        documents, batch, BATCH_CHARACTERS, _CHUNK_CHARACTERS, lambda document: len(document.text)
    )
    signed: list[tuple[Rows, NDArray[np.uint32]]] = []
    with write_shard(output, part.name, sketch) as shard:
        for chunk, is_last in chunks:
            signed.append(_sign_chunk(chunk, part, sketch, skipped, counts))
            del chunk  # a large document is gone before the next is read
            if is_last:
                rows, values = zip(*signed, strict=True)
                shard.add(np.concatenate(rows), np.concatenate(values))
                signed.clear()


def _sign_chunk(
    chunk: list[Document], part: Slice, sketch: Sketch, skipped: Rows, counts: Counts
) -> tuple[Rows, NDArray[np.uint32]]:
    """Return the rows (n) of the signed documents of a chunk, and their signatures (n × permutations)."""
    rows = np.array(rows_of(chunk), np.int64)
    is_skipped = is_among(rows, skipped)
    texts = [chunk[number].text for number in np.flatnonzero(~is_skipped).tolist()]
    with reserve_memory(memory_to_sign(texts), f"a document of {part.path}"):
        values, shingles = signatures(texts, sketch)
    is_signed = np.zeros(len(chunk), np.bool_)
    is_signed[~is_skipped] = shingles > 0
    sizes = np.array([utf8_size(document.text) for document in chunk], np.int64)
    count_signed(counts, part.source, sizes, is_signed, is_skipped)
    return rows[is_signed], values[shingles > 0]


def plan_skipped(
    run: StageRun, skip: Path | None, groups: Sequence[tuple[str, ...]], name: str
) -> tuple[dict[tuple[str, ...], Path], int]:
    """Run the step that gives each group of files its own keys to skip; returns their paths, and how many keys are."""
    if not skip:
        return {}, 0
    paths = {group: run.work / "skip" / f"{group[0]}.keys" for group in groups}
    arguments = {"key_set": skip, "groups": list(paths), "outputs": list(paths.values())}
    task = Task(name, split_skipped, arguments, tuple(paths.values()), memory=run.options.memory_bytes)
    return paths, run.step("skip", [task]).values(int)[0]


def split_skipped(key_set: Path, groups: Sequence[tuple[str, ...]], outputs: Sequence[Path], memory: int) -> Result:
    """Task: as split_keys; the value is the number of keys in the whole set."""
    return Result(Counts({}, []), split_keys(key_set, groups, outputs, memory))


def print_notes(counts: Counts, sketch: Sketch, skip: Path | None) -> None:
    """Print what share of documents has no signature, and whether there was nothing to skip."""
    short = counts.total(TOO_SHORT).documents
    read = counts.total(READ).documents
    if short:
        print(
            f"note: {short / read:.1%} of the documents ({short:,} of {read:,}) have no signature, as they are shorter "
            f"than a shingle of {sketch.width} {sketch.unit}s: only exact copies of them can be found",
            file=sys.stderr,
        )
    if skip is not None and not counts.total(SKIPPED).documents:
        print(f"note: no document of these files is among the keys of {skip}; none was skipped", file=sys.stderr)


if __name__ == "__main__":
    command(to_hash)
