"""Connected components equal a plain search's, in memory and by external sort."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dedup.candidates.connected_components import component_labels
from dedup.clustering.union_find import UnionFind, union_find_fits

NODES = 30
_PAIRS = st.lists(st.tuples(st.integers(0, NODES - 1), st.integers(0, NODES - 1)), max_size=60)


def plain_search(pairs: list[tuple[int, int]]) -> list[int]:
    label = list(range(NODES))
    for _ in range(NODES):
        for a, b in pairs:
            label[a] = label[b] = min(label[a], label[b])
    return label


def roots_of(edges: np.ndarray, nodes: int) -> np.ndarray:
    union_find = UnionFind(nodes)
    union_find.union(edges)
    return union_find.roots()


def labels_of(edges: np.ndarray, nodes: int, folder: Path, memory: int) -> list[tuple[int, int]]:
    blocks = component_labels(np.array_split(edges.astype(np.uint64), 3), nodes, folder, memory)
    return [label for block in blocks for label in block.tolist()]


@given(_PAIRS)
def test_components_are_those_of_a_plain_search(pairs: list[tuple[int, int]]) -> None:
    assert roots_of(np.array(pairs, np.int64).reshape(-1, 2), NODES).tolist() == plain_search(pairs)


@settings(deadline=None)
@given(_PAIRS)
def test_labels_leave_out_who_is_alone(tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[int, int]]) -> None:
    roots, folder = plain_search(pairs), tmp_path_factory.mktemp("labels")
    expected = [(node, root) for node, root in enumerate(roots) if roots.count(root) > 1]
    edges = np.array(pairs, np.int64).reshape(-1, 2)
    assert not union_find_fits(NODES, 1)
    assert labels_of(edges, NODES, folder, memory=1) == expected
    assert labels_of(edges, NODES, folder, memory=1 << 30) == expected


@pytest.mark.parametrize("shape", ["chain", "shuffled chain", "star", "random"])
def test_external_components_of_many_runs(tmp_path: Path, shape: str) -> None:
    count, chance = 20_000, np.random.default_rng(0)
    chain = np.stack([np.arange(1, count), np.arange(count - 1)], axis=1)
    edges = {
        "chain": chain,
        "shuffled chain": chance.permutation(count)[chance.permutation(chain)],
        "star": np.stack([np.arange(count), np.full(count, count // 2)], axis=1),
        "random": chance.integers(0, count, (count, 2)),
    }[shape]
    assert labels_of(edges, count, tmp_path, 1) == labels_of(edges, count, tmp_path, 1 << 30)
    assert list(tmp_path.iterdir()) == []


def test_a_long_chain_is_one_component() -> None:
    count = 200_000
    chain = np.stack([np.arange(1, count), np.arange(count - 1)], axis=1)
    assert not roots_of(chain, count).any()
    assert not roots_of(np.random.default_rng(0).permutation(chain)[:, ::-1], count).any()
