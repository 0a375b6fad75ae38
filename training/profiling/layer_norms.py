"""LayerNorms: 2-norms of each layer's gradients, weights and updates, over all ranks that hold shards of it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from training.parallel.mesh import World
from training.sharding.sharded_parameter import ShardedParameter


def layer_of(name: str) -> str:
    """The layer of a parameter: its block, or the module outside the blocks.

    >>> layer_of("blocks.3.mlp.up.weight"), layer_of("embed.tokens.weight")
    ('blocks.3', 'embed')
    """
    words = name.split(".")
    return ".".join(words[: 2 if words[0] == "blocks" else 1])


class LayerNorms:
    """Norms of the layers of a model; `names` are those of all its parameters, on every rank the same."""

    def __init__(self, names: Sequence[str], params: Sequence[ShardedParameter], world: World) -> None:
        self.layers = list(dict.fromkeys(map(layer_of, names)))
        self.params, self.world = [p for p in params if p.is_primary and p.local.numel()], world
        self.norms: dict[str, dict[str, float]] = {}

    @contextmanager
    def update(self, loss_scale: float) -> Iterator[None]:
        """Context of an update: afterwards `norms` has those of "grad", before clipping, "weight" and "update".

        It needs the memory of a copy of this rank's weights.
        """
        squares = [self._squares([p.local.grad for p in self.params]) / loss_scale**2]
        before = [p.local.detach().clone() for p in self.params]
        yield
        squares.append(self._squares([p.local.detach() for p in self.params]))
        changes = [p.local.detach() - old for p, old in zip(self.params, before, strict=True)]
        squares.append(self._squares(changes))
        norms = self.world.all_reduce(torch.stack(squares)).sqrt().tolist()
        kinds = ("grad", "weight", "update")
        self.norms = {kind: dict(zip(self.layers, of, strict=True)) for kind, of in zip(kinds, norms, strict=True)}

    def _squares(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """This rank's part of each layer's squared norm: (layers,) float64."""
        found = torch.zeros(len(self.layers), dtype=torch.float64, device=self.world.device)
        for param, tensor in zip(self.params, tensors, strict=True):
            if tensor is not None:
                rows = torch.linalg.vector_norm(tensor, dim=-1)
                found[self.layers.index(layer_of(param.name))] += rows.double().square().sum().to(found.device)
        return found
