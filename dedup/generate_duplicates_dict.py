"""Stage: list the duplicates to remove: all but one per cluster or, with --verify, only confirmed ones."""

import shutil
import sys
import time
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import msgspec

from dedup.candidates.document_ids import is_of_index
from dedup.candidates.input_shards import SignatureShard, list_signature_shards, parse_indexes
from dedup.minhash.matching_form import Unit
from dedup.minhash.signature_shards import open_shard
from dedup.minhash.signatures import Sketch
from dedup.removal import steps
from dedup.removal.keep_policy import BySource, Newest, check_sources, parse_keep
from dedup.removal.removal_table import BELOW_THRESHOLD, DUPLICATE
from dedup.removal.similarity import Measure, SimilarityCheck
from dedup.removal.steps import RemovalSettings
from dedup.removal.texts import CLUSTERED, UNREADABLE_FIELD, WITHOUT_FIELD
from gristmill.command import command
from gristmill.counts import READ, Counts
from gristmill.engine.ledger import Ledger
from gristmill.engine.stage import STATE_DIR, RunOptions, is_done, run_stage
from gristmill.errors import InputError, UsageError
from gristmill.io.documents import CorpusFile, list_corpus
from gristmill.io.parquet_tables import is_table


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

    With a .pickle, a .parquet table of the same name is written too: each duplicate, the document kept in its
    place, and their similarity if it was measured. Memory is bounded if the input is .parquet; a pickle is loaded
    whole.

    With --verify, a document is removed only if its similarity to an earlier kept document of its cluster,
    computed on the texts, reaches the threshold. Documents that share a band by chance, or that only a
    chain of others connects, are therefore kept.

    Args:
        input_file: DUP/connected_components.pickle, ours or SlimPajama's; or .parquet.
        out_file: DUP/duplicates.pickle, as SlimPajama's: {file: {rows}}; or .parquet, the table alone.
        options: Workers, memory, and when to stop; they change no output.
        keep: The document of a cluster that is kept: first (in key order), longest (in characters),
            source:wikipedia,book (in that order, then all others), or newest:meta.timestamp (a field of the
            record, a number or an ISO 8601 date; documents without it come last). Ties by key order.
        dropped: Key sets (.pickle or .parquet) of documents that another stage drops, such as FILTERED.pickle:
            they are kept last, so that no cluster loses its last copy.
        verify: Check candidates by jaccard (their shared shingles divided by all distinct shingles of the two), or
            containment (divided by the shingles of the document to remove). By default none are checked.
        threshold: Minimum similarity at which a document is removed.
        corpus: NORM/, the folder whose files to_hash read; required by --verify, longest and newest.
        width: Length of a shingle in units, as given to to_hash.
        unit: The unit of shingles: character or word.
        index: For --verify jaccard, the --index values that the clusters were made with (FOLDER or NAME=FOLDER):
            similarity to documents of an index is estimated from signatures, as there are no texts.

    Returns:
        Documents of clusters read, kept and duplicate, per source; with --verify those below the threshold, too.

    Raises:
        UsageError: Options contradict each other, or a file is missing.
        InputError: A file is damaged, or the corpus is not the one that to_hash read.
    """
    start = time.perf_counter()
    for path in (out_file, input_file):
        is_table(path)  # UsageError unless it is a .pickle or .parquet
    policy = parse_keep(keep)
    shards = _list_index(index) if verify else []
    sketch = _sketch_of(shards[0]) if shards else None
    check = SimilarityCheck(verify or "jaccard", threshold, width, unit, sketch)  # raises for a value out of range
    settings = RemovalSettings(input_file, out_file, policy, tuple(dropped), check if verify else None)
    if corpus is not None and isinstance(policy, BySource):
        check_sources(policy, {file.source for file in list_corpus(corpus)})
    files = _list_files(settings, corpus, f"--verify {verify}" if verify else f"--keep {keep}")
    name, state = f"{steps.NAME}-{out_file.name}", out_file.parent / STATE_DIR
    write, notes = steps.plan_write(settings, files, shards, options), ""
    if settings.reads_corpus and not is_done(write, Ledger(state / f"{name}.jsonl").read(), write.fingerprint()):
        notes = _decide_on_documents(settings, files, shards, options)
    counts = run_stage(name, [write], state, options, started=start)
    for folder in state.glob(f"{name}-{'?' * steps.DIGEST}"):  # of this run, and of killed runs with other options
        shutil.rmtree(folder, ignore_errors=True)
    if isinstance(policy, BySource) and (unseen := set(policy.sources) - set(counts.tallies)):
        notes += f"note: no cluster has a document of {', '.join(sorted(unseen))}; {', '.join(counts.tallies)} have\n"
    if notes and not options.quiet:
        print(notes, end="", file=sys.stderr, flush=True)
    return counts


def _list_index(index: tuple[str, ...]) -> list[SignatureShard]:
    """The shards of indexes. UsageError if they were made with different sketches."""
    if not index:
        return []
    _, folder = parse_indexes(index)[0]  # in place of a corpus's folder, which list_signature_shards requires
    shards, _ = list_signature_shards(folder, index)
    return [shard for shard in shards if is_of_index(shard.file)]


def _sketch_of(shard: SignatureShard) -> Sketch:
    """The sketch of a shard, to make signatures of texts that compare with it. InputError if it is unknown."""
    header = msgspec.structs.asdict(open_shard(shard.path).header)
    try:
        return msgspec.convert({name: value for name, value in header.items() if name != "file"}, Sketch)
    except msgspec.ValidationError as error:
        raise InputError(f"{shard.path}: signatures that are made in a way we do not know ({error})") from error


def _list_files(settings: RemovalSettings, corpus: Path | None, option: str) -> list[CorpusFile]:
    """The files of the corpus if documents are read. UsageError if `option` needs a corpus and there is none."""
    if not settings.reads_corpus:
        return []
    if corpus is None:
        raise UsageError(f"{option} reads the documents: give --corpus NORM/, the folder whose files were signed")
    return list_corpus(corpus)


def _decide_on_documents(
    settings: RemovalSettings, files: list[CorpusFile], shards: list[SignatureShard], options: RunOptions
) -> str:
    """Run all steps but the last: they leave the decisions in the work folder. Return notes for the user."""
    start = time.perf_counter()
    plan = steps.sort(settings, options)
    fetched, slices = steps.fetch(settings, plan, files, shards, options)
    decided = steps.decide(settings, plan, slices, options)
    return _notes(settings, fetched, decided, time.perf_counter() - start)


def _notes(settings: RemovalSettings, fetched: Counts, decided: Counts, seconds: float) -> str:
    """Lines that say which documents lack the policy's field, and what the similarity check found."""
    lines = []
    missing, unreadable = fetched.total(WITHOUT_FIELD).documents, fetched.total(UNREADABLE_FIELD).documents
    if isinstance(settings.keep, Newest) and (missing or unreadable):
        lines.append(
            f"note: {settings.keep.field} is missing in {missing:,} of {decided.total(READ).documents:,} documents, "
            f"and neither a number nor a date in {unreadable:,}; they come last. {'; '.join(fetched.examples)}"
        )
    if settings.check:
        confirmed, below = decided.total(DUPLICATE).documents, decided.total(BELOW_THRESHOLD).documents
        text = sum(fetched.total(reason).bytes for reason in (CLUSTERED, WITHOUT_FIELD, UNREADABLE_FIELD))
        lines.append(
            f"verified {confirmed + below:,} candidates: {confirmed:,} confirmed, {below:,} below the threshold; "
            f"read {text / 1e6:,.1f} MB of text in {seconds:.1f} s"
        )
    return "".join(f"{line}\n" for line in lines)


if __name__ == "__main__":
    command(generate_duplicates_dict)
