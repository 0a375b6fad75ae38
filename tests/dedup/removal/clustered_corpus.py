"""Clusters and corpora on disk for tests of removal, and verified removal as a plain loop over sets of strings."""

import json
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet

from dedup import generate_duplicates_dict
from gristmill.engine.options import RunOptions
from gristmill.text import matching_form

QUIET = RunOptions(workers=1, quiet=True)
COMMAND = "python dedup/generate_duplicates_dict.py --input_file {clusters} --out_file {out} {options}"
Key = tuple[str, int]
Removed = dict[Key, tuple[Key, float | None]]
CLUSTERS = [[("a/x", 0), ("a/x", 7), ("b/y", 1)], [("a/x", 2), ("c/z", 0)], [("b/y", 3), ("b/y", 12), ("c/z", 5)]]


def write_table(path: Path, clusters: Iterable[list[Key]]) -> Path:
    rows = [(number, *key) for number, cluster in enumerate(clusters) for key in cluster]
    columns = [[row[i] for row in rows] for i in range(3)]
    types = [pa.int64(), pa.string(), pa.int64()]
    table = pa.table([pa.array(c, t) for c, t in zip(columns, types, strict=True)], names=["cluster", "file", "row"])
    pyarrow.parquet.write_table(table, path, row_group_size=5)
    return path


def write_pickle(path: Path, clusters: list[list[Key]]) -> Path:
    keys = [f"{file}@{row}" for cluster in clusters for file, row in cluster]
    number = {key: i for i, key in enumerate(keys)}
    components = [[number[f"{file}@{row}"] for file, row in cluster] for cluster in clusters]
    path.write_bytes(pickle.dumps((components, len(components), dict(enumerate(keys)))))
    return path


def read_removed(path: Path) -> Removed:
    """Removed key → (kept key, similarity), from a table."""
    rows = pyarrow.parquet.read_table(path).to_pylist()
    assert rows == sorted(rows, key=lambda row: (row["file"], row["row"]))
    return {(r["file"], r["row"]): ((r["kept_file"], r["kept_row"]), r["similarity"]) for r in rows}


def removed_by(tmp_path: Path, clusters: list[list[Key]], **options: Any) -> dict[Key, Key]:
    """Removed key → kept key, as the stage writes them for these clusters."""
    table = write_table(tmp_path / "c.parquet", clusters)
    generate_duplicates_dict(table, tmp_path / "d.parquet", QUIET, **options)
    return {key: kept for key, (kept, _) in read_removed(tmp_path / "d.parquet").items()}


def write_corpus(root: Path, files: dict[str, list[Any]]) -> None:
    """Files of records; a text alone is a record."""
    for name, records in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [record if isinstance(record, dict) else {"text": record} for record in records]
        if name.endswith(".parquet"):
            pyarrow.parquet.write_table(pa.Table.from_pylist(lines), path)
        else:
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def shingles(text: str, width: int = 13) -> set[str]:
    """The shingles of a text as strings."""
    form = matching_form(text)
    return {form[i : i + width] for i in range(len(form) - width + 1)}


def verified_plainly(files: dict[str, list[str]], clusters: list[list[Key]], measure: str, threshold: float) -> Removed:
    """Verified removal as a loop over the keys of each cluster."""
    found: Removed = {}
    for cluster in clusters:
        kept: list[Key] = []
        for key in cluster:
            one = shingles(files[key[0]][key[1]])
            for other_key in kept:
                other = shingles(files[other_key[0]][other_key[1]])
                similarity = len(one & other) / len(one if measure == "containment" else one | other)
                if similarity >= threshold:
                    found[key] = other_key, similarity
                    break
            else:
                kept.append(key)
    return found
