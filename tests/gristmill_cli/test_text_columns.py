"""--text_column: a stage that is given another one than the stages before is refused: it would find other texts."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from dedup import (
    dedup_train,
    generate_connected_components,
    generate_duplicate_pairs,
    generate_duplicates_dict,
    generate_exact_pairs,
    to_hash,
)
from dedup.cluster_graph import cluster_graph
from gristmill.engine.options import RunOptions
from gristmill.errors import InputError, UsageError
from gristmill_cli.dedup_commands import cluster, remove, sign
from preprocessing import normalize_text, tokenize_corpus, train_tokenizer
from preprocessing.apply import apply
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


Stage = Callable[[Path, Path], object]
READERS: dict[str, tuple[str, Stage]] = {  # the stage that had another column, and a call
    "filter": ("normalize_text", lambda run, out: find_short(run / "norm", out / "f.pickle", 0, "all", 9, QUIET)),
    "to_hash": ("normalize_text", lambda run, out: to_hash("all", run / "norm", out, 0, "0", 0, 9, options=QUIET)),
    "exact": ("normalize_text", lambda run, out: generate_exact_pairs(
        run / "norm", out / "duplicate_pairs.txt", options=QUIET)),
    "apply": ("normalize_text", lambda run, out: apply(run / "norm", out, "m:f", QUIET)),
    "verify": ("to_hash", lambda run, out: generate_duplicates_dict(
        run / "dup/c.pickle", out / "d.pickle", QUIET, verify="jaccard", corpus=run / "copy")),
    "pass1": ("normalize_text", lambda run, out: pass1(run / "norm", out, options=QUIET)),
    "pass1's short documents": (
        "filter", lambda run, out: pass1(run / "copy", out, None, run / "short.pickle", options=QUIET)),
    "pass1's duplicates": ("to_hash", lambda run, out: pass1(run / "copy", out, run / "dup/d.pickle", options=QUIET)),
    "dedup_train": ("pass1", lambda run, out: dedup_train(1, run / "train", run / "holdout", out, options=QUIET)),
    "train_tokenizer": ("pass1", lambda run, out: train_tokenizer(run / "train", out, 400, options=QUIET)),
    "tokenize": ("pass1", lambda run, out: tokenize_corpus(run / "train", out / "m.model", out / "tokens", QUIET)),
}  # fmt: skip


@pytest.mark.parametrize(("stage", "call"), READERS.values(), ids=READERS)
def test_another_column_than_that_of_the_stages_before_is_refused(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, call: Stage
) -> None:
    if not (made / "copy").exists():
        shutil.copytree(made / "norm", made / "copy", ignore=shutil.ignore_patterns(".gristmill"))
    (tmp_path / "m.py").write_text("def f(documents):\n    return documents\n")
    (tmp_path / "m.model").touch()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=rf"^--text_column text: /.* made by {stage} with --text_column body: give"):
        call(made, tmp_path)
    assert not list(tmp_path.glob("*.pickle")) and not list(tmp_path.glob("*/a.jsonl*"))


def test_a_second_column_may_be_normalised_and_another_copy_read(made: Path, tmp_path: Path) -> None:
    normalize_text(made / "norm", tmp_path / "both", options=QUIET)
    find = partial(find_short, n_docs=0, dataset_name="all", threshold=9, options=QUIET)
    find(tmp_path / "both", tmp_path / "f.pickle")
    with pytest.raises(
        UsageError, match=r"--text_column body: .*both was made by normalize_text with --text_column text"
    ):
        find(tmp_path / "both", tmp_path / "f.pickle", **BODY)
    shutil.copytree(made / "norm", tmp_path / "copy", ignore=shutil.ignore_patterns(".gristmill"))
    find(tmp_path / "copy", tmp_path / "g.pickle")


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
