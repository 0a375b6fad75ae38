"""A key-value cache on several ranks: data-parallel ones have some of the texts each, tensor-parallel ones some logits.

Every rank passes the same tokens and gets the same logits. Ranks that have other experts send each other tokens in
every layer, so all compute as many steps as the longest text takes: a text that has ended is computed on, unseen.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from training.distributed.collectives import gather_rows
from training.generation.cache import KeyValueCache
from training.parallel.mesh import World
from training.sharding.shard_spec import shard_range


class RankedCache:
    """Has the methods of KeyValueCache that the loop calls; every rank calls them."""

    def __init__(self, cache: KeyValueCache, world: World) -> None:
        self.cache = cache
        self.vocab_size = cache.decoder.config.vocab_size
        self.world = world
        self.rows = world.joint_axis("replicate", "shard")
        self.device = cache.device

    def begin(self, padding: Tensor, capacity: int) -> None:
        self.texts = torch.arange(len(padding), device=padding.device)
        self.count = len(padding)
        self.cache.begin(self._own(padding), capacity)

    def keep(self, texts: Tensor) -> None:
        self.texts = self.texts[texts]

    def next_logits(self, ids: Tensor) -> Tensor:
        """Logits (B, V) of the token that follows each text that is kept, to which `ids` (B, Q) are added."""
        every = ids.new_zeros(self.count, ids.shape[1])
        every[self.texts] = ids
        logits = self._all_logits(self.cache.next_logits(self._own(every)))
        if self.rows.size > 1:
            logits = gather_rows(logits, self.rows)
        return logits[self.texts]

    def agree(self, tokens: Tensor) -> Tensor:
        """The tokens that rank 0 drew: logits of several ranks may differ in their last bits."""
        shared = tokens.to(self.device)
        dist.broadcast(shared, 0)
        return shared.cpu()

    def _own(self, x: Tensor) -> Tensor:
        """This rank's part of the rows of `x`, to which zeros are added that let them divide evenly."""
        missing = -len(x) % self.rows.size
        padded = torch.cat((x, x.new_zeros(missing, *x.shape[1:])))
        return padded.chunk(self.rows.size)[self.rows.rank]

    def _all_logits(self, logits: Tensor) -> Tensor:
        """All-gather this rank's logits (B, V / n) to (B, V)."""
        axis = self.world.axis("tp")
        if axis.size == 1:
            return logits
        _, step = shard_range(self.vocab_size, axis.size, 0)
        gathered = gather_rows(F.pad(logits, (0, step - logits.shape[1])), axis)
        return gathered.unflatten(0, (axis.size, -1)).transpose(0, 1).flatten(1)[:, : self.vocab_size]
