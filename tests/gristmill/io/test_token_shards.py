"""Token shards: what is written is read, by Megatron too; damage is recognised."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.errors import InputError, UsageError
from gristmill.io.token_shards import (
    Manifest,
    ShardRecord,
    SourceRecord,
    TokenizerRecord,
    TokenShard,
    TokenShardWriter,
    map_shard,
    open_shards,
    read_sources,
    token_dtype,
    verify_checksums,
    write_sources,
)
from tests.verify_shards import verify_shards

END, SOURCES = 2, ["web", "code"]
DOCUMENTS = [[5, 6, 7, END], [END], [9, END], list(range(3, 300)) + [END]]


def write_shard(folder: Path, name: str, documents: list[list[int]], vocabulary: int = 32_000) -> ShardRecord:
    with TokenShardWriter(folder / name, token_dtype(vocabulary)) as shard:
        for ids in documents:
            shard.add(ids)
    digest = write_sources(folder / name, np.arange(len(documents)) % len(SOURCES), SOURCES)
    return ShardRecord(name, len(documents), shard.tokens, 0, shard.sha256, shard.idx_sha256, SOURCES, digest)


def write_folder(folder: Path, vocabulary: int = 32_000) -> None:
    records = [
        write_shard(folder, "a/x.jsonl+0", DOCUMENTS, vocabulary),
        write_shard(folder, "b/y@1.jsonl+0", DOCUMENTS[::-1], vocabulary),
        write_shard(folder, "empty", [], vocabulary),
    ]
    dtype = token_dtype(vocabulary).name
    sources = {}
    for number, name in enumerate(SOURCES):
        tokens = sum(map(len, [*DOCUMENTS[number::2], *DOCUMENTS[::-1][number::2]]))
        sources[name] = SourceRecord(len(DOCUMENTS), tokens)
    Manifest(TokenizerRecord("tokenizer.model", "", vocabulary, END), dtype, records, sources).save(folder)


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(300, "uint16"), (65_499, "uint16"), (65_500, "int32"), (250_000, "int32")]
)
def test_the_vocabulary_chooses_the_dtype(vocabulary: int, dtype: str) -> None:
    assert token_dtype(vocabulary).name == dtype


@pytest.mark.parametrize("vocabulary", [32_000, 128_000])
def test_a_round_trip_gives_the_same_tokens(tmp_path: Path, vocabulary: int) -> None:
    write_folder(tmp_path, vocabulary)
    manifest, shards = open_shards(tmp_path)
    assert open_shards(str(tmp_path))[0] == manifest  # type: ignore[arg-type]
    assert [[ids.tolist() for ids in shard] for shard in shards] == [DOCUMENTS, DOCUMENTS[::-1], []]
    assert shards[0].tokens.tolist() == sum(DOCUMENTS, [])
    assert shards[0].tokens.dtype == token_dtype(vocabulary)
    assert (manifest.documents, manifest.tokens) == (8, 2 * sum(map(len, DOCUMENTS)))
    assert verify_shards(tmp_path) == manifest


@given(st.lists(st.lists(st.integers(0, 65_499), min_size=1), max_size=8))
def test_any_documents_are_read_as_written(tmp_path_factory: pytest.TempPathFactory, documents) -> None:
    folder = tmp_path_factory.getbasetemp()
    write_shard(folder, "any", documents)
    assert [ids.tolist() for ids in TokenShard(folder / "any")] == documents


def test_many_documents_at_once_are_the_same_shard(tmp_path: Path) -> None:
    one = write_shard(tmp_path, "one", [*DOCUMENTS, *DOCUMENTS])
    with TokenShardWriter(tmp_path / "all", token_dtype(32_000)) as shard:
        for _ in range(2):
            shard.add_all(np.concatenate(DOCUMENTS), [len(ids) for ids in DOCUMENTS])
    assert shard.sha256 == one.sha256
    assert (tmp_path / "all.idx").read_bytes() == (tmp_path / "one.idx").read_bytes()


@pytest.mark.parametrize("vocabulary", [32_000, 128_000])
def test_megatron_reads_ours_token_for_token(tmp_path: Path, vocabulary: int) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset  # here: seconds of imports

    write_folder(tmp_path, vocabulary)
    theirs = IndexedDataset(str(tmp_path / "a" / "x.jsonl+0"))
    assert len(theirs) == len(DOCUMENTS)
    assert [theirs[i].tolist() for i in range(len(theirs))] == DOCUMENTS
    assert theirs.document_indices.tolist() == list(range(len(DOCUMENTS) + 1))
    assert theirs.sequence_lengths.tolist() == [len(ids) for ids in DOCUMENTS]
    assert theirs.get(3, offset=10, length=5).tolist() == DOCUMENTS[3][10:15]
    assert theirs[0].dtype == token_dtype(vocabulary)


def test_a_shard_is_not_published_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), TokenShardWriter(tmp_path / "a", token_dtype(300)) as shard:
        shard.add([1])
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(bytes(data))


def swap_lengths(path: Path) -> None:
    """Move a token from one document to the next, offsets and sums kept consistent."""
    data = bytearray(path.read_bytes())
    lengths, offsets = np.frombuffer(data, "<i4", 4, 34), np.frombuffer(data, "<i8", 4, 50)
    lengths[0] -= 1
    lengths[1] += 1
    offsets[1] -= 2
    path.write_bytes(bytes(data))


def swap_lengths_only(path: Path) -> None:
    """Reverse the documents' lengths, offsets kept consistent: only the checksum tells."""
    data = path.read_bytes()
    lengths = np.frombuffer(data, "<i4", 4, 34)[::-1]
    offsets = 2 * np.concatenate([[0], np.cumsum(lengths)[:-1]])
    path.write_bytes(data[:34] + lengths.tobytes() + offsets.astype("<i8").tobytes() + data[34 + 48 :])


def cut(size: int):
    return lambda path: path.write_bytes(path.read_bytes()[:size])


def replace(old: bytes, new: bytes):
    return lambda path: path.write_bytes(path.read_bytes().replace(old, new, 1))


def at(position: int):
    return lambda path: flip(path, position)


BIN, IDX, OF = "a/x.jsonl+0.bin", "a/x.jsonl+0.idx", "a/x.jsonl+0.sources"
DAMAGE = {
    "token changed": (BIN, at(3)),
    "tokens cut": (BIN, cut(-2)),
    "half a token cut": (BIN, cut(-1)),
    "tokens empty": (BIN, cut(0)),
    "tokens gone": (BIN, Path.unlink),
    "index magic": (IDX, at(0)),
    "index version": (IDX, at(9)),
    "index dtype": (IDX, at(17)),
    "index dtype, another of ours": (IDX, replace(b"\1\0\0\0\0\0\0\0\x08", b"\1\0\0\0\0\0\0\0\x04")),
    "index count": (IDX, at(18)),
    "index length": (IDX, at(34)),
    "index lengths": (IDX, swap_lengths),
    "index offset": (IDX, at(60)),
    "index document": (IDX, at(34 + 16 + 32 + 9)),
    "index cut": (IDX, cut(-8)),
    "index empty": (IDX, cut(0)),
    "index gone": (IDX, Path.unlink),
    "sources changed": (OF, at(2)),
    "sources cut": (OF, cut(-2)),
    "sources gone": (OF, Path.unlink),
    "source unknown": (OF, replace(b"\1\0", b"\7\0")),
    "manifest cut": ("manifest.json", cut(-9)),
    "manifest empty": ("manifest.json", cut(0)),
    "manifest not UTF-8": ("manifest.json", replace(b"empty", b"\xffmpty")),
    "manifest of another kind": ("manifest.json", lambda path: path.write_bytes(b'{"shards": 3}')),
    "manifest count": ("manifest.json", replace(b'"documents": 4', b'"documents": 5')),
    "manifest names another shard": ("manifest.json", replace(b'"empty"', b'"other"')),
    "manifest names a shard twice": ("manifest.json", replace(b'"empty"', b'"a/x.jsonl+0"')),
    "manifest of a later version": ("manifest.json", replace(b'"version": 3', b'"version": 4')),
    "manifest without a source": ("manifest.json", replace(b'"web": {', b'"wet": {')),
    "manifest dtype": ("manifest.json", replace(b'"uint16"', b'"int32"')),
    "manifest id": ("manifest.json", replace(b'"end_of_document": 2', b'"end_of_document": 32000')),
    "manifest negative": ("manifest.json", replace(b'"tokens": ', b'"tokens": -')),
    "manifest without a checksum": ("manifest.json", replace(b'"idx_sha256"', b'"idx_sha256": "", "name"')),
    "index of other documents": (IDX, swap_lengths_only),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_recognised(tmp_path: Path, damage: str) -> None:
    write_folder(tmp_path)
    name, harm = DAMAGE[damage]
    harm(tmp_path / name)
    with pytest.raises(InputError, match="run tokenize_corpus again"):
        verify_shards(tmp_path)


def test_no_manifest_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="make them with gristmill run, or gristmill tokenize"):
        open_shards(tmp_path)
    (tmp_path / "train").mkdir()
    write_folder(tmp_path / "train")
    with pytest.raises(UsageError, match=f"; try {tmp_path / 'train'}$"):
        open_shards(tmp_path)


def test_checksums_alone_find_a_token_of_the_vocabulary_and_an_index_that_agrees_with_itself(tmp_path: Path) -> None:
    write_folder(tmp_path)
    record = Manifest.load(tmp_path).shards[0]
    verify_checksums(tmp_path, record)
    for name, harm in ((IDX, swap_lengths_only), (BIN, at(3))):
        harm(tmp_path / name)
        with pytest.raises(InputError, match=rf"{re.escape(name)} is damaged.*SHA-256 is \w+….*says"):
            verify_checksums(tmp_path, record)


@pytest.mark.parametrize("version", [b"1", b"2"])
def test_a_manifest_of_another_version_is_refused(tmp_path: Path, version: bytes) -> None:
    write_folder(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"version": 3', b'"version": ' + version))
    with pytest.raises(InputError, match=r"is damaged: its version is [12]; expected 3\."):
        Manifest.load(tmp_path)


def test_the_source_of_each_document_is_read_as_written(tmp_path: Path) -> None:
    write_folder(tmp_path)
    manifest = Manifest.load(tmp_path)
    assert manifest.source_names == ["code", "web"]
    assert [read_sources(tmp_path, record).tolist() for record in manifest.shards] == [[0, 1, 0, 1], [0, 1, 0, 1], []]
    names = [str(number) for number in range((1 << 16) + 1)]
    many = ShardRecord("many", 2, 0, 0, "", "", names, write_sources(tmp_path / "many", np.array([0, 65_536]), names))
    assert read_sources(tmp_path, many).tolist() == [0, 65_536]


def test_shards_need_not_know_the_sources_of_their_documents(tmp_path: Path) -> None:
    write_folder(tmp_path)
    path = tmp_path / "manifest.json"
    unknown = re.sub(rb',\s*"sources": \[[^]]*\],\s*"sources_sha256": "\w*"', b"", path.read_bytes())
    path.write_bytes(unknown)
    for part in tmp_path.rglob("*.sources"):
        part.unlink()
    assert verify_shards(tmp_path).source_names == []


@pytest.mark.parametrize("harm", [cut(-2), replace(b"\1\0", b"\7\0")])
def test_sources_that_do_not_fit_the_documents_are_refused_without_a_checksum(tmp_path: Path, harm) -> None:
    write_folder(tmp_path)
    harm(tmp_path / OF)
    with pytest.raises(InputError, match=r"\.sources is damaged: .*expected"):
        read_sources(tmp_path, Manifest.load(tmp_path).shards[0])


UNKNOWN = {"name": "a/x.jsonl+0", "documents": 4, "bytes": 0, "sha256": "", "idx_sha256": "0"}


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda m: m["shards"][0].update(tokens=7), r"its sources have 610 tokens; expected 312"),
        (lambda m: m.update(sources={}, shards=[UNKNOWN | {"tokens": 7}]), r"hold 305 tokens of 4 .* says 7 of 4"),
        (lambda m: m["shards"][0].update(documents=5), r"hold 305 tokens of 4 documents as uint16; .* says 305 of 5"),
        (lambda m: m["sources"]["web"].update(tokens=7), r"its sources have [\d,]+ tokens; expected 610"),
        (lambda m: m.update(dtype="float32"), "dtype is 'float32'; expected 'uint16' for a vocabulary of 32,000"),
        (lambda m: m["tokenizer"].update(vocab_size=70_000), "dtype is 'uint16'; expected 'int32' for a vocabulary"),
    ],
)
def test_a_manifest_that_lies_is_refused(tmp_path: Path, harm: Callable[[dict], None], message: str) -> None:
    write_folder(tmp_path)
    path = tmp_path / "manifest.json"
    manifest = json.loads(path.read_bytes())
    harm(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=message):
        read = Manifest.load(tmp_path)
        for record in read.shards:
            map_shard(tmp_path, read, record)


def test_shards_may_be_wider_than_their_vocabulary_needs(tmp_path: Path) -> None:
    with TokenShardWriter(tmp_path / "a", np.dtype(np.int32)) as shard:
        shard.add([5, 6])
    record = ShardRecord("a", 1, 2, 0, shard.sha256, shard.idx_sha256)
    Manifest(TokenizerRecord("", "", 300, -1), "int32", [record], {}).save(tmp_path)
    assert map_shard(tmp_path, Manifest.load(tmp_path), record).tolist() == [5, 6]


def test_ids_beyond_the_vocabulary_are_found(tmp_path: Path) -> None:
    write_folder(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"vocab_size": 32000', b'"vocab_size": 200'))
    with pytest.raises(InputError, match="holds id 299; expected ids from 0 to 199"):
        verify_shards(tmp_path)
