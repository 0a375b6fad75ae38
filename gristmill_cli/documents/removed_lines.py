"""Make the line of a list that keeps out a document that a run removed, should a later run let it in again."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gristmill.errors import GristmillError
from gristmill.io.documents import DocKey, Document
from gristmill.steps import Batch, DocumentStep
from gristmill.storage.files import is_file
from gristmill_cli.documents.duplicates import some_documents
from gristmill_cli.documents.removed_texts import read_raw_document
from gristmill_cli.run_config import RunConfig
from gristmill_cli.stages.pipeline import STAGES, context_of
from gristmill_cli.stages.spec import StageSpec
from preprocessing.mixing.keep_list import GONE, KeepList, describe_text, parse_text_line
from preprocessing.steps.normalise import Normalise
from preprocessing.steps.recipe_rules import RecipeRules
from preprocessing.steps.text_digest import DIGEST
from preprocessing.steps.user_function import UserFunction


def line_of_raw_document(config: RunConfig, key: DocKey, name: str) -> str:
    """Return the line that keeps out a document that the first stage removed; '' if its text cannot be read.

    `key` is that in the raw corpus; the line is for the text as the stage would have written it.
    """
    first = STAGES[0]
    steps = first.steps(replace(context_of(config, first), is_last_writer=False))
    try:
        document = read_raw_document(config, key)
        if not document:
            return ""
        return _line_of(_text_if_kept(steps, document), name)
    except (GristmillError, OSError):
        return ""


def line_of_document(config: RunConfig, stage: StageSpec, key: DocKey, name: str) -> str:
    """Return the line that keeps out a document that a later stage removed; '' if its text cannot be read.

    `key` is that in the documents which the stage read; the line is for the text as it was there.
    """
    documents = some_documents(context_of(config, stage).corpus, [key], config.text_column)
    if key not in documents:
        return ""
    return _line_of(documents[key].text, name)


def describe_removed(listed: Path | None, line: str) -> tuple[str, tuple[str, ...]]:
    """Return what to do to keep out a document that was removed, and the lines to show, given its line.

    `listed` is the list of the run.
    """
    parsed = parse_text_line(line)
    if parsed is None:
        return "no line keeps it out, as its text cannot be read or a step fails on it: trace it after each run", ()
    is_listed = False
    if listed and is_file(listed):
        digests = {text.digest for text in KeepList.read(listed).texts}
        is_listed = parsed.digest in digests
    if is_listed:
        return "its text is in your list, which keeps it out should it come back", ()
    return "the line below keeps it out should it come back, and each document with the same text", (line,)


def _text_if_kept(steps: Sequence[DocumentStep], document: Document) -> str:
    """Return a document's text as steps rewrite it, whether or not one of them removes the document."""
    text = document.text
    for step in steps:
        batch = Batch((text,), read_field=lambda _, name: document.value(name))
        if isinstance(step, RecipeRules):
            text = step.rewrite(batch)[0]
        elif isinstance(step, Normalise) or (isinstance(step, UserFunction) and step.kind == "rewrite"):
            outcome = step.apply(batch)
            if outcome.texts:
                text = outcome.texts[0]
    return text


def _line_of(text: str, name: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()[: DIGEST.itemsize]
    return describe_text(digest, name, GONE)
