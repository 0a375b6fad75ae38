"""Commands sign, cluster and remove: deduplication in three steps, without SlimPajama's positional arguments."""

import sys
from pathlib import Path

from tyro.conf import Positional

from dedup.candidates.input_shards import Scope
from dedup.clustering.similarity import Measure
from dedup.generate_connected_components import generate_connected_components
from dedup.generate_duplicates_dict import generate_duplicates_dict
from dedup.minhash.matching_form import Unit
from dedup.minhash.schemes import Hash
from dedup.to_hash import to_hash
from gristmill.command import reads_no_documents
from gristmill.counts import Counts
from gristmill.engine.options import RunOptions


def sign(
    corpus: Positional[Path],
    out: Path,
    hash: Hash = "xxh32",
    unit: Unit = "character",
    width: int = 13,
    permutations: int = 128,
    seed: int = 1,
    skip: Path | None = None,
    text_column: str = "text",
    options: RunOptions = RunOptions(),
) -> Counts:
    """Compute a MinHash signature of every document of a corpus. Then run cluster and remove.

    A document shorter than a shingle gets no signature and is never a near-duplicate.

    Args:
        corpus: Folder of all sources: CORPUS/<source>/**.
        out: Folder of signature shards to write.
        hash: Hash family, as explained in the help of to_hash.
        unit: Unit of a shingle: character or word.
        width: Length of a shingle in units.
        permutations: Number of slots of a signature.
        seed: Seed of the permutations.
        skip: Keys of documents to leave out, such as the copies that generate_exact_pairs found.
        text_column: The column or field that holds the text.
        options: Workers, memory, and when to stop; they change no output.

    Returns:
        Documents read, signed, skipped and too short (no shingle), per source.
    """
    return to_hash(
        "all", corpus, out, 0, "0", 0, sys.maxsize, width, unit=unit, hash=hash, permutations=permutations, seed=seed,
        skip=skip, text_column=text_column, options=options,
    )  # fmt: skip


@reads_no_documents()
def cluster(
    minhash: Positional[Path],
    out: Path,
    range: int | None = None,
    bands: int | None = None,
    scope: Scope = "global",
    index: tuple[str, ...] = (),
    pairs: Path | None = None,
    threshold: float = 0.8,
    options: RunOptions = RunOptions(),
) -> Counts:
    """Find clusters of near-duplicates: documents connected by pairs whose signatures share a band.

    Args:
        minhash: Folder of signature shards that `sign` wrote.
        out: The clusters to write: .parquet, a table of cluster, file and row; or .pickle, as SlimPajama's.
        range: Rows of a band; by default, with --bands, the best for the threshold: 13 for 0.8.
        bands: Number of bands: 9 for 0.8. The expected recall is printed; `gristmill bands` shows its curve.
        scope: per-source compares documents only with documents of their own source.
        index: Folders of signature shards, or NAME=FOLDER, of corpora deduplicated before.
        pairs: A folder of duplicate_pairs*.txt to read as well, such as the output of generate_exact_pairs.
        threshold: Similarity of near-duplicates, from which bands that are not given are chosen.
        options: Workers, memory, and when to stop; they change no output.

    Returns:
        Documents read (those with a signature or in a pair), clustered and alone, per source.
    """
    return generate_connected_components(
        pairs or minhash, out, minhash, range=range, bands=bands, threshold=threshold, index=index, scope=scope,
        options=options,
    )  # fmt: skip


@reads_no_documents(unless="corpus")
def remove(
    clusters: Positional[Path],
    out: Path,
    keep: str = "first",
    dropped: tuple[Path, ...] = (),
    verify: Measure | None = None,
    threshold: float = 0.8,
    corpus: Path | None = None,
    width: int = 13,
    unit: Unit = "character",
    index: tuple[str, ...] = (),
    text_column: str = "text",
    options: RunOptions = RunOptions(),
) -> Counts:
    """List the duplicates to remove: all but one document of each cluster or, with --verify, only confirmed duplicates.

    No document is removed here; give the list to `shuffle_holdout pass1 --duplicates`. With --corpus, if documents have
    a field `id`, the table has it too, and OUT_clusters.parquet lists the clusters with ids.

    Args:
        clusters: The clusters that `cluster` wrote.
        out: The list to write: .parquet, with the document kept in place of each duplicate and their similarity; or
            .pickle, as SlimPajama's, along with a table of the same name.
        keep: The document of a cluster that is kept: first, longest, source:A,B or newest:FIELD.
        dropped: Key sets of documents that another stage drops, such as filter's; such a document is kept only if there
            is no other.
        verify: Confirm candidates by the jaccard similarity or the containment of their texts; by default they are not
            checked.
        threshold: Minimum similarity at which a document is removed, for --verify.
        corpus: The folder that was signed; required by --verify, longest and newest, and for the documents' own ids.
        width: Length of a shingle in units, as given to `sign`, for --verify.
        unit: Unit of a shingle: character or word, for --verify.
        index: For --verify jaccard, the --index values that `cluster` was given.
        text_column: The column or field of the corpus that holds the text.
        options: Workers, memory, and when to stop; they change no output.

    Returns:
        Documents of clusters read, kept and duplicate, per source; with --verify those below the threshold, too.
    """
    return generate_duplicates_dict(
        clusters, out, options, keep=keep, dropped=dropped, verify=verify, threshold=threshold, corpus=corpus,
        width=width, unit=unit, index=index, text_column=text_column,
    )  # fmt: skip
