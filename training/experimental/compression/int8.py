"""8-bit sums: replicas send 8-bit codes of their gradients, in blocks with a scale each, and sum them in full.

Block-wise codes: Dettmers et al. 2021 (arXiv 2110.02861, section 2.1), here with equal steps; 8 bits between replicas:
Dettmers 2015 (arXiv 1511.04561). Sent as 1-bit Adam does (Tang et al. 2021, arXiv 2102.02888, section 5.2): an
all-to-all gives each of N replicas all codes of its chunk, 1 / N of the numbers; it sums them, encodes the sum, and an
all-gather gives every replica all sums.

1-bit Adam keeps a second memory for what the codes of the sums leave out. Here the replica that sums a chunk adds it to
its own memory: it is sent with the next gradient, too, and there is one memory to save and to divide.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from training.distributed.collectives import all_gather, wait
from training.sharding.axis import Axis

BLOCK = 256  # numbers that share a scale: 1.6 % more bytes
LARGEST = 127  # code of the largest number of a block, of either sign


def encode(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes (…, BLOCK) int8 and scales (…, 1) float32 of `blocks` (…, BLOCK), each off by half a scale at most.

    Not finite numbers of a block make its scale so, and all that is decoded from it.
    """
    scales = (blocks.abs().amax(-1, keepdim=True) / LARGEST).float()
    steps = (blocks / torch.where(scales == 0, 1.0, scales)).round().clamp(-LARGEST, LARGEST)
    return steps.to(torch.int8), scales


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers that codes and scales stand for."""
    return codes.to(dtype) * scales.to(dtype)


def pack(codes: Tensor, scales: Tensor) -> Tensor:
    """Make one message of each chunk: (N, K, BLOCK) and (N, K, 1) to (N, K BLOCK + 4 K) bytes."""
    return torch.cat([codes.flatten(1).view(torch.uint8), scales.flatten(1).view(torch.uint8)], 1)


def unpack(message: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of `pack`."""
    blocks = message.shape[1] // (BLOCK + 4)
    codes, scales = message.split([blocks * BLOCK, blocks * 4], 1)
    return codes.view(torch.int8).unflatten(1, (blocks, BLOCK)), scales.contiguous().view(torch.float32)[..., None]


class Int8Sum:
    """One reduction of `flat` (L,) over the replicas, in two halves: begun here, then `finish`.

    `exact` (k,) is summed as it is, in a message of its own.
    """

    def __init__(self, flat: Tensor, exact: Tensor, replicate: Axis) -> None:
        self.flat = flat
        self.exact = exact
        self.replicate = replicate
        n = replicate.size
        blocks = -(-len(flat) // (n * BLOCK))  # of a chunk
        padded = torch.nn.functional.pad(flat, (0, n * blocks * BLOCK - len(flat)))
        self._left = padded.view(n, blocks, BLOCK)
        self._works = []
        if len(flat):
            codes, scales = encode(self._left)
            self._left = self._left - decode(codes, scales, flat.dtype)
            self._sent = pack(codes, scales)
            self._received = torch.empty_like(self._sent)
            work = dist.all_to_all_single(self._received, self._sent, group=replicate.group, async_op=True)
            self._works.append(work)
        if len(exact):
            self._works.append(dist.all_reduce(exact, group=replicate.group, async_op=True))

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return the sum of `flat` and the exact sum. Leaves in `flat` what this replica has left out."""
        for work in self._works:
            wait(work, self.replicate.group)
        if not len(self.flat):
            return self.flat, self.exact
        dtype = self.flat.dtype
        mine = decode(*unpack(self._received), dtype).sum(0)
        codes, scales = encode(mine)
        self._left[self.replicate.rank] += mine - decode(codes, scales, dtype)
        message = pack(codes[None], scales[None])[0]
        gathered = message.new_empty(self.replicate.size * len(message))
        all_gather(gathered, message, group=self.replicate.group)
        mean = decode(*unpack(gathered.view(self.replicate.size, -1)), dtype)
        self.flat.copy_(self._left.flatten()[: len(self.flat)])
        return mean.flatten()[: len(self.flat)], self.exact
