"""The matrices of a fastText model's file, and the products of its vectors with those of its labels.

A large model's products are a file in the user's cache, which the first run computes: all processes that score read
this one, and none reads the vectors, a hundred times as many.
"""

import mmap
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gristmill.errors import OutputError, wrap_read_errors
from gristmill.paths import user_cache
from gristmill.storage.local import atomic_write
from preprocessing.scoring.fasttext_file import SHAPE, FastTextFile

_VERSION = 1  # of what is computed
_MAX_FLOAT32 = 128.0  # products up to this are stored as float32: scores differ by less than 1e-6
_ROWS = 1 << 12  # of the vectors that are multiplied at once: few enough for the cache
_LARGE = 1 << 26  # bytes of vectors, from which products are kept on disk
_KEPT = 8  # files of products


def read_matrix(content: mmap.mmap, start: int) -> tuple[NDArray[np.float32], int]:
    """Return a matrix whose flag for quantization is at `start`, and where it ends."""
    first = start + 1
    rows, columns = SHAPE.unpack_from(content, first)
    values = np.frombuffer(content, "<f4", rows * columns, first + SHAPE.size)
    return values.reshape(rows, columns), first + SHAPE.size + values.nbytes


def read_outputs(content: mmap.mmap, start: int, own: int) -> NDArray[np.float32]:
    """Return the vectors of the labels, that of label number `own` first."""
    outputs, _ = read_matrix(content, start)
    return np.vstack([outputs[own : own + 1], np.delete(outputs, own, axis=0)])


def keep_products(path: Path, model: FastTextFile, version: str, label: str) -> None:
    """Compute the products of a large model, whose SHA-256 is `version`, unless they are there."""
    with wrap_read_errors(path), path.open("rb") as file:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    vectors, end = read_matrix(content, model.matrices)
    if vectors.nbytes >= _LARGE:
        find_products(vectors, read_outputs(content, end, model.labels.index(label)), version)


def find_products(vectors: NDArray[np.float32], outputs: NDArray[np.float32], version: str = "") -> NDArray[Any]:
    """Return the product of each vector (rows, n) with those of the labels, the score's own first.

    For two labels it is the difference of both. Those of a large model with this `version` are from the cache, into
    which they are written unless they are there or it cannot be written.
    """
    if not version or vectors.nbytes < _LARGE:
        return _multiply(vectors, outputs)
    key = sha256(f"{_VERSION} {version} {sha256(outputs.tobytes()).hexdigest()}".encode()).hexdigest()
    with suppress(OSError, RuntimeError, OutputError, ValueError):  # a full disk, no home, a damaged file
        file = user_cache() / "products" / f"{key[:32]}.npy"
        if not file.is_file():
            _store(file, _multiply(vectors, outputs))
        return np.asarray(np.load(file, mmap_mode="r"))
    return _multiply(vectors, outputs)


def _multiply(vectors: NDArray[np.float32], outputs: NDArray[np.float32]) -> NDArray[Any]:
    weights = outputs.astype(np.float64)
    if len(outputs) == 2:
        weights = weights[:1] - weights[1:]
    products = np.empty((len(vectors), len(weights)), np.float64)
    for start in range(0, len(vectors), _ROWS):
        rows = slice(start, start + _ROWS)
        products[rows] = vectors[rows].astype(np.float64) @ weights.T
    if np.abs(products).max(initial=0) <= _MAX_FLOAT32:
        products = products.astype(np.float32)
    products.flags.writeable = False  # as those of a file are: kernels are compiled for one kind of array
    return products


def _store(file: Path, products: NDArray[Any]) -> None:
    """Write products to the cache, and remove the oldest of others."""
    with atomic_write(file) as temporary, temporary.open("wb") as stored:
        np.save(stored, products)
    by_age = sorted(file.parent.glob("*.npy"), key=lambda path: path.stat().st_mtime)
    for oldest in by_age[:-_KEPT]:
        oldest.unlink(missing_ok=True)
