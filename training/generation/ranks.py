"""A key-value cache on several ranks: some have other texts, or other layers; tensor-parallel ones have some logits.

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
        self.config = cache.decoder.config
        self.world = world
        self.rows = world.joint_axis("replicate", "shard")
        self.device = cache.device
        self.dtype = next(cache.decoder.parameters()).dtype

    def begin(self, padding: Tensor, capacity: int) -> None:
        self.texts = torch.arange(len(padding), device=padding.device)
        self.count = len(padding)
        self.cache.begin(self._own(padding), capacity)

    def keep(self, texts: Tensor) -> None:
        self.texts = self.texts[texts]

    def logits(self, ids: Tensor, count: int = 1) -> Tensor:
        """Add `ids` (B, Q) to the texts that are kept; return the logits (B, count, V) after each of the last."""
        every = ids.new_zeros(self.count, ids.shape[1])
        every[self.texts] = ids
        logits = self._through_stages(self._own(every), count)
        if self.rows.size > 1:
            logits = gather_rows(logits, self.rows)
        return logits[self.texts]

    def agree(self, tokens: Tensor) -> Tensor:
        """Return the tokens that rank 0 drew: logits of several ranks may differ in their last bits."""
        shared = tokens.to(self.device)
        dist.broadcast(shared, 0)
        return shared.cpu()

    def _own(self, x: Tensor) -> Tensor:
        """Return this rank's part of the rows of `x`, to which zeros are added that let them divide evenly."""
        missing = -len(x) % self.rows.size
        padded = torch.cat((x, x.new_zeros(missing, *x.shape[1:])))
        return padded.chunk(self.rows.size)[self.rows.rank]

    def _through_stages(self, ids: Tensor, count: int) -> Tensor:
        """Return logits (B, count, V) of this rank's texts: pipeline stages wait for features of the one before."""
        axis = self.world.axis("pp")
        if axis.size == 1:
            return self._all_logits(self.cache.logits(ids, count))
        x = ids
        if axis.rank > 0:
            x = torch.empty(*ids.shape, self.config.width, dtype=self.dtype, device=self.device)
            dist.recv(x, group=axis.group, group_src=axis.rank - 1)
        x = self.cache.logits(x, count)
        if axis.rank < axis.size - 1:
            dist.send(x.contiguous(), group=axis.group, group_dst=axis.rank + 1)
            logits = torch.empty(len(ids), count, self.config.vocab_size, dtype=self.dtype, device=self.device)
        else:
            logits = self._all_logits(x).contiguous()
        dist.broadcast(logits, group=axis.group, group_src=axis.size - 1)
        return logits

    def _all_logits(self, logits: Tensor) -> Tensor:
        """All-gather this rank's logits (B, count, V / n) to (B, count, V)."""
        axis = self.world.axis("tp")
        if axis.size == 1:
            return logits
        _, step = shard_range(self.config.vocab_size, axis.size, 0)
        gathered = gather_rows(F.pad(logits, (0, step - logits.shape[-1])), axis)
        joined = gathered.unflatten(0, (axis.size, -1)).movedim(0, 2).flatten(2)
        return joined[..., : self.config.vocab_size]
