"""Plain decoders of GPT-NeoX, BLOOM, OPT, GLM-130B, CodeGeeX and DeepSeek: what they have in place of others' parts.

As their papers write them, like decoder.py: the certificate's independent reference.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gristmill_parity.plain.decoder import PlainDecoder, PlainSizes


@dataclass(frozen=True)
class PlainParts:
    """Options of a variant that follow neither from the weights' shapes nor from PlainSizes."""

    residual: str
    """How sublayers and norms are put together: pre-norm, parallel or deepnorm."""
    activation: str
    alibi: bool
    rotated: int
    """Features of a head that are rotated, the first ones."""
    position_offset: int


class PlainVariant(PlainDecoder):
    """A decoder of `parts`; it has a norm after the embedding, or a query layer, where `weights` has theirs."""

    def __init__(self, weights: Mapping[str, Tensor], sizes: PlainSizes, parts: PlainParts) -> None:
        super().__init__(weights, sizes)
        self.parts = parts

    def logits(self, ids: Tensor, sample_ids: Tensor | None = None) -> Tensor:
        w = self.weights
        x = w["embed.tokens.weight"][ids]
        if "embed.positions.weight" in w:  # of OPT two rows are before that of the first position
            x = x + w["embed.positions.weight"][self.parts.position_offset :][: ids.shape[1]]
        if "embed.embed_norm.weight" in w:  # BigScience 2022, BLOOM, section 3.2.2
            x = self._norm("embed.embed_norm", x)
        for i in range(self.sizes.layers):
            x = self._block(f"blocks.{i}", x, sample_ids)
        if "norm.weight" in w:
            x = self._norm("norm", x)
        return x @ w.get("head.weight", w["embed.tokens.weight"]).T

    def _block(self, block: str, x: Tensor, sample_ids: Tensor | None) -> Tensor:
        if f"{block}.input_norm.weight" in self.weights:  # the norm at the end of all layers but the query layer
            x = self._norm(f"{block}.input_norm", x)
        first = self._norm(f"{block}.attention_norm", x)
        mixed = self._attention(block, first, sample_ids)
        if self.parts.residual == "parallel":  # Black et al. 2022, GPT-NeoX, section 2.1.2
            return x + mixed + self._mlp(f"{block}.mlp", self._norm(f"{block}.mlp_norm", x))
        if self.parts.residual == "deepnorm":  # Zeng et al. 2022, GLM-130B, section 2.1
            alpha = math.sqrt(2 * self.sizes.layers)
            second = self._norm(f"{block}.mlp_norm", alpha * first + mixed)
            return alpha * second + self._mlp(f"{block}.mlp", second)
        x = x + mixed
        return x + self._mlp(f"{block}.mlp", self._norm(f"{block}.mlp_norm", x))

    def _queries(self, name: str, x: Tensor) -> Tensor:
        """Return CodeGeeX's top queries, from an embedding of the position (Zheng et al. 2023, section 2.1)."""
        learned = self.weights.get(f"{name}.query.weight")
        if learned is not None:
            x = learned[: x.shape[1]].expand(len(x), -1, -1)
        return super()._queries(name, x)

    def _bias(self, distance: Tensor) -> Tensor:
        """Return ALiBi: minus a head's slope times the distance (Press et al. 2022, figure 3), (H, T, T)."""
        if not self.parts.alibi:
            return super()._bias(distance)
        slopes = torch.tensor(_slopes(self.sizes.heads), dtype=self.weights["embed.tokens.weight"].dtype)
        return -slopes[:, None, None] * distance

    def _rotate(self, x: Tensor) -> Tensor:
        rotated = super()._rotate(x[..., : self.parts.rotated])
        return torch.cat([rotated, x[..., self.parts.rotated :]], -1)

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        up = self._linear(f"{name}.up", x)
        kind = self.parts.activation
        if kind == "geglu":  # Shazeer 2020, equation 5
            return self._linear(f"{name}.down", _gelu(self._linear(f"{name}.gate", x)) * up)
        if kind == "gelu":
            return super()._mlp(name, x)
        activations = {"relu": up.clamp(min=0), "gelu-exact": _gelu(up), "gelu-fast": up / (1 + (-1.702 * up).exp())}
        return self._linear(f"{name}.down", activations[kind])


def _gelu(x: Tensor) -> Tensor:
    """Return x Φ(x) (Hendrycks & Gimpel 2016, section 2)."""
    return x / 2 * (1 + torch.erf(x / math.sqrt(2)))


def _slopes(heads: int) -> list[float]:
    """Return ALiBi's slope of each head; past a power of two, every other one of the next power's."""
    if heads & (heads - 1) == 0:
        return [0.5 ** (8 * head / heads) for head in range(1, heads + 1)]
    power = 2 ** int(math.log2(heads))
    every_other = _slopes(2 * power)[::2]
    return _slopes(power) + every_other[: heads - power]


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
        how = self.latent
        heads = self.sizes.heads
        if f"{name}.q_a.weight" in self.weights:
            compressed_q = self._norm(f"{name}.q_a_norm", self._linear(f"{name}.q_a", x), EPS)
            q = self._linear(f"{name}.q_b", compressed_q)
        else:
            q = self._linear(f"{name}.q", x)
        q = q.unflatten(-1, (heads, -1))
        both = self._linear(f"{name}.kv_a", x)
        compressed_kv = self._norm(f"{name}.kv_a_norm", both[..., : -how.rotated], EPS)
        shared = both[..., -how.rotated :]
        kv = self._linear(f"{name}.kv_b", compressed_kv).unflatten(-1, (heads, -1))
        k = kv[..., : -how.value]
        v = kv[..., -how.value :]
        rotated = self._rotate(shared[:, :, None])
        q = torch.cat([q[..., : -how.rotated], self._rotate(q[..., -how.rotated :])], -1)
        k = torch.cat([k, torch.cat([rotated] * heads, 2)], -1)
        scale = (0.1 * how.mscale * math.log(self.sizes.factor) + 1) ** 2
        return q * scale, k, v
