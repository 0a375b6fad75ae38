"""Plain latent attention: what DeepSeek-V2 and V3 have in place of Llama's; the certificate's independent reference."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gristmill_parity.plain.decoder import PlainDecoder, PlainSizes

EPS = 1e-6  # of the norms of compressed vectors, in the published code


@dataclass(frozen=True)
class PlainLatentSizes:
    """Features of a head, and the factor m of YaRN's scores."""

    rotated: int
    """Of a query, and of the key that all heads share."""
    value: int
    mscale: float


class PlainLatentDecoder(PlainDecoder):
    """A decoder with multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V3, equations 1 to 11)."""

    def __init__(self, weights: Mapping[str, Tensor], sizes: PlainSizes, latent: PlainLatentSizes) -> None:
        super().__init__(weights, sizes)
        self.latent = latent

    def _heads(self, name: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        how, heads = self.latent, self.sizes.heads
        if f"{name}.q_a.weight" in self.weights:
            q = self._linear(f"{name}.q_b", self._norm(f"{name}.q_a_norm", self._linear(f"{name}.q_a", x), EPS))
        else:
            q = self._linear(f"{name}.q", x)
        q = q.unflatten(-1, (heads, -1))
        both = self._linear(f"{name}.kv_a", x)
        c, shared = both[..., : -how.rotated], both[..., -how.rotated :]
        kv = self._linear(f"{name}.kv_b", self._norm(f"{name}.kv_a_norm", c, EPS)).unflatten(-1, (heads, -1))
        k, v = kv[..., : -how.value], kv[..., -how.value :]
        rotated = self._rotate(shared[:, :, None])
        q = torch.cat([q[..., : -how.rotated], self._rotate(q[..., -how.rotated :])], -1)
        k = torch.cat([k, torch.cat([rotated] * heads, 2)], -1)
        return q * (0.1 * how.mscale * math.log(self.sizes.factor) + 1) ** 2, k, v
