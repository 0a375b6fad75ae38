"""The report of decontaminate on the items of benchmarks that it found in a corpus, and the names of its files."""

from pathlib import Path

import msgspec

from gristmill.errors import InputError
from gristmill.storage.files import read_file

CONTAMINATED = "in a benchmark"  # the reason of documents that go
EXACT = "exact"
NEAR = "near"


class BenchmarkReport(msgspec.Struct):
    """Items of one benchmark that were found; documents by source.

    `near` counts items with near-duplicates alone, `near_documents` documents with no more of the benchmark than that.
    """

    items: int
    too_short: int
    shared_ngrams: int
    shared_near_ngrams: int
    found: int
    documents: dict[str, int]
    near: int
    near_documents: dict[str, int]


class Report(msgspec.Struct):
    """TARGET_DIR.benchmarks.json: each benchmark; how many n-grams, and near-duplicates of how many items, are in too
    many documents to say anything; how many documents have an item.
    """

    benchmarks: dict[str, BenchmarkReport]
    common_ngrams: int
    common_items: int
    documents: int = 0


def report_paths(target_dir: Path) -> tuple[Path, Path]:
    """Return the paths of the table of the places found, and the report, next to `target_dir`."""
    name = target_dir.name
    return target_dir.with_name(f"{name}.contamination.parquet"), target_dir.with_name(f"{name}.benchmarks.json")


def read_report(path: Path) -> Report:
    """Return the report of a finished run. Raises InputError if it is missing or damaged."""
    try:
        return msgspec.json.decode(read_file(path), type=Report)
    except (FileNotFoundError, msgspec.DecodeError) as error:
        raise InputError(f"{path}: expected what decontaminate found, got {error}; run that stage again") from error
