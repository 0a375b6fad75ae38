"""Tables of a run for the browser: pages of their rows, an index of the clusters, and a few texts."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dedup.removal.steps import clusters_next_to
from gristmill.engine.execution.staging import local_copies
from gristmill.errors import InputError, UsageError
from gristmill.io.documents import DocKey, Document
from gristmill.io.files import RUN_FILE
from gristmill.io.parquet_files import open_parquet
from gristmill.storage.files import is_file
from gristmill_cli.documents.duplicates import CLUSTERS, DUPLICATES, corpus_of, some_documents
from gristmill_cli.documents.removed_texts import removed_documents, removed_table
from gristmill_cli.run_config import is_data_run, load_options, read_options
from gristmill_cli.stages.pipeline import context_of, plan_stages

Row = Mapping[str, Any]


class PagedTable:
    """A table of which a page is read at a time; rows without a filter by their row groups alone."""

    def __init__(self, path: Path) -> None:
        """Raises InputError for a damaged table."""
        try:
            self.file = open_parquet(path)
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{path} is damaged ({error}): run the same `gristmill run` again") from error
        counts = [self.file.metadata.row_group(number).num_rows for number in range(self.file.num_row_groups)]
        self.ends = np.cumsum(counts, dtype=np.int64)

    def __len__(self) -> int:
        return int(self.file.metadata.num_rows)

    def rows(self, first: int, count: int) -> list[dict[str, Any]]:
        """Return some rows that follow one another."""
        end = min(first + count, len(self))
        if first >= end:
            return []
        first_group, last_group = np.searchsorted(self.ends, [first, end - 1], side="right").tolist()
        table = self.file.read_row_groups(list(range(first_group, last_group + 1)))
        rows_before = int(self.ends[first_group]) - self.file.metadata.row_group(first_group).num_rows
        return table.slice(first - rows_before, end - first).to_pylist()

    def find(self, text: str, equal: Mapping[str, str], first: int, count: int) -> tuple[int, list[dict[str, Any]]]:
        """Return the number, and a page, of rows whose key contains `text` or whose id equals it, and with `equal`."""
        if not text and not equal:
            return len(self), self.rows(first, count)
        total = 0
        page = list[dict[str, Any]]()
        for group in range(self.file.num_row_groups):
            table = self.file.read_row_group(group)
            table = table.filter(self._mask(table, text, equal))
            begin = max(0, first - total)
            missing = max(0, count - len(page))
            if begin < len(table):
                page += table.slice(begin, missing).to_pylist()
            total += len(table)
        return total, page

    def numbers(self, text: str) -> NDArray[np.int64]:
        """Return the row numbers whose key contains `text` or whose id equals it."""
        numbers = [np.empty(0, np.int64)]
        before = 0
        for group in range(self.file.num_row_groups):
            table = self.file.read_row_group(group)
            mask = self._mask(table, text, {}).to_numpy(zero_copy_only=False)
            numbers.append(np.flatnonzero(mask) + before)
            before += len(table)
        return np.concatenate(numbers)

    def rows_of(self, keys: Sequence[DocKey]) -> dict[DocKey, dict[str, Any]]:
        """Return the rows of some documents, by key."""
        row_of_key = dict[DocKey, dict[str, Any]]()
        if not keys:
            return row_of_key
        files_of_keys = {key.file for key in keys}
        rows_of_keys = {key.row for key in keys}
        files = pa.array(sorted(files_of_keys))
        numbers = pa.array(sorted(rows_of_keys))
        for group in range(self.file.num_row_groups):
            table = self.file.read_row_group(group)
            is_candidate = pc.and_(pc.is_in(table["file"], files), pc.is_in(table["row"], numbers))
            for row in table.filter(is_candidate).to_pylist():
                key = DocKey(row["file"], row["row"])
                if key in keys:
                    row_of_key[key] = row
        return row_of_key

    def counts(self, column: str) -> dict[str, int]:
        """Return how many rows have each value of a column."""
        total: dict[str, int] = {}
        for batch in self.file.iter_batches(columns=[column]):
            for entry in batch.column(0).value_counts().to_pylist():
                value = entry["values"]
                total[value] = total.get(value, 0) + entry["counts"]
        return dict(sorted(total.items()))

    def _mask(self, table: pa.Table, text: str, equal: Mapping[str, str]) -> Any:
        mask = pa.chunked_array([pa.repeat(pa.scalar(True), len(table))])
        if text:
            mask = reduce(pc.or_, self._matches(table, text))
        for name, value in equal.items():
            mask = pc.and_(mask, pc.equal(table[name], value))
        return pc.fill_null(mask, False)

    def _matches(self, table: pa.Table, text: str) -> Iterator[Any]:
        """Yield for each column of keys or ids which of its rows match `text`."""
        file, _, row = text.rpartition("@")
        is_key = bool(file) and row.isascii() and row.isdecimal()
        for prefix in ("", "kept_"):
            if f"{prefix}file" in table.column_names:
                files = table[f"{prefix}file"]
                if is_key:
                    is_row = pc.equal(table[f"{prefix}row"], int(row))
                    yield pc.and_(pc.equal(files, file), is_row)
                else:
                    yield pc.match_substring(files, text)
            if f"{prefix}id" in table.column_names:
                yield pc.fill_null(pc.equal(table[f"{prefix}id"], text), False)


class ClusterIndex:
    """Where each cluster is in the table, the largest first; of the table one column is read."""

    def __init__(self, table: PagedTable) -> None:
        self.table = table
        numbers = table.file.read(columns=["cluster"]).column(0).to_numpy()
        self.starts = np.empty(0, np.int64)
        if len(numbers):
            is_start = np.append(True, numbers[1:] != numbers[:-1])
            self.starts = np.flatnonzero(is_start)
        self.sizes = np.diff(np.append(self.starts, len(numbers)))
        self.largest_first = np.argsort(-self.sizes, kind="stable")

    def find(self, text: str) -> NDArray[np.int64]:
        """Return the places of clusters with a key that contains `text`, the largest first."""
        if not text:
            return self.largest_first
        rows = self.table.numbers(text)
        clusters = np.unique(np.searchsorted(self.starts, rows, side="right") - 1)
        order = np.argsort(-self.sizes[clusters], kind="stable")
        return clusters[order]

    def members(self, number: int, first: int, count: int) -> list[DocKey]:
        """Return some keys of a cluster."""
        if not 0 <= number < len(self.starts):
            return []
        remaining = int(self.sizes[number]) - first
        rows = self.table.rows(int(self.starts[number]) + first, min(count, remaining))
        return [DocKey(row["file"], row["row"]) for row in rows]


class RunTables:
    """The tables of a run that are there; a context, as tables in a bucket are copied."""

    def __init__(self, out: Path) -> None:
        """Raises UsageError for a folder that is no run's of data, InputError for a damaged run.json."""
        if not is_data_run(out):
            raise UsageError(f"{out}: expected the --out of a gristmill run, got no run.json of one in it")
        self.out = out
        try:
            self.config = load_options(read_options(out), out)
        except ValueError as error:
            raise InputError(f"{out / RUN_FILE} is damaged ({error}): run the same `gristmill run` again") from error
        self._stack = ExitStack()

    def __enter__(self) -> "RunTables":
        named = clusters_next_to(DUPLICATES)  # with the documents' own ids, if they have some
        clusters = named if is_file(self.out / named) else CLUSTERS
        removed = Path(removed_table(self.config).name)
        tables = {"clusters": clusters, "duplicates": DUPLICATES, "rules": removed}
        for stage in plan_stages(self.config):
            if stage.browsed_as and stage.losses:
                tables[stage.browsed_as] = stage.losses
        paths = dict[str, Path]()
        for name, path in tables.items():
            if is_file(self.out / path):
                paths[name] = self.out / path
        copies = self._stack.enter_context(local_copies(list(paths.values())))
        self.tables = dict(zip(paths, map(PagedTable, copies), strict=True))
        self.clusters: ClusterIndex | None = None
        if "clusters" in self.tables:
            self.clusters = ClusterIndex(self.tables["clusters"])
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def documents(self, keys: Sequence[DocKey], of: str) -> dict[DocKey, Document]:
        """Return some documents as the stage `of` a table read them; none where they are no longer there."""
        if of == "rules":
            return removed_documents(self.config, keys)
        corpus = corpus_of(self.out)
        for stage in plan_stages(self.config):
            if stage.browsed_as == of:
                corpus = context_of(self.config, stage).corpus
        return some_documents(corpus, keys, self.config.text_column)
