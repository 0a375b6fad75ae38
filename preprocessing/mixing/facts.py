"""Facts of documents: the row, size and digest of each, which a mix is decided by; the text is read once for them."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gristmill.batches import batched
from gristmill.counts import Counts
from gristmill.engine.slices import SliceGroup
from gristmill.engine.task import Task
from gristmill.errors import InputError
from gristmill.io.artefacts import encode_names, stream_table, write_table
from gristmill.io.readers import Rejects, read_documents
from gristmill.text import text_digest, utf8_size
from preprocessing.mixing.mix import files_of

NOTED = "noted"  # the reason that the documents of a group leave this step by
DIGEST = np.dtype("S16")  # the first half of a text's SHA-256
_COLUMNS = ("file", "row", "bytes", "tokens", "digest")
_BATCH_CHARACTERS = 1 << 20  # of texts whose tokens are counted together


@dataclass(frozen=True)
class Facts:
    """Facts of the documents (n) of one corpus file: row, UTF-8 bytes, tokens (0 if not counted), digest of text."""

    name: str
    rows: NDArray[np.int64]
    sizes: NDArray[np.int64]
    tokens: NDArray[np.int64]
    digests: NDArray[np.bytes_]


def facts_path(group: SliceGroup, folder: Path) -> Path:
    """Path of the facts of a group."""
    return folder / f"{group[0].label}.facts.parquet"


def facts_task(group: SliceGroup, tokenizer: Path | None, output: Path) -> Task:
    """Return the task that notes the facts of a group; it counts tokens if a tokenizer is given."""
    return Task.on_slices(group, note_facts, {"tokenizer": tokenizer, "output": output}, (output,))


def note_facts(group: SliceGroup, tokenizer: Path | None, output: Path) -> Counts:
    """Task: read the documents of a group, and write their facts as a Parquet table."""
    counts = Counts({}, [])
    rejects = Rejects(output)
    numbers = array("i")  # of each document's file
    rows = array("q")
    sizes = array("q")
    tokens = array("q")
    digests = bytearray()
    names = files_of(group)
    for part in group:
        documents = read_documents(part, counts, rejects)
        for batch in batched(documents, size=_BATCH_CHARACTERS, size_of=lambda document: len(document.text)):
            if tokenizer:
                tokens.extend(_count_tokens(tokenizer, [document.text for document in batch]))
            for document in batch:
                size = utf8_size(document.text)
                counts.add(part.source, NOTED, size)
                rows.append(document.key.row)
                sizes.append(size)
                digests += text_digest(document.text)[: DIGEST.itemsize]
            numbers.extend([names.index(part.name)] * len(batch))
            del batch, document  # a large one is gone before the next is read
    stored = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(DIGEST.itemsize), len(rows), [None, pa.py_buffer(bytes(digests))]
    )
    columns = {
        "file": pa.DictionaryArray.from_arrays(np.frombuffer(numbers, np.int32), pa.array(names, pa.string())),
        "row": pa.array(np.frombuffer(rows, np.int64)),
        "bytes": pa.array(np.frombuffer(sizes, np.int64)),
        "tokens": pa.array(np.frombuffer(tokens, np.int64) if tokenizer else np.zeros(len(rows), np.int64)),
        "digest": stored,
    }
    write_table(output, columns)
    return counts


def _count_tokens(tokenizer: Path, texts: Sequence[str]) -> list[int]:
    from preprocessing.tokenizer.loading import count_tokens_of_each  # here, as it imports libraries of tokenizers

    return count_tokens_of_each(tokenizer, texts)


def load_facts(path: Path, names: Sequence[str]) -> list[Facts]:
    """Return the facts of the corpus files `names`, in this order. Raises InputError if the table is damaged."""
    tables = list(stream_table(path, _COLUMNS))
    if not tables:
        return [_no_facts(name) for name in names]
    table = pa.concat_tables(tables).combine_chunks()
    encoded = encode_names(table.column("file"), path)
    number_of = {name: number for number, name in enumerate(names)}
    known = encoded.dictionary.to_pylist()
    for name in known:
        if name not in number_of:
            raise InputError(f"{path} has facts of {name!r}; expected {', '.join(names)}: remove it, and run mix again")
    numbers = np.array([number_of[name] for name in known], np.int64)[encoded.indices.to_numpy()]
    rows = table.column("row").to_numpy()
    sizes = table.column("bytes").to_numpy()
    tokens = table.column("tokens").to_numpy()
    digests = _digests(table.column("digest"))
    starts = np.searchsorted(numbers, np.arange(len(names) + 1))
    found = []
    for number, name in enumerate(names):
        own = slice(starts[number], starts[number + 1])
        found.append(Facts(name, rows[own], sizes[own], tokens[own], digests[own]))
    return found


def _digests(column: pa.ChunkedArray) -> NDArray[np.bytes_]:
    array = column.combine_chunks()
    data = array.buffers()[1]
    start = array.offset * DIGEST.itemsize
    return np.frombuffer(data, np.uint8)[start : start + len(array) * DIGEST.itemsize].view(DIGEST)


def _no_facts(name: str) -> Facts:
    empty = np.empty(0, np.int64)
    return Facts(name, empty, empty, empty, np.empty(0, DIGEST))
