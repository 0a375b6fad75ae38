"""Parquet files with encryption are refused, and pages are compared with their checksums."""

import base64
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest

from gristmill.engine.options import RunOptions
from gristmill.errors import InputError
from gristmill.io import readers
from gristmill.io.artefacts import stream_table
from gristmill.io.readers import read_corpus
from preprocessing.normalize_text import normalize_text

OPTIONS = RunOptions(workers=1, quiet=True)
TABLE = pa.table({"text": [f"text {n} of the mill" for n in range(600)], "secret": [str(n) for n in range(600)]})


class PlainKeys(pe.KmsClient):
    """Keys that are wrapped in nothing."""

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> str:
        return base64.b64encode(key_bytes).decode()

    def unwrap_key(self, wrapped_key: str, master_key_identifier: str) -> bytes:
        return base64.b64decode(wrapped_key)


def write_encrypted(path: Path, columns: list[str], has_plain_footer: bool, row_group_size: int = 600) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    config = pe.EncryptionConfiguration(
        footer_key="footer", column_keys={"column": columns}, plaintext_footer=has_plain_footer
    )  # fmt: skip
    factory = pe.CryptoFactory(lambda _: PlainKeys())
    properties = factory.file_encryption_properties(pe.KmsConnectionConfig(), config)
    with pq.ParquetWriter(path, TABLE.schema, encryption_properties=properties) as writer:
        writer.write_table(TABLE, row_group_size=row_group_size)


@pytest.mark.parametrize("has_plain_footer", [True, False])
@pytest.mark.parametrize("columns", [["text"], ["secret"], ["text", "secret"]])
@pytest.mark.parametrize("slice_bytes", [1 << 10, 1 << 30])
def test_an_encrypted_file_is_refused_by_name(
    tmp_path: Path, columns: list[str], has_plain_footer: bool, slice_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "SLICE_BYTES", slice_bytes)
    path = tmp_path / "corpus/web/a.parquet"
    write_encrypted(path, columns, has_plain_footer, row_group_size=100)
    refusal = "a.parquet: expected a .parquet file without encryption, got one with it; try writing it decrypted"
    with pytest.raises(InputError, match=refusal):
        normalize_text(tmp_path / "corpus", tmp_path / "out", OPTIONS)
    with pytest.raises(InputError, match=refusal):
        list(read_corpus(path))
    with pytest.raises(InputError, match=refusal):
        list(stream_table(path, ["text"]))


@pytest.mark.parametrize("has_dictionary", [True, False])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_a_flipped_bit_in_a_page_with_a_checksum_is_damage(tmp_path: Path, has_dictionary: bool, version: str) -> None:
    path = tmp_path / "corpus/web/a.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(
        TABLE, path, compression="NONE", use_dictionary=has_dictionary, write_page_checksum=True,
        data_page_version=version, data_page_size=2048, write_batch_size=50,
    )  # fmt: skip
    assert [document.text for document in read_corpus(path)] == TABLE["text"].to_pylist()
    assert sum(part.num_rows for part in stream_table(path, ["text"])) == 600
    whole = path.read_bytes()
    places = [at for at in range(len(whole)) if whole.startswith(b"of the mill", at)]
    for place in random.Random(1).sample(places, 5):
        damaged = bytearray(whole)
        damaged[place] ^= 1  # still UTF-8
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"a.parquet: not a readable .parquet file after row \d+ .*CRC checksum"):
            list(read_corpus(path))
        with pytest.raises(InputError, match=r"is not a readable Parquet file .*CRC checksum"):
            list(stream_table(path, ["text", "secret"]))
