"""Sets of document keys on disk: SlimPajama's {file: {rows}} pickle, or a .parquet table."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from numpy.typing import NDArray

from pipeline.errors import InputError, UsageError
from pipeline.files import whole_file
from pipeline.pickles import dump_pickle, load_pickle

Rows = NDArray[np.int64]
KeySet = dict[str, Rows]  # file → its rows, ascending


def read_keys(path: Path) -> KeySet:
    """Read a key set from a .pickle or .parquet file. Raises UsageError or InputError."""
    if is_table(path):
        return _from_table(read_table(path, {"file", "row"}))
    value = load_pickle(path)
    if not isinstance(value, Mapping):
        raise InputError(f"{path} holds a {type(value).__name__}: wanted a dict of file names to sets of rows")
    try:
        return {str(file): np.unique(np.array(sorted(rows), np.int64)) for file, rows in value.items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{path} is no dict of file names to sets of rows ({error})") from error


def write_keys(path: Path, keys: KeySet) -> None:
    """Write a key set; files without a row are left out."""
    keys = {file: keys[file] for file in sorted(keys) if len(keys[file])}
    if not is_table(path):
        dump_pickle(path, {file: set(rows.tolist()) for file, rows in keys.items()})
        return
    files = np.repeat(np.array(list(keys), dtype=object), [len(rows) for rows in keys.values()])
    rows = np.concatenate([*keys.values(), np.empty(0, np.int64)])
    write_table(path, {"file": pa.array(files, pa.string()), "row": pa.array(rows, pa.int64())})


def is_table(path: Path) -> bool:
    """Whether a path asks for the typed table rather than SlimPajama's pickle. UsageError if for neither."""
    if path.suffix not in (".pickle", ".pkl", ".parquet"):
        raise UsageError(f"{path}: wanted a name that ends in .pickle (as SlimPajama's) or .parquet (a typed table)")
    return path.suffix == ".parquet"


def read_table(path: Path, columns: set[str]) -> pa.Table:
    """A Parquet table that has `columns`. Raises UsageError or InputError."""
    if not path.is_file():
        raise UsageError(f"{path}: wanted a .parquet file, and there is none. Run the stage that writes it")
    try:
        table = pa.parquet.read_table(path)
    except (pa.ArrowException, OSError) as error:  # Arrow calls damaged pages an OSError
        raise InputError(f"{path} is not a readable Parquet file ({error}): make it again") from error
    if missing := columns - set(table.column_names):
        raise InputError(f"{path} has no column {', '.join(sorted(missing))}: it has {', '.join(table.column_names)}")
    return table


def write_table(path: Path, columns: dict[str, pa.Array]) -> None:
    """Write a Parquet table, whole or not at all."""
    with whole_file(path) as temporary:
        pa.parquet.write_table(pa.table(columns), temporary, compression="zstd")


def _from_table(table: pa.Table) -> KeySet:
    if not table.num_rows:
        return {}
    files = table.column("file").to_numpy(zero_copy_only=False)
    rows = table.column("row").to_numpy()
    order = np.lexsort((rows, files))
    names, starts = np.unique(files[order], return_index=True)
    return {str(name): part for name, part in zip(names, np.split(rows[order], starts[1:]), strict=True)}
