"""Command: show one cluster as a graph: a node per document, an edge between two that are similar."""

import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import numpy as np
from numpy.typing import NDArray
from rich.console import Group
from rich.table import Table
from rich.text import Text
from tyro.conf import Positional

from dedup.candidates.document_ids import is_of_index, scope_of
from dedup.candidates.signature_shards import open_shard, reject_mixed_sketches, shard_paths, shards_named
from dedup.clustering.similarity import Signature
from dedup.minhash.matching_form import Unit
from dedup.minhash.shingles import shingle_sets
from dedup.removal.clusters import Clusters
from gristmill.command import command
from gristmill.counts import Counts
from gristmill.engine.execution.staging import local_copies
from gristmill.errors import InputError, OutputError, UsageError
from gristmill.io.corpus import list_corpus
from gristmill.io.documents import CorpusFile, DocKey, Document
from gristmill.io.readers import plan_slices, read_documents
from gristmill.io.writers import Rejects
from gristmill.kernels import kernel
from gristmill.storage.files import exists, reject_read_only, reject_unknown_scheme, write_file
from gristmill.storage.stores import store_of
from gristmill.wording import count_of

if TYPE_CHECKING:
    import networkx

Similarities = NDArray[np.float32]  # members × members
EXCERPT = 80  # characters
_SHOWN = 20  # members listed in the terminal


def cluster_graph(
    key: str,
    clusters: Path,
    corpus: Path | None = None,
    minhash: Path | None = None,
    threshold: float = 0.5,
    width: int = 13,
    unit: Unit = "character",
    max_documents: int = 2000,
    text_column: str = "text",
) -> "networkx.Graph":
    """Build the graph of the cluster of a document: its members, and edges between similar ones.

    A node is a key, in the order of the cluster (by default the first is kept), with the attributes `source`,
    `first_similarity` (to the first member) and, with `corpus`, `characters`, `excerpt` and the record's own `id`, if
    it has one. An edge joins two documents of Jaccard similarity `threshold` or more, with `weight`, the similarity,
    and `estimated`: False if computed on the texts' shingle sets (8 bytes of memory a character), True if on
    signatures. The graph's attributes are `cluster` (the first key), `threshold` and `similarity` (the kind of
    similarity).

    The arguments are those of show_cluster.

    Raises:
        UsageError: No cluster has the key, the cluster is too large, or neither corpus nor minhash is given.
        InputError: A file is damaged, or not of this corpus.
    """
    if not 0 <= threshold <= 1:
        raise UsageError(f"--threshold {threshold}: expected a similarity from 0 to 1, such as 0.5")
    if not 1 <= width <= 65_535:
        raise UsageError(f"--width {width}: expected shingles of 1 to 65,535 {unit}s")
    if corpus is None and minhash is None:
        raise UsageError("nothing to compare the documents by: give --corpus NORM/, or --minhash MINHASH/ to estimate")
    if corpus is not None and minhash is not None:
        raise UsageError("--minhash has no effect with --corpus, whose texts are compared: leave one of them out")
    if corpus is None and (width, unit, text_column) != (13, "character", "text"):
        raise UsageError(
            "--width, --unit and --text_column have no effect on signatures: give --corpus in place of --minhash, or "
            "leave them out"
        )
    with local_copies([clusters]) as (copy,):
        members = read_cluster(copy, DocKey.parse(key), max_documents)
    graph = _import_networkx().Graph(cluster=str(members[0]), threshold=threshold)
    for member in members:
        graph.add_node(str(member), source=scope_of(member.file))
    if corpus is not None:
        texts = _add_texts(graph, members, corpus, text_column)
        values = pairwise_jaccard([texts.get(member) for member in members], width, unit)
        graph.graph["similarity"] = f"Jaccard of {width}-{unit} shingles"
    elif minhash is not None:
        values, sketch_in_words = pairwise_estimates(minhash, members)
        graph.graph["similarity"] = f"estimated Jaccard: {sketch_in_words}"
    names = list(graph)
    for name, value in zip(names, values[0].tolist(), strict=True):
        if not np.isnan(value):
            graph.nodes[name]["first_similarity"] = round(value, 6)
    for one, other in np.argwhere(np.triu(values >= threshold, 1)).tolist():
        weight = round(float(values[one, other]), 6)
        graph.add_edge(names[one], names[other], weight=weight, estimated=corpus is None)
    return graph


def _add_texts(graph: "networkx.Graph", members: Sequence[DocKey], corpus: Path, text_column: str) -> dict[DocKey, str]:
    """Add to the nodes what is known from their texts; return the texts of the members that are of the corpus."""
    texts = dict[DocKey, str]()
    keys = [member for member in members if not is_of_index(member.file)]
    for document in read_some(corpus, keys, text_column):
        texts[document.key] = document.text
        attributes = {"characters": len(document.text), "excerpt": _excerpt(document.text)}
        if document.own_id is not None:
            attributes["id"] = _excerpt(document.own_id)
        graph.add_node(str(document.key), **attributes)
    return texts


def show_cluster(
    key: Positional[str],
    clusters: Path,
    corpus: Path | None = None,
    minhash: Path | None = None,
    threshold: float = 0.5,
    width: int = 13,
    unit: Unit = "character",
    max_documents: int = 2000,
    text_column: str = "text",
    graph: Path | None = None,
) -> Group:
    """Show the cluster that a document belongs to, and write it as a graph for Gephi, Cytoscape or NetworkX.

    Args:
        key: A document's key, <file>@<row>.
        clusters: The file of all clusters, DUP/connected_components.pickle or .parquet.
        corpus: NORM/, the folder of all sources, to compare texts; only files that hold documents of the cluster are
            read.
        minhash: MINHASH/, to estimate similarities from signatures instead, without the corpus.
        threshold: Minimum similarity of an edge.
        width: Length of a shingle in units.
        unit: The unit of shingles: character or word.
        max_documents: Maximum number of documents to compare; n documents need n² / 2 comparisons.
        text_column: The column or field of the text in the corpus.
        graph: A new .graphml file to write; by default none is written.

    Returns:
        A summary of the cluster, and a table of its members.
    """
    if graph is not None:
        _check_output(graph)
    cluster = cluster_graph(key, clusters, corpus, minhash, threshold, width, unit, max_documents, text_column)
    if graph is not None:
        content = BytesIO()
        _import_networkx().write_graphml_xml(cluster, content)
        write_file(graph, content.getvalue())
    return Group(describe(cluster), "", _list_members(cluster))


def _check_output(path: Path) -> None:
    """Raise UsageError for a name of another format, OutputError if a file of the name exists, whoever wrote it."""
    reject_unknown_scheme(path)
    reject_read_only([path])
    if path.suffix != ".graphml":
        raise UsageError(f"--graph {path}: expected a name that ends in .graphml")
    if exists(path) or path.is_symlink():
        raise OutputError(f"{path} exists, and would be overwritten: give another --graph, or remove it")


def describe(graph: "networkx.Graph") -> Table:
    """Summarise a graph: members, edges, similarities to the first member, members less similar to it, lengths."""
    first, *others = graph.nodes
    similarity = {key: graph.nodes[key].get("first_similarity", np.nan) for key in others}
    known = sorted(value for value in similarity.values() if not np.isnan(value))
    to_first = "unknown"
    if known:
        to_first = f"{known[0]:.2f} to {known[-1]:.2f}, median {np.median(known):.2f}"
    pairs = len(graph) * (len(graph) - 1) // 2
    sources = {source for _, source in graph.nodes(data="source")}
    chained = [key for key, value in similarity.items() if value < graph.graph["threshold"]]
    examples = _examples(chained, similarity)
    lines = {
        "members": f"{count_of(len(graph), 'document')} of {', '.join(sorted(sources))}",
        "similarity": graph.graph["similarity"],
        "edges": f"{graph.size():,} of {count_of(pairs, 'pair')} at {graph.graph['threshold']:.2f} or more",
        "first": first,
        "to the first": to_first,
        "chained": f"{count_of(len(chained), 'member')} less similar than that to the first{examples}",
    }
    lengths = {key: count for key, count in graph.nodes(data="characters") if count is not None}
    if lengths:
        longest = max(lengths, key=lengths.__getitem__)
        shortest = min(lengths, key=lengths.__getitem__)
        lines["longest"] = f"{longest}, {count_of(lengths[longest], 'character')}"
        lines["shortest"] = f"{shortest}, {count_of(lengths[shortest], 'character')}"
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, value in lines.items():
        table.add_row(Text(name, "bold"), Text(value))
    return table


def _list_members(graph: "networkx.Graph") -> Table:
    """Return a table of the first members."""
    table = Table("member", "characters", "to the first", "edges", "text", box=None, pad_edge=False)
    for key in list(graph.nodes)[:_SHOWN]:
        node = graph.nodes[key]
        name = f"{key} (id {node['id']})" if "id" in node else key
        characters = f"{node['characters']:,}" if "characters" in node else ""
        similarity = f"{node['first_similarity']:.2f}" if "first_similarity" in node else ""
        excerpt = node.get("excerpt", "")[:40]
        table.add_row(Text(name), characters, similarity, str(graph.degree(key)), Text(excerpt))
    if len(graph) > _SHOWN:
        table.add_row(f"and {len(graph) - _SHOWN:,} more")
    return table


def _examples(chained: Collection[str], similarity: dict[str, float]) -> str:
    """Return the least similar of some keys in words, after a colon; '' if there is none."""
    if not chained:
        return ""
    lowest = sorted(chained, key=lambda key: similarity[key])[:3]
    examples = ", ".join(f"{key} ({similarity[key]:.2f})" for key in lowest)
    ending = ", …" if len(chained) > 3 else ""
    return f": {examples}{ending}"


def _printable(letter: str) -> str:
    return letter if letter.isprintable() else " "


def _excerpt(text: str) -> str:
    """Return the beginning of a text, with spaces for characters that XML cannot hold."""
    start = "".join(map(_printable, text[: 4 * EXCERPT]))
    return " ".join(start.split())[:EXCERPT]


def _import_networkx() -> Any:
    try:
        import networkx
    except ImportError as error:
        raise UsageError("cluster_graph needs the package networkx: pip install 'gristmill[graph]'") from error
    return networkx


def read_cluster(path: Path, key: DocKey, max_documents: int) -> list[DocKey]:
    """Return the keys of the cluster that has `key`, in the input's order.

    UsageError if no cluster has the key, or its cluster has more than `max_documents` documents.
    """
    clusters = Clusters.open(path)
    number = _find_cluster(clusters, key)
    members = list[DocKey]()
    if number is not None:
        for block in clusters.blocks():
            for member in block[block["cluster"] == number]:
                members.append(DocKey(clusters.names[member["file"]], int(member["row"])))
    if not members:
        raise UsageError(
            f"{key} is in no cluster of {path}: no other document was found to be like it, "
            "or it is a key of another corpus"
        )
    if len(members) > max_documents:
        raise UsageError(
            f"the cluster of {key} has {len(members):,} documents: {len(members) * (len(members) - 1) // 2:,} "
            f"comparisons. --max_documents {max_documents} allows {max_documents:,} documents; give --max_documents "
            f"{len(members)} to compare them"
        )
    return members


def _find_cluster(clusters: Clusters, key: DocKey) -> int | None:
    """Return the number of the cluster that has `key`; None if none has."""
    file = -1
    if key.file in clusters.names:
        file = clusters.names.index(key.file)
    number = None
    for block in clusters.blocks():
        at_key = (block["file"] == file) & (block["row"] == key.row)
        if at_key.any():
            number = int(block["cluster"][at_key][0])
    return number


def read_some(corpus: Path, keys: Sequence[DocKey], text_column: str = "text") -> Iterator[Document]:
    """Yield a few documents straight from a corpus, reading only the slices that hold them.

    InputError if a file or a document is missing.
    """
    files = {file.name: file for file in list_corpus(corpus, text_column=text_column)}
    rows_by_file: dict[str, set[int]] = defaultdict(set)
    for key in keys:
        rows_by_file[key.file].add(key.row)
    for name, rows in rows_by_file.items():
        if name not in files:
            raise InputError(f"{corpus} has no file {name!r}, and the cluster does: give the corpus it was made from")
        with local_copies([files[name].path]) as (path,):
            yield from _read_rows(replace(files[name], path=path), rows)


def _read_rows(file: CorpusFile, rows: set[int]) -> Iterator[Document]:
    """Yield the documents in some rows of a file."""
    slices = plan_slices(file)
    first_rows = [part.first_row for part in slices]
    numbers = {bisect_right(first_rows, row) - 1 for row in rows}
    for number in sorted(numbers):
        for document in read_documents(slices[number], Counts({}, []), Rejects(None)):
            if document.key.row in rows:
                rows.remove(document.key.row)
                yield document
            if not rows:
                break
    if rows:
        raise InputError(
            f"{file.path} has no document in row {min(rows)}: it is not what was deduplicated, or its texts are not in "
            f"{file.text_column!r} (--text_column)"
        )


def pairwise_jaccard(texts: Sequence[str | None], width: int, unit: Unit) -> Similarities:
    """Return exact Jaccard similarities of texts (n × n); NaN where a text is None or shorter than a shingle."""
    sets = [shingle_sets([text or ""], width, unit)[0] for text in texts]
    starts = np.cumsum([0, *map(len, sets)])
    distinct, members = np.unique(np.concatenate(sets), return_inverse=True)
    similarities = np.full((len(sets), len(sets)), np.nan, np.float32)
    _compare_all(members.astype(np.uint32), starts, np.zeros(len(distinct), np.uint8), similarities)
    return similarities


def pairwise_estimates(minhash: Path, keys: Sequence[DocKey]) -> tuple[Similarities, str]:
    """Return Jaccard similarities estimated from a folder of signatures (n × n), and the sketch in words.

    NaN where a document has no signature; InputError if none has one.
    """
    numbers: dict[str, dict[int, int]] = defaultdict(dict)  # of the keys, by file and row
    for number, key in enumerate(keys):
        numbers[key.file][key.row] = number
    is_costly = store_of(minhash).needs_copies  # where only what is needed is fetched
    paths = shards_named(minhash, numbers) if is_costly else shard_paths(minhash)
    with local_copies(paths) as copies:
        shards = list(map(open_shard, copies))
        reject_mixed_sketches({shard.path: shard.header for shard in shards})
        signatures = dict[int, Signature]()
        for shard in shards:
            numbers_of_rows = numbers.get(shard.header.file)
            if not numbers_of_rows:
                continue
            for row, signature in zip(shard.rows().tolist(), chain.from_iterable(shard.signatures()), strict=True):
                if row in numbers_of_rows:
                    signatures[numbers_of_rows[row]] = signature.copy()
    if not signatures:
        raise InputError(f"{minhash} has a signature of no document of the cluster: it was made from another corpus")
    similarities = np.full((len(keys), len(keys)), np.nan, np.float32)
    for one, values in signatures.items():
        for other, other_values in signatures.items():
            similarities[one, other] = np.mean(values == other_values)
    return similarities, shards[0].header.describe()


@kernel
def _compare_all(members: np.ndarray, starts: np.ndarray, marks: np.ndarray, similarities: np.ndarray) -> None:
    """Fill `similarities` (n × n) with the Jaccard similarities of the sets members[starts[i] : starts[i + 1]].

    Members are indices of `marks` (scratch, all 0): those of one set are marked, and counted in each other set.
    """
    for first in range(len(similarities)):
        a = members[starts[first] : starts[first + 1]]
        for member in a:
            marks[member] = 1
        for second in range(first, len(similarities)):
            b = members[starts[second] : starts[second + 1]]
            shared = np.int64(0)
            for member in b:
                shared += marks[member]
            if len(a) and len(b):
                similarity = shared / (len(a) + len(b) - shared)
                similarities[first, second] = similarity
                similarities[second, first] = similarity
        for member in a:
            marks[member] = 0


if __name__ == "__main__":
    command(show_cluster)
