"""Texts in chains of near-duplicates: their clusters, their corpus and an index of signatures."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dedup import to_hash
from tests.dedup.removal.clustered_corpus import (
    QUIET,
    Key,
    write_corpus,
)


@pytest.fixture(scope="session")
def chained(texts_of: Callable[[int, int], list[str]]) -> tuple[dict[str, list[str]], list[list[Key]]]:
    """Texts of several sources, and clusters of them that only chains of near-duplicates join."""
    names = ["arxiv/a.jsonl", "book/b é.jsonl", "wiki/c.parquet"]
    files: dict[str, list[str]] = {name: [] for name in names}
    clusters = []
    for number in range(12):
        words, others = (text.split() for text in texts_of(2, 2 * number))
        members = []
        for i in range(0, 60, 3):
            name = names[(i + number) % 3]
            members.append((name, len(files[name])))
            files[name].append(" ".join(others[: i * number // 3] + words[i * number // 3 :]))
            files[name].append("in no cluster")
        clusters.append(sorted(members))
    return files, clusters


@pytest.fixture(scope="session")
def chained_norm(chained: tuple, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus of those texts."""
    root = tmp_path_factory.mktemp("verified") / "NORM"
    write_corpus(root, chained[0])
    return root


@pytest.fixture(scope="session")
def indexed(
    chained: tuple, chained_norm: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[list[Key]]]:
    """Signatures of the same texts as an index, and clusters, all but two with documents of it."""
    folder = tmp_path_factory.mktemp("index") / "2022"
    to_hash("all", chained_norm, folder, 0, "0", 0, 99, options=QUIET)
    clusters = []
    for number, cluster in enumerate(chained[1]):
        old = [(f"index:2022:{file}", row) for file, row in cluster[1::3]]
        clusters.append((sorted(old) if number < len(chained[1]) - 2 else []) + cluster)
    return folder, clusters
