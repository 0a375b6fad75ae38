"""Tensors of Hugging Face models: which of our parameters each holds, and where in it they lie.

Export and import use the same tables: our parameters are pieces of the Hugging Face (HF) tensors.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from gristmill.errors import UsageError
from training.hugging_face.family import ModelFamily, TensorLayout, TensorRow
from training.model.decoder import meta_decoder
from training.model.model_config import ModelConfig
from training.sharding.shard_spec import ShardSpec

Pieces = list[tuple[Tensor, ShardSpec]]  # views that together are a parameter, and where they lie in it


@dataclass(frozen=True)
class HFTensor:
    """A Hugging Face tensor: holds one or more of our parameters, each of `part_shape`, or an expert's part of one."""

    name: str
    parameters: tuple[str, ...]
    part_shape: tuple[int, ...]
    layout: TensorLayout
    heads: int
    expert: tuple[int, int] | None = None
    """Number of the expert, and of how many; `part_shape` is that of its matrix."""
    rotated: int = 0
    """Rows that are rotated, the last ones of each head, where the layout says so."""

    @property
    def shape(self) -> tuple[int, ...]:
        if self.layout == "conv1d" and len(self.part_shape) == 2:
            outputs, inputs = self.part_shape
            return inputs, outputs * len(self.parameters)
        if self.layout == "experts":
            outputs = self.part_shape[1] * len(self.parameters)
            return self.part_shape[0], *self.part_shape[2:], outputs
        return self.part_shape[0] * max(1, len(self.parameters)), *self.part_shape[1:]

    def stored_as(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in files of weights of `dtype`: at least float32 for a buffer, whose changes are small."""
        if self.layout == "buffer":
            return torch.promote_types(dtype, torch.float32)
        return dtype

    def pieces(self, tensor: Tensor) -> dict[str, Pieces]:
        """Return each of our parameters as views of the tensor (of `shape`): writing to a view writes to the tensor."""
        if self.expert is not None:
            number, count = self.expert
            spec = ShardSpec.whole((count, *self.part_shape)).shard(0, count, number)
            return {self.parameters[0]: [(tensor[None], spec)]}
        if not self.parameters:
            return {}
        if self.layout == "experts":
            outputs = tensor.mT if tensor.ndim == 3 else tensor
            whole = ShardSpec.whole(self.part_shape)
            count = len(self.parameters)
            return {name: [(outputs[:, i::count], whole)] for i, name in enumerate(self.parameters)}
        if self.rotated:
            return {self.parameters[0]: list(self._neighbours(tensor))}
        if self.layout == "per head":
            return {name: self._heads(tensor, i) for i, name in enumerate(self.parameters)}
        dim = tensor.ndim - 1 if self.layout == "conv1d" else 0
        whole = ShardSpec.whole(self.part_shape)
        pieces: dict[str, Pieces] = {}
        for name, part in zip(self.parameters, tensor.chunk(len(self.parameters), dim), strict=True):
            is_transposed = self.layout == "conv1d" and tensor.ndim == 2
            pieces[name] = [(part.T if is_transposed else part, whole)]
        return pieces

    def _heads(self, tensor: Tensor, index: int) -> Pieces:
        """Return the rows of each head of parameter `index`: several views, as other parameters lie between them."""
        rows = tensor.unflatten(0, (self.heads, len(self.parameters), -1))
        whole = ShardSpec.whole(self.part_shape)
        return [(rows[head, index], whole.shard(0, self.heads, head)) for head in range(self.heads)]

    def _neighbours(self, tensor: Tensor) -> Iterator[tuple[Tensor, ShardSpec]]:
        """Yield each head's rows: as they are, then of the rotated ones the first of each pair, then the second."""
        heads = self.heads if self.layout == "rotated heads" else 1
        size = self.part_shape[0] // heads
        plain = size - self.rotated
        others = self.part_shape[1:]
        for head, rows in enumerate(tensor.unflatten(0, (heads, size))):
            start = head * size
            for part in (rows[:plain], rows[plain::2], rows[plain + 1 :: 2]):
                if len(part):
                    offset = (start, *[0] * len(others))
                    yield part, ShardSpec(self.part_shape, offset, (len(part), *others))
                start += len(part)


def pieces_by_parameter(tensors: Iterable[tuple[HFTensor, Tensor]]) -> dict[str, Pieces]:
    """Return each of our parameters as views of the tensors that hold parts of it."""
    by_name: dict[str, Pieces] = {}
    for tensor, values in tensors:
        for name, pieces in tensor.pieces(values).items():
            by_name.setdefault(name, []).extend(pieces)
    return by_name


def parameters_of(tensors: Iterable[tuple[HFTensor, Tensor]]) -> dict[str, Tensor]:
    """Return our parameters by name: copies where they are several pieces."""
    parameters = dict[str, Tensor]()
    for name, pieces in pieces_by_parameter(tensors).items():
        views = [view for view, _ in pieces]
        parameters[name] = views[0] if len(views) == 1 else torch.cat(views)
    return parameters


def hf_tensors(family: ModelFamily, model: ModelConfig) -> list[HFTensor]:
    """List the HF tensors of a model, in the table's order. Raises UsageError for a parameter that it lacks."""
    decoder = meta_decoder(model)
    shapes = {name: tuple(x.shape) for name, x in (*decoder.named_parameters(), *decoder.named_buffers())}
    tensors = list[HFTensor]()
    unmapped = set(shapes)
    for row in family.tensors:
        for tensor in _expand_row(row, model, shapes):
            tensors.append(tensor)
            unmapped.difference_update(tensor.parameters)
    if unmapped:
        raise UsageError(f"{family.architecture} has no place for {', '.join(sorted(unmapped))}")
    return tensors


def _expand_row(row: TensorRow, model: ModelConfig, shapes: dict[str, tuple[int, ...]]) -> Iterable[HFTensor]:
    """Expand a row of the table to every layer's weight and bias, or tensor; a buffer that the model lacks is zeros."""
    rotated = model.qk_rope_head_dim if row.layout.startswith("rotated") else 0
    for layer in range(model.layers if "{}" in row.theirs else 1):
        if row.layout == "buffer":
            name = row.ours.format(layer)
            held = (name,) if name in shapes else ()
            shape = shapes.get(name, (model.experts,))
            if model.is_sparse(layer):
                yield HFTensor(row.theirs.format(layer), held, shape, row.layout, model.heads)
            continue
        for kind in (".weight", ".bias", ""):
            names = tuple(f"{name.format(layer)}{kind}" for name in row.ours.split())
            if names[0] in shapes and row.theirs.count("{}") > 1:
                experts, *matrix = shapes[names[0]]
                for expert in range(experts):
                    theirs = f"{row.theirs.format(layer, expert)}{kind}"
                    yield HFTensor(theirs, names, tuple(matrix), row.layout, model.heads, (expert, experts))
            elif names[0] in shapes:
                end = kind
                if row.layout == "experts":
                    end = {".weight": "", ".bias": "_bias"}[kind]
                theirs = f"{row.theirs.format(layer)}{end}"
                yield HFTensor(theirs, names, shapes[names[0]], row.layout, model.heads, rotated=rotated)
