"""Plain token data: what each step of a run reads from token shards, and what its evaluation reads.

It imports nothing of the trainer: files are read with numpy, and the order of the data is computed as the documentation
of training/data says it, one sequence at a time, with Python's integers.
"""

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]

IGNORED = -100  # of a target: it adds nothing to the loss
_INDEX_HEADER = struct.Struct("<9sQBQQ")  # Megatron's: magic, version, dtype, sequences, documents
_TURNS = 12  # of the permutation
_WORD = 1 << 64


@dataclass(frozen=True)
class PlainBatch:
    """Sequences of T tokens (B, T): `ids`, `targets`, the positions of tokens in their documents, and what names each
    sequence in the run, (B,)."""

    ids: Integers
    targets: Integers
    positions: Integers
    sample_ids: Integers


class PlainTokens:
    """All tokens of a folder of token shards, and sequences of them: the i-th begins at token i T."""

    def __init__(self, folder: Path, length: int, masks_documents: bool) -> None:
        """`masks_documents`: the first token of each document is no target."""
        self.length = length
        manifest = json.loads((folder / "manifest.json").read_text())
        tokens = []
        starts = []
        read = 0
        for shard in manifest["shards"]:
            ids = np.fromfile(folder / f"{shard['name']}.bin", manifest["dtype"])
            index = (folder / f"{shard['name']}.idx").read_bytes()
            documents = _INDEX_HEADER.unpack_from(index)[3]
            lengths = np.frombuffer(index, np.int32, documents, _INDEX_HEADER.size)
            starts.append(read + np.cumsum(lengths) - lengths)
            tokens.append(ids.astype(np.int64))
            read += len(ids)
        self.tokens = np.concatenate(tokens)
        self.is_first = np.zeros(read, bool)
        self.is_first[np.concatenate(starts)] = True
        self.masks_documents = masks_documents

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def sequence(self, number: int) -> tuple[Integers, Integers, Integers]:
        """Return ids, targets and positions of a sequence, (T,) each."""
        first = number * self.length
        last = first + self.length
        ids = self.tokens[first:last]
        targets = self.tokens[first + 1 : last + 1].copy()
        if self.masks_documents:
            targets[self.is_first[first + 1 : last + 1]] = IGNORED
        positions = np.zeros(self.length, np.int64)
        for position in range(1, self.length):
            if not self.is_first[first + position]:
                positions[position] = positions[position - 1] + 1
        return ids, targets, positions


def unigram_loss(
    sets: Sequence[PlainTokens], weights: Sequence[float], holdout: PlainTokens, sequences: int, vocabulary: int
) -> float:
    """Return the mean loss of the first `sequences` of a holdout under a unigram model of the sets.

    Of several sets each counts by its weight. One is added to each count.
    """
    counts_of_sets = [np.bincount(tokens.tokens, minlength=vocabulary) for tokens in sets]
    total = sum(int(counts.sum()) for counts in counts_of_sets)
    mixed = np.ones(vocabulary)
    for counts, weight in zip(counts_of_sets, weights, strict=True):
        mixed += counts / counts.sum() * total * weight / sum(weights)
    targets = np.concatenate([holdout.sequence(number)[1] for number in range(sequences)])
    losses = -np.log(mixed / mixed.sum())
    return float(losses[targets[targets != IGNORED]].mean())


def evaluation_batch(tokens: PlainTokens, sequences: int) -> PlainBatch:
    """Return the first sequences of a holdout."""
    rows = [tokens.sequence(number) for number in range(sequences)]
    return _batch(rows, [0] * sequences)


class PlainOrder:
    """The sequences that each step of a run reads, of one data set, or of several by their weights.

    `batch_size` is that of the last step; a `ramp` of smaller ones, each until so many tokens are read, comes before.
    """

    def __init__(
        self,
        sets: Sequence[PlainTokens],
        weights: Sequence[float],
        seed: int,
        batch_size: int,
        ramp: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.sets = sets
        self.weights = [Fraction(str(weight)) for weight in weights]
        self.seed = seed
        self.batch_size = batch_size
        self.ramp = ramp

    def batches(self, steps: int) -> Iterator[PlainBatch]:
        """Yield the global batches of the first `steps` steps."""
        key = _key(f"{self.seed}/sequences")
        read = 0
        place = 0
        for _ in range(steps):
            size = self._size(read)
            if len(self.sets) == 1:
                epoch = len(self.sets[0])
                if place % epoch + size > epoch:  # the rest of an epoch is left out
                    place = (place // epoch + 1) * epoch
            rows = [self._sequence(place + number) for number in range(size)]
            names = [_signed(read + number + key) for number in range(size)]
            yield _batch(rows, names)
            read += size
            place += size

    def _size(self, read: int) -> int:
        """Return the number of sequences of the step after `read` of them."""
        for size, tokens in self.ramp:
            if read < math.ceil(tokens / self.sets[0].length):
                return size
        return self.batch_size

    def _sequence(self, number_in_mix: int) -> tuple[Integers, Integers, Integers]:
        """Return the sequence at a place of the order."""
        number = 0
        name = ""
        if len(self.sets) > 1:
            before = self._counts(number_in_mix)
            after = self._counts(number_in_mix + 1)
            while after[number] == before[number]:  # the set whose count grows has the sequence
                number += 1
            number_in_mix = before[number]
            name = f"{number}/"
        tokens = self.sets[number]
        epoch, position = divmod(number_in_mix, len(tokens))
        return tokens.sequence(permuted(position, len(tokens), _key(f"{self.seed}/order/{name}{epoch}")))

    def _counts(self, number_in_mix: int) -> list[int]:
        """Count the sequences of each set among the first `number_in_mix`: its share of what sets before it leave."""
        counts = []
        rest = number_in_mix
        for number, weight in enumerate(self.weights):
            share = weight / sum(self.weights[number:])
            counts.append(math.floor(rest * share + Fraction(1, 2)))
            rest -= counts[-1]
        return counts


def permuted(index: int, size: int, key: int) -> int:
    """Return where a keyed permutation of 0 … size - 1 sends `index`: a Feistel network on a grid that is about square.

    Row and column are rotated in turns by a hash of the other, 12 times; what falls outside is sent on.
    """
    rows = math.isqrt(max(size - 1, 0)) + 1
    columns = -(-size // rows)
    while True:
        row, column = divmod(index, columns)
        for turn in range(_TURNS):
            counter = turn << 32
            if turn % 2:
                column = (column + _splitmix64(row + counter, key) % columns) % columns
            else:
                row = (row + _splitmix64(column + counter, key) % rows) % rows
        index = row * columns + column
        if index < size:
            return index


def _batch(rows: Sequence[tuple[Integers, Integers, Integers]], names: Sequence[int]) -> PlainBatch:
    ids, targets, positions = zip(*rows, strict=True)
    return PlainBatch(np.stack(ids), np.stack(targets), np.stack(positions), np.array(names, np.int64))


def _key(name: str) -> int:
    """Return the 64 bits by which a name's random numbers are drawn, as a signed integer."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def _splitmix64(counter: int, key: int) -> int:
    """Return output `counter` of SplitMix64 (Steele et al. 2014, figure 11), as a signed integer."""
    z = (counter * 0x9E3779B97F4A7C15 + key) % _WORD
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % _WORD
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % _WORD
    return _signed(z ^ (z >> 31))


def _signed(value: int) -> int:
    """Return the integer that 64 bits are in two's complement."""
    value %= _WORD
    return value - _WORD if value >> 63 else value
