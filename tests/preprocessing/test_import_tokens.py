"""import_tokens: files that other programs write become shards with the same ids, without a copy where that can be."""

import base64
import bz2
import json
from collections.abc import Callable
from pathlib import Path

import brotli
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zstandard
from datasets import Dataset, DatasetDict

from gristmill.counts import READ, WRITTEN
from gristmill.engine.options import RunOptions
from gristmill.errors import InputError, OutputError, UsageError
from gristmill.io.token_shards import Manifest, open_shards, read_sources, require_known_ids, verify_checksums
from gristmill.io.tokenizer_file import open_tokenizer
from gristmill.storage import hub as hub_module
from preprocessing.import_tokens import import_tokens
from preprocessing.token_formats.token_stream import Chunk, DocumentTally, cut_at_tokens
from tests.hub_server import running_hub
from tests.tokenizers_of_models import END as SPECIAL_END
from tests.tokenizers_of_models import content_of

GPT2 = 50_257
END = 50_256
Documents = list[list[int]]


@pytest.fixture
def documents() -> Documents:
    """Documents of 1 to 300 ids, each with GPT-2's token at its end."""
    random = np.random.default_rng(5)
    return [[*random.integers(0, END, random.integers(0, 300)).tolist(), END] for _ in range(200)]


def as_nanogpt_writes(path: Path, documents: Documents) -> Path:
    """As the loop at the end of nanoGPT's data/openwebtext/prepare.py, with one batch."""
    path.parent.mkdir(parents=True, exist_ok=True)
    length = sum(map(len, documents))
    stored = np.memmap(path, dtype=np.uint16, mode="w+", shape=(length,))
    stored[:] = np.concatenate(documents)
    stored.flush()
    return path


def as_llm_c_writes(path: Path, documents: Documents, magic: int, version: int, dtype: type) -> Path:
    """As write_datafile in llm.c's dev/data/data_common.py; there the end-of-text token begins a document."""
    header = np.zeros(256, dtype=np.int32)
    header[0] = magic
    header[1] = version
    header[2] = sum(map(len, documents))
    ids = np.array([END if id_ < 0 else id_ for document in documents for id_ in document], dtype=dtype)
    with path.open("wb") as file:
        file.write(header.tobytes())
        file.write(ids.tobytes())
    return path


def as_megatron_writes(prefix: Path, documents: list[Documents], dtype: type = np.uint16) -> Path:
    """With megatron-core's own builder, from the sequences of each document."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder  # here: two seconds of imports

    prefix.parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for sequences in documents:
        ids = [id_ for sequence in sequences for id_ in sequence]
        builder.add_document(torch.tensor(ids, dtype=torch.int64), [len(sequence) for sequence in sequences])
    builder.finalize(f"{prefix}.idx")
    return prefix


def imported(folder: Path) -> Documents:
    """The documents of a folder of shards, whose files are checked against the manifest."""
    manifest, shards = open_shards(folder)
    for record, shard in zip(manifest.shards, shards, strict=True):
        verify_checksums(folder, record)
        require_known_ids(shard.tokens, manifest, shard.prefix)
        assert len(read_sources(folder, record)) == len(shard) == record.documents
    found = [document.tolist() for shard in shards for document in shard]
    assert manifest.documents == len(found) and manifest.tokens == sum(map(len, found))
    return found


def inode(path: Path) -> int:
    return path.stat().st_ino


def test_nanogpts_tokens_become_documents_without_a_copy(tmp_path: Path, quiet, documents: Documents) -> None:
    path = as_nanogpt_writes(tmp_path / "openwebtext/train.bin", documents)
    counts = import_tokens(path, tmp_path / "out", quiet, vocab_size=GPT2, eos=str(END))
    assert imported(tmp_path / "out") == documents
    assert inode(tmp_path / "out/tokens_00000.bin") == inode(path)
    assert counts.total(READ).documents == counts.total(WRITTEN).documents == len(documents)
    manifest = Manifest.load(tmp_path / "out")
    assert manifest.tokenizer.end_of_document == END and list(manifest.sources) == ["train"]
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    reader = IndexedDataset(str(tmp_path / "out/tokens_00000"))  # Megatron reads it, too
    assert [reader[i].tolist() for i in range(len(reader))] == documents


def test_without_an_end_a_file_is_one_document_and_that_is_said(tmp_path: Path, documents: Documents, capfd) -> None:
    path = as_nanogpt_writes(tmp_path / "train.bin", documents)
    import_tokens(path, tmp_path / "out", RunOptions(workers=1), vocab_size=GPT2)
    assert [len(document) for document in imported(tmp_path / "out")] == [sum(map(len, documents))]
    assert "each file is one document, as nothing says where documents end; try --eos" in capfd.readouterr().err


@pytest.mark.parametrize(("magic", "version", "dtype"), [(20240520, 1, np.uint16), (20240801, 7, np.uint32)])
def test_llm_cs_headers_are_read(tmp_path: Path, quiet, documents, magic: int, version: int, dtype: type) -> None:
    vocabulary = GPT2 if dtype is np.uint16 else 128_256
    begun = [[END, *document[:-1]] for document in documents]
    path = as_llm_c_writes(tmp_path / "fineweb_train_000001.bin", begun, magic, version, dtype)
    import_tokens(path, tmp_path / "out", quiet, vocab_size=vocabulary, bos=str(END))
    assert imported(tmp_path / "out") == begun
    manifest = Manifest.load(tmp_path / "out")
    assert (manifest.tokenizer.begin_of_document, manifest.tokenizer.end_of_document) == (END, -1)
    assert manifest.dtype == ("uint16" if dtype is np.uint16 else "int32")


@pytest.mark.parametrize(("dtype", "vocabulary"), [(np.uint16, GPT2), (np.int32, GPT2), (np.int32, 151_936)])
def test_megatrons_tokens_are_not_copied(tmp_path: Path, quiet, documents, dtype: type, vocabulary: int) -> None:
    for name, some in (("wiki/a_text_document", documents[:120]), ("web/b_text_document", documents[120:])):
        as_megatron_writes(tmp_path / "in" / name, [[document] for document in some], dtype)
    import_tokens(tmp_path / "in", tmp_path / "out", quiet, vocab_size=vocabulary, eos=str(END))
    assert imported(tmp_path / "out") == [*documents[120:], *documents[:120]]
    originals = [tmp_path / "in/web/b_text_document.bin", tmp_path / "in/wiki/a_text_document.bin"]
    assert [inode(tmp_path / f"out/tokens_0000{i}.bin") for i in (0, 1)] == list(map(inode, originals))
    assert (tmp_path / "out/tokens_00000.idx").read_bytes() == originals[0].with_suffix(".idx").read_bytes()
    manifest = Manifest.load(tmp_path / "out")
    assert manifest.dtype == np.dtype(dtype).name
    assert {name: source.documents for name, source in manifest.sources.items()} == {"web": 80, "wiki": 120}


def test_sequences_are_joined_to_documents_and_empty_ones_left_out(tmp_path: Path, quiet) -> None:
    prefix = as_megatron_writes(tmp_path / "s", [[[1, 2], [3]], [[]], [[4], [], [5, 6]], [[]]])
    counts = import_tokens(prefix.with_suffix(".idx"), tmp_path / "out", quiet, vocab_size=GPT2)
    assert imported(tmp_path / "out") == [[1, 2, 3], [4, 5, 6]]
    assert inode(tmp_path / "out/tokens_00000.bin") == inode(tmp_path / "s.bin")
    assert counts.total("empty").documents == 2 and counts.total(READ).documents == 4


def test_a_copy_and_a_link_to_another_file_system_have_the_same_bytes(
    tmp_path: Path, quiet, documents, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    path = as_nanogpt_writes(tmp_path / "train.bin", documents)
    import_tokens(path, tmp_path / "copied", quiet, vocab_size=GPT2, eos=str(END), copy=True)
    assert inode(tmp_path / "copied/tokens_00000.bin") != inode(path)

    def refuse(_link: Path, _target: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    import_tokens(path, tmp_path / "linked", RunOptions(workers=1), vocab_size=GPT2, eos=str(END))
    assert "symbolic links to the originals, which must stay" in capfd.readouterr().err
    assert (tmp_path / "linked/tokens_00000.bin").is_symlink()
    names = sorted(found.name for found in (tmp_path / "copied").iterdir() if found.is_file())
    for name in names:
        assert (tmp_path / "copied" / name).read_bytes() == (tmp_path / "linked" / name).read_bytes()


def test_tokenised_datasets_of_the_hub_are_read(tmp_path: Path, quiet, documents, monkeypatch) -> None:
    Dataset.from_dict({"input_ids": documents}).to_parquet(tmp_path / "a.parquet")
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub_module._open.cache_clear()
        hub.commit({"data/train-00000.parquet": (tmp_path / "a.parquet").read_bytes(), "README.md": b"a card"})
        folder = Path("hf://datasets/org/name")
        import_tokens(folder, tmp_path / "out", quiet, vocab_size=GPT2, eos=str(END))
        hub.commit({"train.bin": b"12"})
        with pytest.raises(UsageError, match="expected a folder of this machine"):
            import_tokens(folder, tmp_path / "bin", quiet, vocab_size=GPT2)
    hub_module._open.cache_clear()
    assert imported(tmp_path / "out") == documents
    assert list(Manifest.load(tmp_path / "out").sources) == ["data"]


@pytest.mark.parametrize("form", ["arrow", "parquet"])
def test_tokenised_datasets_are_read(tmp_path: Path, quiet, documents: Documents, form: str) -> None:
    data = Dataset.from_dict({"input_ids": [*documents, []], "text": ["x"] * (len(documents) + 1)})
    if form == "arrow":
        DatasetDict({"train": data}).save_to_disk(tmp_path / "in", num_shards={"train": 3})
    else:
        (tmp_path / "in").mkdir()
        data.to_parquet(tmp_path / "in/data.parquet")
    counts = import_tokens(tmp_path / "in", tmp_path / "out", quiet, vocab_size=GPT2, eos=str(END))
    assert imported(tmp_path / "out") == documents
    assert counts.total("empty").documents == 1
    assert len(Manifest.load(tmp_path / "out").shards) == 1


def test_padding_is_left_out(tmp_path: Path, quiet) -> None:
    rows = {"input_ids": [[1, 2, 0, 0], [3, 0, 0, 0]], "attention_mask": [[1, 1, 0, 0], [1, 0, 0, 0]]}
    pq.write_table(pa.table(rows), tmp_path / "a.parquet")
    import_tokens(tmp_path / "a.parquet", tmp_path / "out", quiet, vocab_size=10)
    assert imported(tmp_path / "out") == [[1, 2], [3]]


def test_rows_of_a_stream_are_cut_where_documents_end(tmp_path: Path, quiet, documents: Documents) -> None:
    ids = [id_ for document in documents for id_ in document]
    rows = [ids[start : start + 128] for start in range(0, len(ids), 128)]
    Dataset.from_dict({"input_ids": rows}).save_to_disk(tmp_path / "packed")
    import_tokens(tmp_path / "packed", tmp_path / "out", quiet, vocab_size=GPT2, eos=str(END), stream=True)
    assert imported(tmp_path / "out") == documents


def test_the_bytes_are_the_same_for_any_number_of_workers_and_after_a_rerun(tmp_path: Path, documents) -> None:
    for number in range(6):
        as_nanogpt_writes(tmp_path / f"in/{number}/train.bin", documents[number::6])
    for workers in (1, 2):
        options = RunOptions(workers=workers, quiet=True)
        import_tokens(tmp_path / "in", tmp_path / f"out{workers}", options, vocab_size=GPT2, eos=str(END))
    (tmp_path / "out2/tokens_00003.bin").unlink()
    options = RunOptions(workers=2, quiet=True)
    import_tokens(tmp_path / "in", tmp_path / "out2", options, vocab_size=GPT2, eos=str(END))
    names = sorted(found.name for found in (tmp_path / "out1").iterdir() if found.is_file())
    assert len(names) == 6 * 3 + 2
    for name in names:
        assert (tmp_path / "out1" / name).read_bytes() == (tmp_path / "out2" / name).read_bytes()
    assert list(tmp_path.rglob("*.partial")) == []


def test_a_tokenizer_names_its_ends_and_is_copied(tmp_path: Path, quiet, capfd) -> None:
    (tmp_path / "tokenizer.json").write_text(content_of("Llama 3"))
    import_options = {"tokenizer": tmp_path / "tokenizer.json", "eos": SPECIAL_END}
    end = open_tokenizer(tmp_path / "tokenizer.json").id_of(SPECIAL_END)
    documents = [[5, 6, end], [7, end], [8]]
    as_megatron_writes(tmp_path / "in/a", [[document] for document in documents])
    import_tokens(tmp_path / "in", tmp_path / "out", RunOptions(workers=1), **import_options)
    assert imported(tmp_path / "out") == documents
    record = Manifest.load(tmp_path / "out").tokenizer
    assert (record.path, record.end_of_document) == ("tokenizer.json", end)
    assert (tmp_path / "out/tokenizer.json").read_text() == content_of("Llama 3")
    assert f"note: 1 of 3 documents do not end with id {end} (--eos)" in capfd.readouterr().err


MOSAIC_DOCUMENTS = [[5, 6, 7, 2], [8, 2], [9, 10, 2], [300, 2]]


def mosaic_wrote(kind: str, folder: Path) -> Path:
    """Put the files of MOSAIC_DOCUMENTS in a folder, as MDSWriter of mosaicml-streaming 0.13.0 wrote them.

    The package itself needs older versions of NumPy and transformers than these tests. `bytes` are columns of int64 in
    shards of 120 bytes, `ndarray` is ndarray:int32 beside a text, in zstd, `dynamic` an ndarray of uint16 beside an
    int; `static` are two samples of ndarray:uint16:4, in gzip.
    """
    stored = json.loads((Path(__file__).parent / "foreign_tokens/mosaic.json").read_bytes())
    folder.mkdir(parents=True)
    for name, content in stored[kind].items():
        (folder / name).write_bytes(base64.b64decode(content))
    return folder


@pytest.mark.parametrize("kind", ["bytes", "ndarray", "dynamic", "static"])
def test_mosaics_shards_are_read(tmp_path: Path, quiet, kind: str) -> None:
    import_tokens(mosaic_wrote(kind, tmp_path / "web/mds"), tmp_path / "out", quiet, vocab_size=400, eos="2")
    expected = [[1, 2, 3, 4], [5, 6, 7, 2]] if kind == "static" else MOSAIC_DOCUMENTS
    assert imported(tmp_path / "out") == expected
    assert list(Manifest.load(tmp_path / "out").sources) == ["mds"]


@pytest.mark.parametrize(("name", "compress"), [("br", brotli.compress), ("bz2", bz2.compress)])
def test_mosaics_other_compressions_are_read(tmp_path: Path, quiet, name: str, compress: Callable) -> None:
    """The shards that MDSWriter wrote in zstd, compressed as its options br and bz2 do."""
    folder = mosaic_wrote("ndarray", tmp_path / "mds")
    stored = zstandard.ZstdDecompressor().decompressobj().decompress((folder / "shard.00000.mds.zstd").read_bytes())
    packed = compress(stored)
    (folder / f"shard.00000.mds.{name}").write_bytes(packed)
    (folder / "shard.00000.mds.zstd").unlink()
    index = json.loads((folder / "index.json").read_bytes())
    shard = index["shards"][0]
    shard.update(compression=name, zip_data={"basename": f"shard.00000.mds.{name}", "bytes": len(packed), "hashes": {}})
    (folder / "index.json").write_text(json.dumps(index))
    import_tokens(folder, tmp_path / "out", quiet, vocab_size=400, eos="2")
    assert imported(tmp_path / "out") == MOSAIC_DOCUMENTS
    (folder / f"shard.00000.mds.{name}").write_bytes(packed[:-20])
    with pytest.raises(InputError, match="is truncated"):
        import_tokens(folder, tmp_path / "cut", quiet, vocab_size=400)


def test_mosaics_packed_samples_are_cut(tmp_path: Path, quiet) -> None:
    folder = mosaic_wrote("dynamic", tmp_path / "mds")
    import_tokens(folder, tmp_path / "out", quiet, vocab_size=400, eos="7", stream=True)
    assert imported(tmp_path / "out") == [[5, 6, 7], [2, 8, 2, 9, 10, 2, 300, 2]]


def mosaic_cut(folder: Path) -> None:
    path = mosaic_wrote("dynamic", folder / "mds") / "shard.00000.mds"
    path.write_bytes(path.read_bytes()[:-8])


def mosaic_hash(folder: Path) -> None:
    path = mosaic_wrote("static", folder / "mds") / "shard.00000.mds.gz"
    path.write_bytes(path.read_bytes()[:-1] + b"!")


def mosaic_without_shard(folder: Path) -> None:
    (mosaic_wrote("bytes", folder / "mds") / "shard.00002.mds").unlink()


def mosaic_sample(folder: Path) -> None:
    path = mosaic_wrote("dynamic", folder / "mds") / "shard.00000.mds"
    content = path.read_bytes()
    sample = content.index(b"\x10\x04\x04\x05\x00")  # uint16, one dimension, 4
    path.write_bytes(content[:sample] + b"\x42" + content[sample + 1 :])  # float64


def mosaic_texts(folder: Path) -> None:
    path = mosaic_wrote("bytes", folder / "mds") / "index.json"
    path.write_bytes(path.read_bytes().replace(b'"bytes"]', b'"str"]'))


def not_an_index(folder: Path) -> None:
    (folder / "index.json").write_text('{"a": 1}')


def bad_odd_size(folder: Path) -> None:
    (folder / "a.bin").write_bytes(b"\1\0\2")


def bad_header(folder: Path) -> None:
    path = as_llm_c_writes(folder / "a.bin", [[1, 2, 3]], 20240520, 1, np.uint16)
    path.write_bytes(path.read_bytes()[:-2])


def bad_wider(folder: Path) -> None:
    np.arange(1, 100, dtype=np.int32).tofile(folder / "a.bin")


def bad_id(folder: Path) -> None:
    np.array([1, 2, GPT2], np.uint16).tofile(folder / "a.bin")


def bad_megatron_bin(folder: Path) -> None:
    as_megatron_writes(folder / "a", [[[1, 2, 3]], [[4]]])
    (folder / "a.bin").write_bytes((folder / "a.bin").read_bytes()[:-2])


def bad_megatron_idx(folder: Path) -> None:
    as_megatron_writes(folder / "a", [[[1, 2, 3]], [[4]]])
    (folder / "a.idx").write_bytes((folder / "a.idx").read_bytes()[:-4])


def bad_pointers(folder: Path) -> None:
    as_megatron_writes(folder / "a", [[[1, 2, 3]], [[4]]])
    content = bytearray((folder / "a.idx").read_bytes())
    content[34 + 2 * 4 + 8] += 2  # where the second sequence starts
    (folder / "a.idx").write_bytes(content)


def bad_dtype(folder: Path) -> None:
    as_megatron_writes(folder / "a", [[[1, 2]]], np.float32)


def bad_index(folder: Path) -> None:
    (folder / "a.idx").write_bytes(b"TNTIDX\0\0" + bytes(40))
    (folder / "a.bin").write_bytes(b"")


def no_bin(folder: Path) -> None:
    as_megatron_writes(folder / "a", [[[1, 2]]])
    (folder / "a.bin").unlink()


def no_ids(folder: Path) -> None:
    pq.write_table(pa.table({"text": ["a"]}), folder / "a.parquet")


def floats(folder: Path) -> None:
    pq.write_table(pa.table({"input_ids": [[1.5]]}), folder / "a.parquet")


def null_id(folder: Path) -> None:
    pq.write_table(pa.table({"input_ids": [[1, None]]}), folder / "a.parquet")


def cut_table(folder: Path) -> None:
    Dataset.from_dict({"input_ids": [[1, 2]] * 100}).save_to_disk(folder / "d")
    (path,) = folder.rglob("*.arrow")
    path.write_bytes(path.read_bytes()[:-100])


def only_text(folder: Path) -> None:
    (folder / "a.jsonl").write_text("{}")


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (bad_odd_size, InputError, "a.bin is truncated, or not of uint16: expected 2 bytes per token, got 3 bytes"),
        (bad_header, InputError, "header says 3 tokens, which are 1,030 bytes, got 1,028"),
        (bad_wider, InputError, "expected uint16 ids, got 0 for every second one; try --dtype int32"),
        (bad_id, InputError, "a.bin read as uint16: expected ids from 0 to 50,256, got 50,257; try the --tokenizer"),
        (bad_megatron_bin, InputError, "a.bin is truncated or from another run: its .idx says 4 tokens, got 3"),
        (bad_megatron_idx, InputError, "a.idx is truncated, or not of text: 2 sequences of 2 documents are 82 bytes"),
        (bad_pointers, InputError, "a.idx is damaged: expected sequences that follow each other"),
        (bad_dtype, InputError, "expected version 1 with integer ids, got version 1 with float32"),
        (bad_index, InputError, "expected Megatron's index, which begins with"),
        (no_bin, InputError, "a.idx: expected a.bin beside it, but there is none"),
        (no_ids, UsageError, "expected a column input_ids or tokens of token ids, got text; try --column"),
        (floats, UsageError, "expected lists of integer ids in input_ids, got list<"),
        (null_id, InputError, "expected an id everywhere in input_ids, got null"),
        (cut_table, InputError, "not a readable .arrow file"),
        (mosaic_cut, InputError, "index.json says 4 samples in 299 bytes, got 4 in 291"),
        (mosaic_hash, InputError, "shard.00000.mds.gz is damaged: expected the md5 c90f99ece523…"),
        (mosaic_without_shard, InputError, "shard.00002.mds is missing, and"),
        (mosaic_sample, InputError, "shard.00000.mds is damaged: a sample holds no ids as its header says"),
        (mosaic_texts, UsageError, "expected tokens as bytes or an ndarray of integers, got str; try another --column"),
        (not_an_index, InputError, "index.json is not an index of MDS shards"),
        (only_text, UsageError, "got a.jsonl; gristmill tokenize reads text"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path: Path, quiet, make: Callable, kind: type, message: str) -> None:
    (tmp_path / "in").mkdir()
    make(tmp_path / "in")
    with pytest.raises(kind) as refused:
        import_tokens(tmp_path / "in", tmp_path / "out", quiet, vocab_size=GPT2)
    assert message in str(refused.value) and "\n" not in str(refused.value)
    assert not (tmp_path / "out/manifest.json").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected --tokenizer, or --vocab_size where there is none"),
        ({"vocab_size": GPT2, "tokenizer": Path("t.json")}, "and not both"),
        ({"vocab_size": GPT2, "eos": "<|endoftext|>"}, "expected an id below --vocab_size 50,257, as there is no"),
        ({"vocab_size": GPT2, "bos": "50257"}, "--bos 50257: expected an id below"),
        ({"vocab_size": GPT2, "dtype": "float32"}, "--dtype float32: expected one of uint16"),
    ],
)
def test_bad_options(tmp_path: Path, quiet, options: dict, message: str) -> None:
    as_nanogpt_writes(tmp_path / "a.bin", [[1, 2]])
    with pytest.raises(UsageError, match=message):
        import_tokens(tmp_path / "a.bin", tmp_path / "out", quiet, **options)


def test_a_changed_original_is_noticed_and_anothers_files_are_kept(tmp_path: Path, quiet, documents) -> None:
    path = as_nanogpt_writes(tmp_path / "train.bin", documents)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/tokens_00000.bin").write_bytes(b"mine")
    with pytest.raises(OutputError, match="tokens_00000"):
        import_tokens(path, tmp_path / "mine", quiet, vocab_size=GPT2)
    assert (tmp_path / "mine/tokens_00000.bin").read_bytes() == b"mine"
    import_tokens(path, tmp_path / "out", quiet, vocab_size=GPT2, eos=str(END))
    with path.open("r+b") as file:
        file.write(b"\7\0")
    with pytest.raises(InputError, match="is damaged or from another run"):
        verify_checksums(tmp_path / "out", Manifest.load(tmp_path / "out").shards[0])
    import_tokens(path, tmp_path / "out", quiet, vocab_size=GPT2, eos=str(END))
    assert imported(tmp_path / "out")[0][0] == 7


def test_a_stream_is_cut_alike_however_it_is_chunked() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        ids = random.integers(0, 5, 40)
        expected: Documents = [[]]
        for id_ in ids.tolist():
            if id_ == 0 and expected[-1]:
                expected.append([])
            expected[-1].append(id_)
            if id_ == 1:
                expected.append([])
        cuts = np.sort(random.integers(0, 41, 4))
        chunks = [Chunk(part, np.empty(0, np.int64)) for part in np.split(ids, cuts)]
        tally = DocumentTally(begin=0, end=1)
        for chunk in cut_at_tokens(iter(chunks), begin=0, end=1):
            tally.add(chunk)
        tally.close()
        found = [document for document in expected if document]
        assert tally.lengths.tolist() == list(map(len, found)) and tally.empty == 0
        assert tally.begun == sum(document[0] == 0 for document in found)
        assert tally.ended == sum(document[-1] == 1 for document in found)
