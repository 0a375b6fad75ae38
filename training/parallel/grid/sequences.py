"""Sequences on a grid: each row of each layer computes with its own part of a replica's batch."""

import torch.nn.functional as F
from torch import Tensor

from training.distributed.collectives import gather_rows
from training.model.batch import Batch
from training.sharding.axis import JointAxis


def own_batch(batch: Batch, rows: JointAxis) -> Batch:
    """The part of a batch of this one of the `rows`, which divide it evenly; without a grid all of it."""
    if rows.size == 1:
        return batch
    assert len(batch.ids) % rows.size == 0, f"{len(batch.ids)} sequences on {rows.size} rows"
    return batch.chunk(rows.size)[rows.rank]


def own_sequences(x: Tensor, rows: JointAxis) -> Tensor:
    """The part of sequences (B, T) of this one of the rows, after zeros are added that let them divide evenly."""
    if rows.size == 1:
        return x
    return F.pad(x, (0, 0, 0, -len(x) % rows.size)).chunk(rows.size)[rows.rank]


def all_sequences(parts: Tensor, rows: JointAxis) -> Tensor:
    """The parts of all rows: (B / n, T) to (B, T)."""
    return parts if rows.size == 1 else gather_rows(parts, rows)
