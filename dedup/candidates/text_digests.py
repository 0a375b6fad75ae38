"""Text digests: 128-bit hashes of texts or of their matching forms, and the task that writes those of slices.

A digest is the first 128 bits of SHA-256, so no text can be crafted to collide with another, and CPUs with SHA
instructions compute it about as fast as weaker hashes. The collision probability among n different texts is
n² / 2^129: 1.5 · 10^-19 for 10 billion.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dedup.candidates.input_shards import Scope
from dedup.minhash.matching_form import form_size, pack, write_form
from gristmill.batches import batched
from gristmill.counts import Counts
from gristmill.engine.slices import SliceGroup, leaves_out_damaged
from gristmill.engine.task import Result
from gristmill.io.external_sort import write_records
from gristmill.io.readers import Slice, read_documents
from gristmill.io.writers import Rejects
from gristmill.kernels import kernel
from gristmill.text import matching_form, utf8_size

MatchOn = Literal["matching_form", "bytes"]
DIGEST = [("high", "<u8"), ("low", "<u8")]
GROUP_RECORD = np.dtype([*DIGEST, ("row", "<u4"), ("size", "<u4")])  # row within the group; bytes of the text in UTF-8
DIGESTED, EMPTY = "digested", "nothing to compare"  # reasons in the counts of digest_slices
_BATCH_CHARACTERS, _BATCH_DOCUMENTS = 4 << 20, 4096  # digested together
_PREFIX = 256  # characters tested first for an empty matching form


@leaves_out_damaged
def digest_slices(group: SliceGroup, on: MatchOn, scope: Scope, output: Path) -> Result:
    """Task: write the GROUP_RECORDs of a group of slices; returns the row in the group of each slice's first row."""
    counts, first_rows = Counts({}, []), list[int]()
    write_records(output, _iter_records(group, on, scope, counts, Rejects(output), first_rows))
    return Result(counts, first_rows)


def digest_texts(texts: Sequence[str], on: MatchOn, salt: bytes = b"") -> tuple[NDArray[np.uint64], NDArray[np.bool_]]:
    """128-bit digests (n × 2: high and low half), and for each text whether its matching form is empty (n).

    Equal texts have different digests under different salts.

    >>> found, is_empty = digest_texts(["Hello, world!", " hello WORLD", "Hello world", "!?"], "matching_form")
    >>> len(np.unique(found[~is_empty], axis=0)), is_empty.tolist()
    (1, [False, False, False, True])
    """
    salted = hashlib.sha256(salt)
    found, empty = [], []
    for data, is_empty in _COMPARED_BYTES[on](texts):
        digest = salted.copy()
        digest.update(data)
        found.append(digest.digest()[:16])
        empty.append(is_empty)
    return np.frombuffer(b"".join(found), "<u8").reshape(-1, 2), np.array(empty, bool)


def _iter_records(
    group: SliceGroup, on: MatchOn, scope: Scope, counts: Counts, rejects: Rejects, first_rows: list[int]
) -> Iterator[NDArray]:
    """GROUP_RECORDs of the slices' documents; appends the row in the group of each slice's first row."""
    end = 0
    for part in group:
        first_rows.append(end)
        for records in _digest_slice(part, on, scope, counts, rejects):
            records["row"] += np.uint32(first_rows[-1])
            end = int(records["row"][-1]) + 1
            yield records


def _digest_slice(part: Slice, on: MatchOn, scope: Scope, counts: Counts, rejects: Rejects) -> Iterator[NDArray]:
    """GROUP_RECORDs of a slice's documents, rows within the slice, without those whose matching form is empty."""
    salt = part.source.encode() + b"\0" if scope == "per-source" else b""
    for documents in batched(
        read_documents(part, counts, rejects), _BATCH_DOCUMENTS, _BATCH_CHARACTERS, lambda document: len(document.text)
    ):
        found, is_empty = digest_texts([document.text for document in documents], on, salt)
        records = np.empty(len(documents), GROUP_RECORD)
        records["high"], records["low"] = found.T
        records["row"] = [document.key.row - part.first_row for document in documents]
        records["size"] = [utf8_size(document.text) for document in documents]
        for reason, chosen in ((DIGESTED, records[~is_empty]), (EMPTY, records[is_empty])):
            counts.add(part.source, reason, int(chosen["size"].sum(dtype=np.int64)), len(chosen))
        if not is_empty.all():
            yield records[~is_empty]


def _matching_forms(texts: Sequence[str]) -> Iterator[tuple[memoryview | bytes, bool]]:
    for _, data, offsets in pack(texts):
        forms, bounds = np.empty(form_size(len(data)), np.uint8), np.zeros(len(offsets), np.int64)
        _write_forms(data, offsets, forms, bounds)
        yield from ((forms.data[start:end], start == end) for start, end in pairwise(bounds.tolist()))


def _utf8(texts: Sequence[str]) -> Iterator[tuple[memoryview | bytes, bool]]:
    for text in texts:
        is_empty = not (matching_form(text[:_PREFIX]) or matching_form(text))
        yield text.encode("utf-8", "surrogatepass"), is_empty


_COMPARED_BYTES: dict[str, Callable[[Sequence[str]], Iterator[tuple[memoryview | bytes, bool]]]] = {
    "matching_form": _matching_forms,
    "bytes": _utf8,
}


@kernel
def _write_forms(data: np.ndarray, offsets: np.ndarray, forms: np.ndarray, bounds: np.ndarray) -> None:
    """Write the matching form of packed text i to forms[bounds[i] : bounds[i + 1]]."""
    for i in range(len(offsets) - 1):
        size, _ = write_form(data[offsets[i] : offsets[i + 1]], forms[bounds[i] :])
        bounds[i + 1] = bounds[i] + size
