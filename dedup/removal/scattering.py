"""Scatters fetched members and their texts: a file of each for each part of the clusters, from a bundle of fetch tasks.

So a part reads its own files alone, and each fetched file is read once, however many parts there are.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from dedup.removal.texts import FETCHED
from gristmill.engine.task import FileSet
from gristmill.io.external_sort import read_records, scatter_records
from gristmill.storage.local import atomic_write

_BLOCK = 4096  # records read together


def scatter_fetched(
    fetched: FileSet, texts: FileSet, parts: list[int], outputs: tuple[Path, ...], text_outputs: tuple[Path, ...]
) -> None:
    """Task: write the FETCHED records of each part of the clusters to one of `outputs`, its texts to `text_outputs`.

    `fetched` and `texts` are files of fetch tasks; where no similarity is checked there are no texts. `parts` are the
    first clusters of all parts.
    """
    with ExitStack() as stack:
        targets = [stack.enter_context(stack.enter_context(atomic_write(path)).open("wb")) for path in text_outputs]
        ends = [0] * len(targets)

        def blocks() -> Iterator[tuple[NDArray, NDArray[np.int64]]]:
            for number, path in enumerate(fetched.paths):
                with ExitStack() as opened:
                    source = opened.enter_context(texts.paths[number].open("rb")) if targets else None
                    for block in read_records(path, FETCHED, _BLOCK):
                        part = np.searchsorted(parts, block["cluster"], side="right") - 1
                        if source:
                            _move_texts(block, part, source, targets, ends)
                        yield block, part

        scatter_records(outputs, blocks())


def _move_texts(
    block: NDArray, part: NDArray[np.int64], source: BinaryIO, targets: Sequence[BinaryIO], ends: list[int]
) -> None:
    """Append the texts of FETCHED records (n) to the files of their parts (n), of sizes `ends`; set their offsets."""
    places = zip(part.tolist(), block["offset"].tolist(), block["size"].tolist(), strict=True)
    for i, (number, offset, size) in enumerate(places):
        targets[number].write(os.pread(source.fileno(), size, offset))
        block["offset"][i] = ends[number]
        ends[number] += size
