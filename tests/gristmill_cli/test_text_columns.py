"""--text_column: every command reads the texts of the column that is named."""

from pathlib import Path

import pytest

from dedup import (
    generate_connected_components,
    generate_duplicate_pairs,
    generate_duplicates_dict,
    to_hash,
)
from dedup.cluster_graph import cluster_graph
from gristmill.engine.options import RunOptions
from gristmill.errors import InputError
from gristmill_cli.dedup_commands import cluster, remove, sign
from preprocessing import normalize_text
from preprocessing.filter import filter as find_short
from preprocessing.shuffle_holdout import pass1, pass2

QUIET = RunOptions(workers=1, quiet=True)
BODY = {"text_column": "body"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the stages over documents with texts in two columns, all with --text_column body."""
    out = tmp_path_factory.mktemp("made")
    for source in ("book", "web"):
        lines = (
            f'{{"text": "title {source}{i}", "body": "{" ".join(f"{source}{i % 9}x{j}" for j in range(40))}"}}\n'
            for i in range(12)
        )
        (out / "raw" / source).mkdir(parents=True)
        (out / "raw" / source / "a.jsonl").write_text("".join(lines))
    normalize_text(out / "raw", out / "norm", options=QUIET, **BODY)
    find_short(out / "norm", out / "short.pickle", 0, "all", 200, QUIET, **BODY)
    for source in ("book", "web"):
        to_hash(source, out / "norm", out / "hash", 0, "0", 0, 9, options=QUIET, **BODY)
    generate_duplicate_pairs(out / "hash", out / "dup/duplicate_pairs.txt", options=QUIET)
    generate_connected_components(out / "dup", out / "dup/c.pickle", options=QUIET)
    generate_duplicates_dict(out / "dup/c.pickle", out / "dup/d.pickle", QUIET)
    pass1(out / "norm", out / "pass1", out / "dup/d.pickle", out / "short.pickle", options=QUIET, **BODY)
    pass2(0, 20, 1, out / "pass1", out / "train", out / "holdout", options=QUIET)
    return out


def test_the_short_commands_and_the_graph_of_a_cluster_read_the_column(made: Path, tmp_path: Path) -> None:
    sign(made / "norm", tmp_path / "hash", options=QUIET, **BODY)
    cluster(tmp_path / "hash", tmp_path / "c.parquet", options=QUIET)
    verified = {"verify": "jaccard", "corpus": made / "norm", "options": QUIET}
    assert remove(tmp_path / "c.parquet", tmp_path / "d.parquet", **verified, **BODY).total("duplicate").documents == 6
    graph = cluster_graph("book/a.jsonl@0", tmp_path / "c.parquet", made / "norm", **BODY)
    assert [(weight, graph.nodes[key]["excerpt"][:9]) for _, key, weight in graph.edges(data="weight")] == [
        (1.0, "book0x0 b")
    ]
    with pytest.raises(InputError, match=r"no document in row 0: .* or its texts are not in 'none' \(--text_column\)"):
        cluster_graph("book/a.jsonl@0", tmp_path / "c.parquet", made / "norm", text_column="none")
