"""Stage: what to remove, every document of a cluster but the one that is kept, or but those that resemble none."""

import shutil
import sys
import time
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import msgspec
from numpy.typing import NDArray

from dedup.candidates.document_ids import is_of_index
from dedup.candidates.input_shards import SignatureShard, list_signature_shards
from dedup.minhash.matching_form import Unit
from dedup.minhash.signature_shards import open_shard
from dedup.minhash.signatures import Sketch
from dedup.removal.clusters import KEEP_ORDER, MEMBER, Clusters, Order
from dedup.removal.gather import Plan
from dedup.removal.judge_corpus import DIGEST, Settings, Sources, gather_and_judge, judged_parts
from dedup.removal.judging import Verification
from dedup.removal.keeping import BySource, Longest, Newest, parse_keep
from dedup.removal.removals import BY_KEY, REMOVAL, Books, remove_all_but_first, write_removals
from dedup.removal.verify import Measure
from gristmill.command import command
from gristmill.counts import Counts
from gristmill.engine.ledger import Ledger
from gristmill.engine.stage import STATE_DIR, MemoryBudget, RunOptions, Task, is_done, run_stage
from gristmill.errors import InputError, UsageError
from gristmill.io.documents import list_corpus
from gristmill.io.external_sort import ExternalSorter, read_records
from gristmill.io.keys import read_keys
from gristmill.io.parquet_tables import ROW_GROUP, is_table

NAME = "generate_duplicates_dict"


def generate_duplicates_dict(
    input_file: Path,
    out_file: Path,
    options: RunOptions = RunOptions(),
    *,
    keep: str = "first",
    dropped: tuple[Path, ...] = (),
    verify: Measure | None = None,
    threshold: float = 0.8,
    corpus: Path | None = None,
    width: int = 13,
    unit: Unit = "character",
    index: tuple[str, ...] = (),
) -> Counts:
    """Write the keys of all duplicates: of each cluster, all but the document that is kept.

    Beside a .pickle it writes a .parquet table of the same name, which says for each duplicate
    which document was kept in its place, and how similar they are where that was measured.
    Memory is bounded where the input is .parquet; a pickle is loaded whole.

    With --verify each cluster is walked in keep order: a document is removed for the first one kept
    before it whose similarity on the texts themselves reaches the threshold, or else kept itself. So
    what LSH took for similar by chance stays, and what only a chain of others joins.

    Args:
        input_file: DUP/connected_components.pickle, ours or SlimPajama's; or .parquet.
        out_file: DUP/duplicates.pickle, as SlimPajama's: {file: {rows}}; or .parquet, the table alone.
        options: Workers, memory, and when to stop; they change no output.
        keep: Which document of a cluster comes first: first (in key order), longest (in characters),
            source:wikipedia,book (in that order, then all others), or newest:meta.timestamp (a field of the
            record, a number or an ISO 8601 date; documents without it come last). Ties by key order.
        dropped: Key sets (.pickle or .parquet) of documents that another stage drops, such as FILTERED.pickle:
            they come last, so that no cluster loses its last copy.
        verify: jaccard (shared shingles of all shingles of both), or containment (shared shingles of those of
            the document that is removed). Without it nothing is measured.
        threshold: The similarity from which on a document is removed.
        corpus: NORM/, the folder whose files were signed; wanted for verify, longest and newest.
        width: Units of a shingle, as to_hash was told.
        unit: What a shingle is made of.
        index: For --verify jaccard, the same folders of shards, or NAME=FOLDER, that the clusters were made with:
            similarity to documents of an index is estimated from signatures, as their texts are not at hand.

    Returns:
        Documents of clusters read, kept and duplicate, per source; with --verify those spared, too.
    """
    start = time.perf_counter()
    is_table(out_file)
    is_table(input_file)
    policy = parse_keep(keep)
    shards = _list_index(index) if verify else []
    sketch = _sketch_of(shards[0]) if shards else None
    verification = Verification(verify, threshold, width, unit, sketch) if verify else None
    reads_corpus = verify is not None or isinstance(policy, Longest | Newest)
    if reads_corpus and corpus is None:
        asked = f"--verify {verify}" if verify else f"--keep {keep}"
        raise UsageError(f"{asked} reads the documents: give --corpus NORM/, the folder whose files were signed")
    settings = Settings(input_file, out_file, policy, tuple(dropped), verification)
    name, state = f"{NAME}-{out_file.name}", out_file.parent / STATE_DIR
    files = list_corpus(corpus) if corpus is not None and reads_corpus else []
    work = state / f"{name}-{settings.digest}" if reads_corpus else None
    corpus_files = (*(file.path for file in files), *(shard.path for shard in shards))
    final = _final_task(settings, corpus_files, work, MemoryBudget(options.memory_bytes))
    entries = Ledger(state / f"{name}.jsonl").read()
    note = ""
    if work and not is_done(final, entries, final.fingerprint()):
        note = gather_and_judge(settings, Sources(files, shards), work, options)
    counts = run_stage(name, [final], state, options, started=start)
    for folder in state.glob(f"{name}-{'?' * DIGEST}"):  # killed runs with other options left theirs
        shutil.rmtree(folder, ignore_errors=True)
    if isinstance(policy, BySource) and (unseen := set(policy.sources) - set(counts.tallies)):
        note += f"note: no cluster has a document of {', '.join(sorted(unseen))}; {', '.join(counts.tallies)} have\n"
    if note and not options.quiet:
        print(note, end="", file=sys.stderr, flush=True)
    return counts


def _final_task(settings: Settings, read: tuple[Path, ...], work: Path | None, budget: MemoryBudget) -> Task:
    """The task that writes the outputs, from the clusters and from what else was `read`."""
    outputs = tuple(dict.fromkeys([settings.out_file, settings.out_file.with_suffix(".parquet")]))
    arguments = {"settings": settings, "work": work, "budget": budget}
    size = settings.input_file.stat().st_size if settings.input_file.is_file() else 0
    return Task("write", write_duplicates, arguments, (*settings.inputs, *read), outputs, size)


def write_duplicates(settings: Settings, work: Path | None, budget: MemoryBudget) -> Counts:
    """Write which documents are duplicates, and of which: as judged in `work`, or by keys alone."""
    if work:
        plan, counts = Plan.load(work), Counts({}, [])
        judged = judged_parts(plan, work)
        for path in judged:
            counts.merge(msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=Counts))
        found = chain.from_iterable(read_records(path, REMOVAL, ROW_GROUP) for path in judged)
        _write(settings.out_file, plan.names, found, budget)
        return counts
    clusters = Clusters.open(settings.input_file)
    books = Books(clusters.names)
    order = Order(clusters.names, settings.keep, [read_keys(path, clusters.names) for path in settings.dropped])
    blocks = map(order.assign, clusters.blocks())
    if order.is_of_keys:
        _write(settings.out_file, clusters.names, remove_all_but_first(blocks, books), budget)
    else:
        with ExternalSorter(_runs(settings.out_file, "order"), MEMBER, KEEP_ORDER, budget // 2) as sorter:
            for block in blocks:
                sorter.add(block)
            _write(settings.out_file, clusters.names, remove_all_but_first(sorter, books), budget // 2)
    return books.counts()


def _list_index(index: tuple[str, ...]) -> list[SignatureShard]:
    """The shards of indexes. UsageError where they cannot be compared."""
    if not index:
        return []
    shards, _ = list_signature_shards(Path(index[0].rpartition("=")[2]), index)  # compares its own folder, too
    return [shard for shard in shards if is_of_index(shard.file)]


def _sketch_of(shard: SignatureShard) -> Sketch:
    """How the signatures of an index were made, so that ours can be made alike."""
    header = msgspec.structs.asdict(open_shard(shard.path).header)
    try:
        return msgspec.convert({name: value for name, value in header.items() if name != "file"}, Sketch)
    except msgspec.ValidationError as error:
        raise InputError(f"{shard.path}: signatures that are made in a way we do not know ({error})") from error


def _write(out_file: Path, names: list[str], blocks: Iterable[NDArray], memory: int) -> None:
    """Write REMOVALs in any order."""
    with ExternalSorter(_runs(out_file, "removals"), REMOVAL, BY_KEY, memory) as sorter:
        for block in blocks:
            sorter.add(block)
        write_removals(out_file, names, sorter)


def _runs(out_file: Path, what: str) -> Path:
    return out_file.parent / STATE_DIR / f"{NAME}-{out_file.name}-{what}.runs"


if __name__ == "__main__":
    command(generate_duplicates_dict)
