"""Parts are joined into shards of a target size, which Megatron reads by the line written beside them."""

import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import preprocessing.tokenizer.shard_joining as shard_joining
from gristmill.errors import InputError
from gristmill.io.token_shards import (
    Manifest,
    ShardRecord,
    TokenizerRecord,
    TokenShard,
    TokenShardWriter,
    read_sources,
    token_dtype,
    write_sources,
)
from preprocessing.tokenizer.shard_joining import blend, join_parts, plan_token_shards, shard_name

DOCUMENTS = [[[5, 6, 2], [2]], [], [[9, 2], list(range(3, 200)), [7, 7, 2]]]


def write_parts(folder: Path, vocabulary: int = 300) -> list[ShardRecord]:
    records = []
    for number, documents in enumerate(DOCUMENTS):
        name = f"a@{number}.jsonl+0"
        with TokenShardWriter(folder / name, token_dtype(vocabulary)) as part:
            for ids in documents:
                part.add(ids)
        sources = [["web", "book"], ["book"], ["book", "code", "web"]][number]
        digest = write_sources(folder / name, np.arange(len(documents)) % len(sources), sources)
        written = (10 * number, part.sha256, part.idx_sha256, sources, digest)
        records.append(ShardRecord(name, len(documents), part.tokens, *written))
    return records


def join(folder: Path, parts: list[ShardRecord], prefix: Path) -> ShardRecord:
    return join_parts([folder / part.name for part in parts], parts, prefix)


@given(st.lists(st.integers(0, 50)), st.integers(1, 100))
def test_every_part_is_in_one_shard_in_order_and_no_shard_of_several_exceeds_the_target(
    sizes: list[int], target: int
) -> None:
    groups = plan_token_shards(sizes, target)
    assert [part for group in groups for part in group] == list(range(len(sizes)))
    filled = [sum(sizes[part] for part in group) for group in groups]
    assert all(size <= target or sum(sizes[p] > 0 for p in g) == 1 for size, g in zip(filled, groups, strict=True))
    after = [next((sizes[p] for p in group if sizes[p]), 0) for group in groups[1:]]
    assert all(size + more > target for size, more in zip(filled, after, strict=False))  # none could be fuller


@pytest.mark.parametrize("vocabulary", [300, 128_000])
@pytest.mark.parametrize("copied", [1, 4, 1 << 22])
def test_a_joined_shard_is_the_one_that_all_documents_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocabulary: int, copied: int
) -> None:
    monkeypatch.setattr(shard_joining, "_COPIED_TOKENS", copied)
    records = write_parts(tmp_path / "parts", vocabulary)
    joined = join(tmp_path / "parts", records, tmp_path / shard_name(0))
    with TokenShardWriter(tmp_path / "whole", token_dtype(vocabulary)) as whole:
        for ids in sum(DOCUMENTS, []):
            whole.add(ids)
    sources = ["web", "book", "code"]
    digest = write_sources(tmp_path / "whole", np.array([0, 1, 1, 2, 0]), sources)
    assert joined == ShardRecord("tokens_00000", 5, whole.tokens, 30, whole.sha256, whole.idx_sha256, sources, digest)
    assert [sources[number] for number in read_sources(tmp_path, joined)] == ["web", "book", "book", "code", "web"]
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"tokens_00000{suffix}").read_bytes() == (tmp_path / f"whole{suffix}").read_bytes()


def test_parts_without_documents_make_an_empty_shard(tmp_path: Path) -> None:
    empty = write_parts(tmp_path)[1:2]
    assert join(tmp_path, empty, tmp_path / "joined").tokens == 0 and len(TokenShard(tmp_path / "joined")) == 0


def test_a_damaged_part_is_an_error_and_no_shard(tmp_path: Path) -> None:
    records = write_parts(tmp_path)
    path = tmp_path / f"{records[2].name}.bin"
    path.write_bytes(path.read_bytes()[:-2] + b"\3\0")
    with pytest.raises(InputError, match=r"a@2.jsonl\+0.bin is damaged"):
        join(tmp_path, records, tmp_path / "joined")
    assert not list(tmp_path.glob("joined*"))


def test_megatron_takes_the_blend(tmp_path: Path) -> None:
    """As docs/guides/pipeline.md gives the option, from another folder."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset  # here: two seconds in each process of pytest
    from megatron.core.datasets.utils import get_blend_from_list

    parts = write_parts(tmp_path)
    shards = [join(tmp_path, [part], tmp_path / shard_name(i)) for i, part in enumerate(parts)]
    written = Manifest(TokenizerRecord("tokenizer.model", "", 300, 2), "uint16", shards, {})
    (tmp_path / "data_path.txt").write_text(blend(written))
    line = 'echo --data-path $(sed "s| | $TOKENS/|" "$TOKENS/data_path.txt")'
    said = subprocess.run(
        ["bash", "-c", line], env={"TOKENS": str(tmp_path), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True
    )
    option, *words = said.stdout.split()
    prefixes, weights = get_blend_from_list(words)
    assert option == "--data-path" and weights == [4.0, 202.0]
    assert prefixes == [str(tmp_path / "tokens_00000"), str(tmp_path / "tokens_00002")]
    assert [sum(map(len, IndexedDataset(prefix))) for prefix in prefixes] == np.array(weights).tolist()
