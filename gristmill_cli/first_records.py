"""Check of how a corpus begins: a field of texts that is missing is said before the first stage starts its workers."""

import sys
from contextlib import suppress
from typing import Any

from gristmill.counts import MALFORMED, NO_FIELD, Counts
from gristmill.errors import DamagedFile
from gristmill.io.documents import FILE_FORMATS, ONE_SLICE, WEB_FORMATS, CorpusFile, parse_name, slices_at
from gristmill.io.readers import read_documents
from gristmill.io.writers import Rejects
from gristmill.storage.stores import store_of
from gristmill_cli.run_check import scan_inputs
from gristmill_cli.run_config import RunConfig
from gristmill_cli.stages.pipeline import FIRST_STAGE

_RECORDS = 100  # of a file that are read at most
_WHOLE_TEXTS = {*FILE_FORMATS, *WEB_FORMATS}  # formats whose records have no fields


def check_first_records(config: RunConfig) -> None:
    """Raise UsageError if the first table of a source has no column of texts; say it of a first file of JSON lines.

    For commands alone, as planning reads no document. Files in a bucket are not looked at, as they would be fetched
    for it, and neither are damaged ones, which a run leaves out. With --max_failed no file is, as a run survives one
    that ends its reader's process, and this process would not.
    """
    if store_of(config.corpus).needs_copies or config.from_ not in (None, FIRST_STAGE) or config.max_failed:
        return
    first_of_source = dict[str, CorpusFile]()
    for file in scan_inputs(config, config.corpus).files:
        if not store_of(file.path).needs_copies:
            first_of_source.setdefault(file.source, file)
    for file in first_of_source.values():
        name = parse_name(file.name)
        if name is not None and name.format not in _WHOLE_TEXTS:
            with suppress(DamagedFile):
                _check_first_file(file, file.source in config.sources)


def _check_first_file(file: CorpusFile, has_table: bool) -> None:
    """Read a file, whose source `has_table` in the run's TOML, until its first document, or until so many were none."""
    counts = Counts({}, [])
    (whole,) = slices_at(file, ONE_SLICE)
    with suppress(_EnoughRecords):
        for _ in read_documents(whole, counts, _FirstRejects()):
            return
    reasons = [reason for reason in counts.reasons if reason.startswith(MALFORMED)]
    if reasons and all(reason.startswith(f"{MALFORMED}: {NO_FIELD} ") for reason in reasons):
        option = "--text_column NAME"
        if has_table:
            option = f'column = "NAME" in [sources.{file.source}]'
        print(
            f"note: no text in the first records of {file.name}, which count as malformed. {counts.examples[0]}: give "
            f"{option} if the text is in another field",
            file=sys.stderr,
            flush=True,
        )


class _EnoughRecords(Exception):
    """So many records were read, and none of them is a document."""


class _FirstRejects(Rejects):
    """Counts records that are no documents; writes nothing."""

    def __init__(self) -> None:
        super().__init__(None)
        self._records = 0

    def add(self, file: str, line: int, reason: str, record: bytes | dict[str, Any]) -> None:  # noqa: ARG002
        self._records += 1
        if self._records == _RECORDS:
            raise _EnoughRecords
