"""The documents that rules removed: they are in the corpus that was judged, which may be the raw one."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from gristmill.engine.execution.staging import local_copies
from gristmill.errors import GristmillError
from gristmill.io.documents import ONE_SLICE, CorpusFile, DocKey, Document, slices_at
from gristmill.io.readers import read_chosen
from gristmill_cli.documents.duplicates import some_documents
from gristmill_cli.run_check import scan_inputs
from gristmill_cli.run_config import RunConfig
from gristmill_cli.stages.pipeline import context_of, judging_stage
from preprocessing.document_pass import removed_path


def removed_table(config: RunConfig) -> Path:
    """Return the table of the documents that the rules of a run, or the user's steps, removed."""
    return removed_path(judging_stage(config).path(config))


def removed_documents(config: RunConfig, keys: Iterable[DocKey]) -> dict[DocKey, Document]:
    """Return documents that rules removed, by the keys in the table; none where they are no longer there."""
    context = context_of(config, judging_stage(config))
    if context.corpus_stage is not None:
        return some_documents(context.corpus, keys, config.text_column)
    rows_of = dict[str, list[int]]()
    for key in sorted(set(keys)):
        rows_of.setdefault(key.file, []).append(key.row)
    documents = dict[DocKey, Document]()
    try:
        for file in scan_inputs(config, config.corpus).files:
            if file.name in rows_of:
                for document in _read_rows(file, rows_of[file.name]):
                    documents[document.key] = document
    except (GristmillError, OSError):
        return {}
    return documents


def read_raw_document(config: RunConfig, key: DocKey) -> Document | None:
    """Return a document of the raw corpus, None if its file is not there."""
    for file in scan_inputs(config, config.corpus).files:
        if file.name == key.file:
            return next(iter(_read_rows(file, [key.row])), None)
    return None


def _read_rows(file: CorpusFile, rows: list[int]) -> list[Document]:
    with local_copies([file.path]) as (copy,):
        (whole,) = slices_at(replace(file, path=copy), ONE_SLICE)
        return list(read_chosen(whole, rows))
