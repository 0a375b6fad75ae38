"""Stage: list the duplicates to remove: all but one per cluster or, with --verify, only confirmed ones."""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip


from dedup.candidates.input_shards import check_indexes, list_shards_of, list_signature_shards
from dedup.clustering.keep_policy import BySource, check_sources, parse_keep
from dedup.clustering.similarity import Measure, SimilarityCheck
from dedup.minhash.matching_form import Unit
from dedup.removal import steps
from dedup.removal.fetching import CLUSTERED, UNREADABLE_FIELD, WITHOUT_FIELD
from dedup.removal.removal_table import BELOW_THRESHOLD, DUPLICATE
from dedup.removal.steps import RemovalSettings
from gristmill.command import command, reads_no_documents
from gristmill.counts import READ, Counts
from gristmill.engine.options import RunOptions
from gristmill.engine.run import StageRun, open_stage
from gristmill.engine.staleness.ledger import Ledger, run_name
from gristmill.engine.staleness.outputs import reject_overlapping_folders
from gristmill.engine.task import Stage
from gristmill.errors import UsageError
from gristmill.io.artefacts import is_table
from gristmill.io.corpus import list_corpus
from gristmill.io.documents import CorpusFile, paths_of, sources_of
from gristmill.io.files import STATE_DIR
from gristmill.paths import name_of
from gristmill.storage.files import is_file
from gristmill.wording import count_of

STAGE = Stage("generate_duplicates_dict", version=6, libraries=("pyarrow", "unicode"))


@reads_no_documents(unless="corpus")
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
    text_column: str = "text",
) -> Counts:
    """Write the keys of all duplicates: of each cluster, all but the document that is kept.

    With a .pickle, a .parquet table of the same name is written too: each duplicate, the document kept in its
    place, their similarity if it was measured, and a rank, lowest for the one that would be kept next. Memory is
    bounded if the input is .parquet; a pickle is loaded at once.

    With --verify, a document is removed only if its similarity to an earlier kept document of its cluster, computed on
    the texts, reaches the threshold. Documents that share a band by chance, or that are connected only through others,
    are therefore kept.

    With --corpus, if documents have a field `id`, the table has the columns id and kept_id, and OUT_clusters.parquet,
    next to the table, lists the clusters with ids.

    Args:
        input_file: DUP/connected_components.pickle, ours or SlimPajama's; or .parquet.
        out_file: DUP/duplicates.pickle, as SlimPajama's: {file: {rows}}; or .parquet, the table alone.
        options: Workers, memory, and when to stop; they change no output.
        keep: The document of a cluster that is kept: first (in key order), longest (in characters),
            source:wikipedia,book (in that order, then all others), or newest:meta.timestamp (a field of the record, a
            number or an ISO 8601 date; documents without it come last). Ties are broken by key order.
        dropped: Key sets (.pickle or .parquet) of documents that another stage drops, such as FILTERED.pickle:
            they are kept last, so that no cluster loses its last copy.
        verify: Check candidates by jaccard (their shared shingles divided by all distinct shingles of the two), or
            containment (divided by the shingles of the document to remove). By default they are not checked.
        threshold: Minimum similarity at which a document is removed.
        corpus: NORM/, the folder whose files to_hash read; required by --verify, longest and newest. Without them it
            is read for the documents' own ids alone.
        width: Length of a shingle in units, as given to to_hash.
        unit: The unit of shingles: character or word.
        index: For --verify jaccard, the --index values that the clusters were made with (FOLDER or NAME=FOLDER):
            similarity to documents of an index is estimated from signatures, as there are no texts.
        text_column: The column or field of the text in the corpus.

    Returns:
        Documents of clusters read, kept and duplicate, per source; with --verify those below the threshold, too.

    Raises:
        UsageError: Options contradict each other, or a file is missing.
        InputError: A file is damaged, or the corpus is not the one that to_hash read.
    """
    for path in (out_file, input_file):
        is_table(path)  # UsageError unless it is a .pickle or .parquet
    table = out_file.with_suffix(".parquet")
    _reject_overwriting((input_file, *dropped), {out_file, table, steps.clusters_next_to(table)})
    check = SimilarityCheck(verify or "jaccard", threshold, width, unit)  # raises for a value out of range
    if verify is None and (threshold, width, unit, index) != (0.8, 13, "character", ()):
        raise UsageError(
            "--threshold, --width, --unit and --index have no effect where nothing is compared: give --verify jaccard, "
            "or leave them out"
        )
    if corpus is None and text_column != "text":
        raise UsageError(f"--text_column {text_column} has no effect without --corpus: give both, or neither")
    settings = RemovalSettings(input_file, parse_keep(keep), tuple(dropped), check if verify else None)
    files = list_corpus(corpus, text_column=text_column) if corpus is not None else []
    _check_corpus(settings, corpus, files, out_file, f"--verify {verify}" if verify else f"--keep {keep}")
    keys = _key_set(out_file)
    outputs = [keys] if keys else []
    outputs.append(table)
    reads: dict[Path, Sequence[Path] | None] = {input_file.with_suffix(""): None}  # .pickle or .parquet
    if corpus:
        outputs.append(steps.clusters_next_to(table))
        reads[corpus] = paths_of(files)
    with open_stage(STAGE, out_file.parent, options, label=out_file.stem, reads=reads, files=outputs) as run:
        fetched = Counts({}, [])
        ids = None
        if corpus:
            indexes = list_shards_of(None, index)
            check_indexes(run, indexes, index)
            shards = list_signature_shards(run, indexes)
            if shards and settings.check:
                settings = replace(settings, check=replace(settings.check, sketch=shards[0].header.sketch))
            members = steps.sort(run, settings)
            files_of_members, ids, fetched = steps.fetch(run, settings, members, files, shards)
            decided = steps.decide(run, settings, members, files_of_members)
        else:
            decided = steps.decide_without_documents(run, settings)
        steps.write(run, settings, decided, ids, table, keys)
        counts = run.finish(decided.counts)
        _print_notes(run, settings, fetched, counts)
    return counts


def _key_set(out_file: Path) -> Path | None:
    """Return the .pickle to write: `out_file`, or one next to the table that an earlier run wrote, as the two agree."""
    keys = out_file.with_suffix(".pickle")
    if out_file == keys:
        return keys
    ledger = Ledger(out_file.parent / STATE_DIR, run_name(STAGE.name, out_file.stem))
    is_of_earlier_run = is_file(keys) and name_of(keys) in ledger.outputs()
    return keys if is_of_earlier_run else None


def _reject_overwriting(inputs: tuple[Path, ...], outputs: set[Path]) -> None:
    """Raise UsageError if an output, such as the table next to a pickle, is an input."""
    written = {output.resolve() for output in outputs}
    for path in inputs:
        if path.resolve() in written:
            raise UsageError(f"{path} is an input, and would be overwritten: give --out_file another name")


def _check_corpus(
    settings: RemovalSettings, corpus: Path | None, files: list[CorpusFile], out_file: Path, option: str
) -> None:
    """Raise UsageError if `option` needs a corpus and there is none, or it lacks a source that --keep names."""
    if corpus is not None:
        check_sources(settings.keep, sources_of(files))
        reject_overlapping_folders(corpus, out_file)
    elif settings.needs_corpus:
        raise UsageError(f"{option} reads the documents: give --corpus NORM/, the folder whose files were signed")


def _print_notes(run: StageRun, settings: RemovalSettings, fetched: Counts, decided: Counts) -> None:
    """Print which documents lack the policy's field, what the similarity check found, and sources that none has."""
    lines = []
    keep = settings.keep
    missing = fetched.total(WITHOUT_FIELD).documents
    unreadable = fetched.total(UNREADABLE_FIELD).documents
    if run.ran and (missing or unreadable):
        documents = count_of(decided.total(READ).documents, "document")
        lines.append(
            f"note: {'.'.join(keep.path)} is missing in {missing:,} of {documents}, and neither a number nor a date in "
            f"{unreadable:,}; they come last. {'; '.join(fetched.examples)}"
        )
    if run.ran and settings.check:
        confirmed = decided.total(DUPLICATE).documents
        below = decided.total(BELOW_THRESHOLD).documents
        text = sum(fetched.total(reason).bytes for reason in (CLUSTERED, WITHOUT_FIELD, UNREADABLE_FIELD))
        lines.append(
            f"verified {count_of(confirmed + below, 'candidate')}: {confirmed:,} confirmed, {below:,} below "
            "the threshold; "
            f"read {text / 1e6:,.1f} MB of text in {time.perf_counter() - run.started:.1f} s"
        )
    if isinstance(keep, BySource) and (unseen := sorted(set(keep.sources) - set(decided.tallies))):
        lines.append(f"note: no cluster has a document of {', '.join(unseen)}; {', '.join(decided.tallies)} have")
    if not run.options.quiet:
        print("".join(f"{line}\n" for line in lines), end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    command(generate_duplicates_dict)
