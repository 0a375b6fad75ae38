"""TableCache: rows of a run's tables by the values of columns, of which the small ones last read stay in memory."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from gristmill.engine.execution.staging import local_copies
from gristmill.io.artefacts import open_table

_SMALL_BYTES = 32 << 20  # of a table's file
_TABLES = 32  # that stay in memory


class TableCache:
    """Reads tables; small ones are kept, up to some number, and read once."""

    def __init__(self) -> None:
        self._tables = OrderedDict[tuple[Path, tuple[str, ...] | None], pa.Table]()

    def select(
        self,
        path: Path,
        columns: Sequence[str] | None,
        equal: Mapping[str, Any],
        among: Mapping[str, list[int]] = MappingProxyType({}),
    ) -> list[dict[str, Any]]:
        """Return the rows of a table in which columns have these values; `columns` None: with all columns.

        `among`: columns that have one of several values; they must be read, too.
        """
        rows = list[dict[str, Any]]()
        needed: tuple[str, ...] | None = None
        if columns is not None:
            needed = tuple(dict.fromkeys([*columns, *equal]))
        for table in self._pieces(path, needed, equal):
            is_selected = pa.chunked_array([pa.repeat(pa.scalar(True), table.num_rows)])
            for name, value in equal.items():
                is_selected = pc.and_(is_selected, pc.fill_null(pc.equal(table.column(name), value), False))
            for name, values in among.items():
                is_selected = pc.and_(is_selected, pc.is_in(table.column(name), pa.array(values)))
            rows += table.filter(is_selected).to_pylist()
        return rows

    def _pieces(self, path: Path, columns: tuple[str, ...] | None, required: Mapping[str, Any]) -> Iterator[pa.Table]:
        """Yield a table, whole or a row group at a time."""
        at = (path, columns)
        if at in self._tables:
            self._tables.move_to_end(at)
            yield self._tables[at]
            return
        with local_copies([path]) as (copy,), open_table(copy, list(required)) as file:
            groups = (file.read_row_group(number, columns=columns) for number in range(file.num_row_groups))
            if copy.stat().st_size > _SMALL_BYTES:
                yield from groups
                return
            pieces = list(groups)
        if not pieces:
            return
        table = pa.concat_tables(pieces)
        self._tables[at] = table
        while len(self._tables) > _TABLES:
            self._tables.popitem(last=False)
        yield table
