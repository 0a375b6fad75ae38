"""Opening of .parquet files: pages are compared with their checksums, and encrypted files are refused.

Arrow ends the process (std::terminate) where metadata of an encrypted column is looked at without its key. A file with
encrypted columns and a plain footer is signed: behind its metadata there are bytes that are not part of it.
"""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from gristmill.errors import InputError

AFTER_FOOTER = 8  # bytes of a .parquet after its footer: the footer's size, and PAR1
_ENCRYPTED_FOOTER = b"PARE"


def open_parquet(path: Path, buffer_size: int = 0) -> pa.parquet.ParquetFile:
    """Open a .parquet file; reading it verifies the checksums that its pages have.

    `buffer_size`: bytes that are read at a time of a column; 0: all of a row group's.
    Raises InputError for an encrypted file, ArrowException or OSError for a damaged one.
    """
    try:
        file = pa.parquet.ParquetFile(
            path, pre_buffer=False, buffer_size=buffer_size, page_checksum_verification=True
        )  # fmt: skip
    except (pa.ArrowException, OSError):
        _reject_encrypted_footer(path)
        raise
    if is_signed(path, file.metadata):
        _reject_encrypted_columns(path, file)
    return file


def read_footer(path: Path) -> pa.parquet.FileMetaData:
    """Return the metadata of a .parquet file; raises as open_parquet. Look at no column of one that `is_signed`."""
    try:
        return pa.parquet.read_metadata(path)
    except (pa.ArrowException, OSError):
        _reject_encrypted_footer(path)
        raise


def is_signed(path: Path, metadata: pa.parquet.FileMetaData) -> bool:
    """Return whether there are bytes behind the metadata in the footer, as where columns are encrypted."""
    with path.open("rb") as file:
        file.seek(-AFTER_FOOTER, 2)
        size = int.from_bytes(file.read(4), "little")
    return size != metadata.serialized_size


def _reject_encrypted_columns(path: Path, file: pa.parquet.ParquetFile) -> None:
    """Raise InputError unless every row group of a signed file can be read."""
    for number in range(file.num_row_groups):
        try:
            next(file.iter_batches(1, [number], use_threads=False), None)
        except (pa.ArrowException, OSError) as error:
            if "decrypt" in str(error):
                raise _encrypted(path) from error
            raise


def _reject_encrypted_footer(path: Path) -> None:
    with path.open("rb") as file:
        if file.read(len(_ENCRYPTED_FOOTER)) == _ENCRYPTED_FOOTER:
            raise _encrypted(path)


def _encrypted(path: Path) -> InputError:
    return InputError(f"{path}: expected a .parquet file without encryption, got one with it; try writing it decrypted")
