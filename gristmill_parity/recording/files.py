"""Files of a recording: a rank's list of tensors with their places, and their values one after the other."""

import base64
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from gristmill_parity.recording.placement import Coordinates, Runs, TensorPiece
from gristmill_parity.recording.sketch import hash_of, octets_of, sketch_of

FORMAT = 2
_HEADER = "rank-{:05}.json"
_VALUES = "rank-{:05}.values"


class RecordingError(ValueError):
    """Recordings cannot be made or compared; the message is one sentence for users."""


@dataclass(frozen=True)
class Key:
    """Name of a tensor: the step (from 1; 0 is before the first), a module or parameter, and which tensor of it."""

    step: int
    name: str
    kind: str

    def __str__(self) -> str:
        return f"{self.name} {self.kind}"


@dataclass(frozen=True)
class Entry:
    """A tensor of a rank's recording."""

    key: Key
    call: int
    """Number of the micro-batch in the step; 0 for what there is one of."""
    dtype: str
    shape: tuple[int, ...]
    """Shape of the values that the rank has."""
    piece: TensorPiece
    hash: int
    sketch: tuple[float, ...]
    offset: int
    """Offset of the values in the file, in bytes; -1 if they were not kept."""
    again: bool
    """True of what was computed once more in the backward pass."""


_Bits = tuple[int, str, tuple[int, ...], tuple[Runs, ...], tuple[int, ...]]
"""What makes a tensor's summary: hash, dtype and shape of the values, their place in the whole tensor."""


@dataclass
class _Summary:
    """Summary of a tensor: an output that is the next module's input shares one with it, as do weights that stay."""

    sketch: str
    """In base64; empty for integers."""
    offset: int = -1
    """Offset of the values in the file; -1 until they are kept."""


class Writer:
    """Writes a rank's recording: values as they come, so that none are held; the list of them at the end."""

    def __init__(self, folder: Path, rank: int, size: int, axes: Coordinates) -> None:
        self.folder = folder
        self.rank = rank
        self.size = size
        self.axes = dict(axes)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / _HEADER.format(rank)).unlink(missing_ok=True)
        self._values = (folder / _VALUES.format(rank)).open("wb")
        # each as JSON: smaller than lists of numbers, and nothing that the garbage collector looks through
        self._entries: list[str] = []
        self._step = 0
        self._summaries: dict[_Bits, _Summary] = {}
        self._earlier: dict[_Bits, _Summary] = {}

    def write(self, key: Key, call: int, values: Tensor, piece: TensorPiece, keeps: bool, again: bool = False) -> None:
        """Add a tensor: its hash and sketch, and its values if it `keeps` them."""
        dtype = str(values.dtype).removeprefix("torch.")
        shape = tuple(values.shape)
        if key.step != self._step:
            self._step = key.step
            self._earlier = self._summaries
            self._summaries = {}
        digest = hash_of(values)
        bits = (digest, dtype, shape, piece.index, piece.shape)
        summary = self._summaries.get(bits) or self._earlier.get(bits) or _Summary(_encoded_sketch(values, piece))
        self._summaries[bits] = summary
        if keeps and summary.offset < 0:
            summary.offset = self._values.tell()
            _write_values(self._values, values)
        offset = summary.offset if keeps else -1
        self._entries.append(
            f'[{key.step}, {_as_json(key.name)}, {_as_json(key.kind)}, {call}, "{dtype}", {list(shape)}, '
            f'{piece.as_json}, {digest}, "{summary.sketch}", {offset}, {str(again).lower()}]'
        )

    def close(self) -> None:
        """Write the list of tensors; a recording without it is incomplete."""
        self._values.close()
        header = json.dumps({"format": FORMAT, "rank": self.rank, "size": self.size, "axes": self.axes})
        tensors = ",\n".join(self._entries)
        path = self.folder / _HEADER.format(self.rank)
        partial = path.with_suffix(".partial")
        partial.write_text(f'{header.removesuffix("}")}, "tensors": [\n{tensors}\n]}}\n', encoding="utf-8")
        partial.replace(path)

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._values.close()


_as_json = functools.lru_cache(maxsize=65_536)(json.dumps)
"""Names and kinds recur in every step."""
_AS_THEY_ARE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""Floating types whose values are written as they are; of others, as those of 8 bits, float32."""


def _encoded_sketch(values: Tensor, piece: TensorPiece) -> str:
    if not values.is_floating_point():
        return ""
    return base64.b64encode(sketch_of(values, piece.index, piece.shape).tobytes()).decode()


def _decoded_sketch(text: str) -> tuple[float, ...]:
    return tuple(np.frombuffer(base64.b64decode(text)).tolist())


def _write_values(file: BinaryIO, values: Tensor) -> None:
    """Write the values of a tensor one after the other."""
    is_wide = values.is_floating_point() and values.dtype not in _AS_THEY_ARE
    exact = values.float() if is_wide else values
    on_cpu = exact.cpu().contiguous()
    file.write(octets_of(on_cpu).data)


def _read_values(path: Path, entry: Entry) -> np.ndarray[Any, Any] | None:
    """Return the values of a tensor: float64, or integers as they are; None if the file ends within them."""
    # numpy has no bfloat16: its 16 bits are the first half of a float32's
    stored = {"bfloat16": "uint16"}.get(entry.dtype, "float32" if entry.dtype.startswith("float8") else entry.dtype)
    dtype = np.dtype(stored)
    count = int(np.prod(entry.shape, dtype=np.int64))
    with path.open("rb") as file:
        file.seek(entry.offset)
        read = np.fromfile(file, dtype, count)
    if len(read) != count:
        return None
    if entry.dtype == "bfloat16":
        read = (read.astype(np.uint32) << 16).view(np.float32)
    exact = read.astype(np.float64) if read.dtype.kind == "f" else read
    return exact.reshape(entry.shape)


class RankRecording:
    """A rank's recording, read from disk; values are read when they are asked for."""

    def __init__(self, folder: Path, rank: int, header: Mapping[str, Any]) -> None:
        self.folder = folder
        self.rank = rank
        self.axes: dict[str, tuple[int, int]] = {name: (index, size) for name, (index, size) in header["axes"].items()}
        self.entries = list(_read_entries(header["tensors"]))

    def values(self, entry: Entry) -> np.ndarray[Any, Any]:
        """Return the values of a tensor: float64, or integers as they are."""
        path = self.folder / _VALUES.format(self.rank)
        values = _read_values(path, entry)
        if values is None:
            raise RecordingError(f"{path} ends within {entry.key}; record rank {self.rank} again")
        return values


def _read_entries(rows: list[list[Any]]) -> Iterator[Entry]:
    for step, name, kind, call, dtype, shape, piece, digest, sketch, offset, again in rows:
        key = Key(step, name, kind)
        tensor_piece = TensorPiece.from_json(piece)
        yield Entry(key, call, dtype, tuple(shape), tensor_piece, digest, _decoded_sketch(sketch), offset, again)


@dataclass(frozen=True)
class RankTensor:
    """A tensor as a rank has it."""

    rank: RankRecording
    entry: Entry

    def values(self) -> np.ndarray[Any, Any]:
        return self.rank.values(self.entry)


class Recording:
    """The recordings of all ranks of a run: the pieces of each tensor, by its key, in the order of their recording."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.ranks = _read_ranks(self.folder)
        self.tensors: dict[Key, list[RankTensor]] = {}
        self.again: dict[Key, list[RankTensor]] = {}
        for rank in self.ranks:
            for entry in rank.entries:
                chosen = self.again if entry.again else self.tensors
                chosen.setdefault(entry.key, []).append(RankTensor(rank, entry))

    @property
    def axis_sizes(self) -> dict[str, int]:
        """Return the number of ranks along each axis."""
        sizes = dict[str, int]()
        for rank in self.ranks:
            sizes |= {name: size for name, (_, size) in rank.axes.items()}
        return sizes


def _read_ranks(folder: Path) -> list[RankRecording]:
    """Read the lists of all ranks. Raises RecordingError if one is missing or damaged."""
    paths = sorted(folder.glob("rank-*.json"))
    if not paths:
        raise RecordingError(f"{folder} has no recording; expected files rank-00000.json … as record() writes them")
    headers = dict[int, Mapping[str, Any]]()
    for path in paths:
        try:
            header = json.loads(path.read_text(encoding="utf-8"))
            headers[int(header["rank"])] = header
        except (ValueError, KeyError, TypeError) as error:
            raise RecordingError(f"{path} is damaged ({error}); record this rank again") from error
        if header.get("format") != FORMAT:
            raise RecordingError(f"{path} has format {header.get('format')}; expected {FORMAT}, so record it again")
    size = max(int(header["size"]) for header in headers.values())
    missing = sorted(set(range(size)) - set(headers))
    if missing:
        listed = ", ".join(map(str, missing[:8]))
        plural = "s" * (len(missing) > 1)
        raise RecordingError(
            f"{folder} has no recording of rank{plural} {listed} of {size}; a recording is complete when record() has "
            "ended on every rank"
        )
    return [RankRecording(folder, rank, headers[rank]) for rank in sorted(headers)]
