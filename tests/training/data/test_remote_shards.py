"""Token shards in a bucket: what is read is what a disk has, within a limit of copies and under faults of the store."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import obstore
import pytest
import torch

from gristmill.errors import InputError
from gristmill.io import shard_cache
from gristmill.io.shard_cache import CacheOptions
from gristmill.io.token_shards import Manifest
from tests.object_faults import Seldom, refuse
from tests.object_store import Store, object_store
from tests.training.conftest import write_shards
from training.data.packing import PackedSequences
from training.data.sequences import TokenSequences

LENGTH = 24
REMOTE = Path("s3://bucket/tokens")
BLOCK = 256


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setattr(shard_cache, "BLOCK_BYTES", BLOCK)
    with object_store() as opened:
        for name, value in opened.environment.items():
            monkeypatch.setenv(name, value)
        yield opened


@pytest.fixture
def local(tmp_path: Path, store: Store) -> TokenSequences:
    """Three shards of documents of 1 to 60 tokens, also in the bucket."""
    chosen = random.Random(1)
    shards = []
    for count in (40, 1, 70):
        shards.append([[chosen.randrange(3, 400) for _ in range(chosen.randrange(1, 60))] for _ in range(count)])
    folder = write_shards(tmp_path / "tokens", shards, None, 400)
    store.upload_tree(folder, "tokens")
    return TokenSequences(folder, LENGTH)


def open_remote(tmp_path: Path, size: int = 1 << 30) -> TokenSequences:
    return TokenSequences(REMOTE, LENGTH, cache=CacheOptions(tmp_path / "cache", size))


def gets(store: Store) -> int:
    return sum(verb == "GET" and ".bin" in path for verb, path in store.requests)


@pytest.mark.parametrize("size", [1 << 30, 5 * BLOCK, 1])
def test_what_is_read_is_what_a_disk_has(store: Store, local: TokenSequences, tmp_path: Path, size: int) -> None:
    remote = open_remote(tmp_path, size)
    assert (len(remote), remote.tokens) == (len(local), local.tokens) and len(local) > 80
    order = np.random.default_rng(2).permutation(len(local))
    for first in range(0, len(local), 7):
        indices = order[first : first + 7]
        assert torch.equal(remote.batch(indices), local.batch(indices))
        assert torch.equal(remote.positions(indices), local.positions(indices))
    assert np.array_equal(remote.read(3, local.tokens - 5), local.read(3, local.tokens - 5))
    for record in local.manifest.shards:
        remote.verify(record)
    kept = int(np.count_nonzero(np.fromfile(remote.local / "blocks", np.uint8)))
    assert kept == min(size // BLOCK, sum(-(-2 * record.tokens // BLOCK) for record in local.manifest.shards))
    assert remote.cached_bytes == min(size, 2 * local.tokens)


def test_packed_rows_are_those_of_a_disk(store: Store, local: TokenSequences, tmp_path: Path) -> None:
    remote = open_remote(tmp_path, 4 * BLOCK)
    ours = PackedSequences(remote, tmp_path / "plan")
    theirs = PackedSequences(local, tmp_path / "other")
    indices = np.arange(len(theirs))
    assert len(ours) == len(theirs) and torch.equal(ours.batch(indices), theirs.batch(indices))
    assert torch.equal(ours.targets(indices, ours.batch(indices)), theirs.targets(indices, theirs.batch(indices)))


def test_what_one_process_has_fetched_another_one_reads(store: Store, local: TokenSequences, tmp_path: Path) -> None:
    first = open_remote(tmp_path)
    indices = np.arange(len(local))
    first.batch(indices)
    store.requests.clear()
    second = open_remote(tmp_path)
    assert torch.equal(second.batch(indices), local.batch(indices))
    assert torch.equal(first.batch(indices), local.batch(indices))
    assert gets(store) == 0


def test_copies_of_an_earlier_boot_or_of_other_shards_are_not_used(
    store: Store, local: TokenSequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    indices = np.arange(len(local))
    for path in (tmp_path / "boot 1", tmp_path / "boot 2"):
        path.write_text(path.name)
        monkeypatch.setattr(shard_cache, "_BOOT", path)
        store.requests.clear()
        assert torch.equal(open_remote(tmp_path).batch(indices), local.batch(indices))
        assert gets(store) > 3
    other = write_shards(tmp_path / "other", [[[7] * 50] * 9, [[8] * 60], [[9] * 50] * 9], None, 400)
    store.upload_tree(other, "tokens")
    assert int(open_remote(tmp_path).batch([0])[0, 0]) == 7


def test_faults_of_the_store_are_withstood(store: Store, local: TokenSequences, tmp_path: Path) -> None:
    store.fault = faults = Seldom(3, 0.1)
    remote = open_remote(tmp_path, 20 * BLOCK)
    order = np.random.default_rng(5).permutation(len(local))
    for first in range(0, len(local), 5):
        indices = order[first : first + 5]
        assert torch.equal(remote.batch(indices), local.batch(indices))
    assert faults.made > 5


def test_damage_is_refused_in_one_sentence(store: Store, local: TokenSequences, tmp_path: Path) -> None:
    name = local.manifest.shards[0].name
    content = (local.folder / f"{name}.bin").read_bytes()
    damaged = content[:-2] + bytes([content[-2] ^ 1, content[-1]])
    obstore.put(store.client, f"tokens/{name}.bin", damaged)
    remote = open_remote(tmp_path)
    with pytest.raises(InputError, match=r"shard-00000\.bin is damaged or from another run: its SHA-256 is"):
        remote.verify(local.manifest.shards[0])
    obstore.put(store.client, f"tokens/{name}.bin", content)  # the run goes on reading the version that it began with
    with pytest.raises(InputError, match="was changed while it was read"):
        remote.batch([0])
    again = open_remote(tmp_path)
    again.verify(local.manifest.shards[0])
    assert torch.equal(again.batch([0]), local.batch([0]))
    obstore.put(store.client, f"tokens/{name}.bin", content[:-4])
    with pytest.raises(InputError, match=rf"has {len(content) - 4:,} bytes; manifest.json says {len(content):,}"):
        open_remote(tmp_path)
    obstore.delete(store.client, f"tokens/{name}.bin")
    with pytest.raises(InputError, match=r"\.bin is missing"):
        open_remote(tmp_path)


def test_a_bucket_that_forbids_reading_is_named(store: Store, local: TokenSequences, tmp_path: Path) -> None:
    remote = open_remote(tmp_path)
    store.fault = refuse("403 Forbidden", "AccessDenied")
    with pytest.raises(Exception, match=r"s3://bucket/tokens/.*\.bin") as error:
        remote.batch([0])
    assert "\n" not in str(error.value) and Manifest.load(local.folder).tokens
