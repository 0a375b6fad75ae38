"""Tables of texts in memory: a list, an Arrow column or table, a data frame or a Hugging Face data set."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dedup.minhash.matching_form import check_texts
from gristmill.errors import UsageError

_BATCH = 256  # texts read together
Indices = NDArray[np.int64]


class Table(Protocol):
    """Random access to texts and to other columns; copies only the rows asked for."""

    def __len__(self) -> int: ...
    def texts(self, indices: Indices) -> list[str]: ...
    def values(self, column: str, indices: Indices) -> list[Any]: ...


def as_table(texts: Any, text: str) -> Table:
    """Wrap the texts passed to `deduplicate`; `text` is the column of texts. UsageError for an unsupported type."""
    if isinstance(texts, pa.ChunkedArray | pa.Array):
        return _Columns(pa.table({text: texts}), text)
    if isinstance(texts, pa.Table | pa.RecordBatch) or hasattr(texts, "columns"):  # also a pandas or polars data frame
        try:
            table = pa.table(texts)
        except (pa.ArrowException, TypeError, ValueError) as error:
            raise UsageError(f"texts in a {type(texts).__name__} that Arrow cannot hold: {error}") from error
        return _Columns(table, text)
    if (
        isinstance(texts, str | bytes | Mapping)
        or not isinstance(texts, Iterable)
        or getattr(texts, "shape", None) == ()
    ):
        raise UsageError(
            f"texts in a {type(texts).__name__}: expected a list of strings, a table, or one datasets.Dataset"
        )
    if hasattr(texts, "with_format"):
        if not hasattr(texts, "__len__"):
            raise UsageError(
                "texts in a data set that is streamed: expected one that is loaded, as they are read twice"
            )
        return _HuggingFaceDataset(texts, text)
    if text != "text":
        raise UsageError(f"text={text!r} has no effect, as a list has no columns: leave it out, or give a table")
    return _StringList(texts if isinstance(texts, Sequence) else list(texts))


def batches(indices: Indices) -> Iterator[Indices]:
    """Return the slices of indices of texts that are read together."""
    return (indices[start : start + _BATCH] for start in range(0, len(indices), _BATCH))


class _StringList:
    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts)

    def texts(self, indices: Indices) -> list[str]:
        return _check_strings([self._texts[i] for i in indices.tolist()], indices)

    def values(self, column: str, indices: Indices) -> list[Any]:  # noqa: ARG002
        raise UsageError(f"keep by {column!r}: a list of texts has no columns. Give a table, or keep first or longest")


class _Columns:
    """Texts in a column of a table."""

    def __init__(self, table: Any, text: str) -> None:
        self._table = table
        self._text = text
        _check_column(text, table.column_names)

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def texts(self, indices: Indices) -> list[str]:
        return _check_strings(self.values(self._text, indices), indices)

    def values(self, column: str, indices: Indices) -> list[Any]:
        _check_column(column, self._table.column_names)
        return _to_python(self._read(column, indices), column)

    def _read(self, column: str, indices: Indices) -> pa.ChunkedArray | Iterable[pa.Scalar]:
        values = self._table.column(column)
        if len(indices) and indices[-1] - indices[0] == len(indices) - 1 and (np.diff(indices) == 1).all():
            return values.slice(indices[0], len(indices))
        # One by one: Arrow's take copies all chunks of the column into one, which cannot hold 2 GiB of strings.
        return (values[index] for index in indices.tolist())


class _HuggingFaceDataset(_Columns):
    """A datasets.Dataset, used by duck typing, so that the package need not be installed."""

    def _read(self, column: str, indices: Indices) -> pa.ChunkedArray:
        return self._table.select_columns([column]).with_format("arrow")[indices.tolist()].column(column)


def _to_python(values: pa.Array | pa.ChunkedArray | Iterable[pa.Scalar], column: str) -> list[Any]:
    try:
        return values.to_pylist() if hasattr(values, "to_pylist") else [value.as_py() for value in values]
    except (ValueError, OverflowError) as error:
        raise UsageError(f"column {column!r} has a value that Python cannot hold ({error}): repair it") from error


def _check_column(column: str, columns: Sequence[str]) -> None:
    if column not in columns:
        raise UsageError(
            f"there is no column {column!r}: expected one of {', '.join(columns)}; text= names the column of texts"
        )
    if list(columns).count(column) > 1:
        raise UsageError(f"there are several columns {column!r}: give each a different name")


def _check_strings(texts: list[Any], indices: Indices) -> list[str]:
    check_texts(texts, indices.tolist())
    return texts
