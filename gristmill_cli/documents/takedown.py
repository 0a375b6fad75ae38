"""Make the line of a list that takes a document down, bound to its text and not to its row."""

from pathlib import Path
from typing import Any

import pyarrow as pa

from gristmill.io.documents import DocKey
from gristmill.storage.files import is_file
from preprocessing.mixing.facts import text_digests
from preprocessing.mixing.keep_list import KeepList, describe_text
from preprocessing.steps.text_digest import TEXT_DIGEST


def describe_takedown(
    listed: Path | None, is_down: bool, fact: dict[str, Any], fact_of_kept: dict[str, Any] | None
) -> tuple[str, tuple[str, ...]]:
    """Return what to do to take a document down, and the lines for it: its own, and that of the one kept in its place.

    `listed` is the list of the run; `is_down`, whether the mix left the document out by a list.
    """
    if listed and is_file(listed) and _digest_of(fact) in KeepList.read(listed).digests:
        return "its text is in your list", ()
    lines = [_line_of(fact)]
    if is_down:
        return "its row is in your list; the line below is for its text, in any row", tuple(lines)
    if fact_of_kept is None:
        return "the line below takes it down, and each document with the same text", tuple(lines)
    lines.append(_line_of(fact_of_kept))
    return "the first line below takes it down; one much like it stays until the second does", tuple(lines)


def _line_of(fact: dict[str, Any]) -> str:
    return describe_text(_digest_of(fact), DocKey(fact["file"], fact["row"]))


def _digest_of(fact: dict[str, Any]) -> bytes:
    """Return the digest of a document's text, given its facts."""
    halves = {name: pa.array([fact[name]], pa.uint64()) for name in TEXT_DIGEST}
    digest: bytes = text_digests(pa.table(halves))[0]
    return digest
