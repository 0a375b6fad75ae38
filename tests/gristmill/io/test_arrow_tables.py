"""Arrow and Parquet files: damaged and truncated ones are errors, never lost documents; batches are small."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from gristmill.errors import InputError
from gristmill.io.arrow_tables import ipc_batches, parquet_batches
from gristmill.io.readers import read_corpus

TEXTS = pa.record_batch({"text": [f"text {i}" for i in range(200)], "x": [[i] for i in range(200)]})


def write_stream(path: Path, batch: pa.RecordBatch, times: int = 1, is_legacy: bool = False) -> bytes:
    options = pa.ipc.IpcWriteOptions(use_legacy_format=is_legacy)
    with pa.ipc.new_stream(path, batch.schema, options=options) as writer:
        for _ in range(times):
            writer.write_batch(batch)
    return path.read_bytes()


@pytest.mark.parametrize("column", ["text", "x"])
@pytest.mark.parametrize("is_file", [False, True])
def test_a_damaged_offset_is_an_error(tmp_path: Path, column: str, is_file: bool) -> None:
    path = tmp_path / "a.arrow"
    new = pa.ipc.new_file if is_file else pa.ipc.new_stream
    with new(path, TEXTS.schema) as writer:
        writer.write_batch(TEXTS)
    offsets = TEXTS.column(column).buffers()[1].to_pybytes()
    data = path.read_bytes()
    assert data.count(offsets) == 1
    damaged = offsets[:43] + b"\x7f" + offsets[44:]  # the highest byte of an offset
    path.write_bytes(data.replace(offsets, damaged))
    with pytest.raises(InputError, match=r"a.arrow: not a readable .arrow file after row 0 .*[Oo]ffset"):
        list(read_corpus(path))


@pytest.mark.parametrize("kept", [0, 1, 2])
@pytest.mark.parametrize("is_legacy", [False, True])
def test_an_arrow_stream_without_its_end_is_an_error(tmp_path: Path, is_legacy: bool, kept: int) -> None:
    path = tmp_path / "a.arrow"
    data = write_stream(path, TEXTS, 3, is_legacy)
    assert len(list(read_corpus(path))) == 600
    with pa.ipc.open_stream(path) as reader, pa.memory_map(str(path)) as stored:
        assert reader.read_all().num_rows == 600
        found = pa.ipc.open_stream(stored)
        ends = [stored.tell(), *(stored.tell() for _ in found)]
    path.write_bytes(data[: ends[kept]])
    with pytest.raises(InputError, match=f"after row {200 * kept} .the file is truncated"):
        list(read_corpus(path))
    path.write_bytes(data + data)
    with pytest.raises(InputError, match="has data after the end"):
        list(read_corpus(path))


def test_invalid_utf8_in_an_arrow_file_spoils_its_own_row_only(tmp_path: Path) -> None:
    texts = pa.array([b"a", b"\xff", b"c"]).view(pa.string())
    offsets = pa.array([0, 1, 2, 3], pa.int32())
    columns = {
        "text": texts,
        "list": pa.ListArray.from_arrays(offsets, texts),
        "struct": pa.StructArray.from_arrays([texts.dictionary_encode()], ["x"]),
        "map": pa.MapArray.from_arrays(offsets, texts, texts),
    }
    for name, column in columns.items():
        path = tmp_path / f"{name}.arrow"
        write_stream(path, pa.record_batch({"text": ["a", "b", "c"], name: column} if name != "text" else columns))
        assert [document.text for document in read_corpus(path, on_malformed="skip")] == ["a", "c"]


def test_batches_of_long_texts_are_small(tmp_path: Path) -> None:
    table = pa.table({"text": ["x" * 2**20] * 24})
    pa.parquet.write_table(table, tmp_path / "a.parquet", use_dictionary=False)
    pa.parquet.write_table(table, tmp_path / "b.parquet")  # one value, in a dictionary: the file does not say how often
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    parquet = [parquet_batches(tmp_path / name, 0, None) for name in ("a.parquet", "b.parquet")]
    for _, *batches in [*parquet, ipc_batches(tmp_path / "a.arrow")]:
        assert max(batch.nbytes for batch in batches) <= 17 << 20 and sum(batch.num_rows for batch in batches) == 24


def test_a_damaged_page_header_of_a_parquet_file_loses_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pa.parquet.write_table(pa.table({"text": ["a"] * 20}), path, row_group_size=10, use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[5] ^= 1  # the type of the first page: Arrow skips pages of other types
    path.write_bytes(data)
    with pytest.raises(InputError, match="row group 0 lacks 10 rows"):
        list(read_corpus(path))
