"""Make the line of a list that takes a document down, bound to its text and not to its row."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gristmill.engine.execution.staging import local_copies
from gristmill.io.artefacts import open_table
from gristmill.io.facts import INDEX_FILE, read_index, written_by_file
from gristmill.storage.files import is_file
from preprocessing.mixing.keep_list import DROP, KeepList, describe_text
from preprocessing.steps.text_digest import TEXT_DIGEST, text_digests


def describe_takedown(
    listed: Path | None, is_down: bool, facts: Iterable[dict[str, Any]], lines: tuple[str, ...]
) -> tuple[str, tuple[str, ...]]:
    """Return what to do to take a document down, and of its `lines`, its own and that of the one kept, which to show.

    `listed` is the list of the run; `is_down`, whether the mix left the document out by a list; `facts`, those of its
    text in the end, and as the first stage wrote it.
    """
    if listed and is_file(listed):
        digests = KeepList.read(listed).digests
        if any(_digest_of(fact) in digests for fact in facts):
            return "its text is in your list", ()
    if is_down:
        return "its row is in your list; the line below is for its text, in any row", lines[:1]
    if len(lines) == 1:
        return "the line below takes it down, and each document with the same text", lines
    return "the first line below takes it down; one much like it stays until the second does", lines


def line_of(fact: dict[str, Any], name: str, word: str = DROP) -> str:
    """Return the line that takes down each document with the text of one, given its facts and a name of it."""
    return describe_text(_digest_of(fact), name, word)


def held_digests(folders: Iterable[Path], digests: NDArray[np.bytes_]) -> NDArray[np.bytes_]:
    """Return the digests that texts of documents have, of some, given folders of facts."""
    held = [digests[:0]]
    for folder in folders:
        if not is_file(folder / INDEX_FILE):
            continue
        with local_copies([folder / INDEX_FILE]) as (index,):
            files = read_index(index)
        for file in files:
            held += _held_in_file(folder / file.path, digests)
    return np.unique(np.concatenate(held))


def _held_in_file(facts: Path, digests: NDArray[np.bytes_]) -> Iterator[NDArray[np.bytes_]]:
    """Yield the digests that texts of documents in a file of facts have; none where no texts were noted."""
    with local_copies([facts]) as (copy,):
        with open_table(copy) as file:
            has_digests = set(TEXT_DIGEST) <= set(file.schema_arrow.names)
        if not has_digests:
            return
        for _, table in written_by_file(copy, TEXT_DIGEST):
            of_file = text_digests(table)
            yield of_file[np.isin(of_file, digests)]


def _digest_of(fact: dict[str, Any]) -> bytes:
    """Return the digest of a document's text, given its facts."""
    halves = {name: pa.array([fact[name]], pa.uint64()) for name in TEXT_DIGEST}
    digest: bytes = text_digests(pa.table(halves))[0]
    return digest
