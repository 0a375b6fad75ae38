"""Plain decoder: Llama and GPT-2 as their papers write them, in one file; the certificate's independent reference.

It imports nothing of the trainer, and of torch only elementary operations: no fused attention, norm, loss or dropout.
Shapes: B sequences, T tokens, D features, H heads of E = D / H features, V = vocabulary size.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gristmill_parity.plain.experts import PlainExperts, gated

UInt64s = npt.NDArray[np.uint64]

IGNORED = -100  # a target with this id adds nothing to the loss


@dataclass(frozen=True)
class PlainSizes:
    """Sizes that do not follow from weights' shapes; `rope_base` is 0 for a GPT-2, which learns its positions."""

    layers: int
    heads: int
    kv_heads: int
    norm_eps: float
    rope_base: float
    dropout: float
    scaling: str = "none"
    """Scaling of rotary frequencies: none, linear, llama3 or yarn."""
    factor: float = 1.0
    original_context: int = 0
    turns: tuple[float, float] = (0.0, 0.0)
    """Frequencies that turn less often than the first in the original context are divided by the factor; those that
    turn more often than the second stay."""
    attention_factor: float = 1.0
    window: int = 0
    """Tokens that a token attends to; 0: all before it."""
    full_every: int = 0
    """Every so many-th layer has no window."""
    truncate: bool = True
    """The ends of YaRN's ramp are whole pairs."""
    clamped: bool = False
    """gpt-oss's SwiGLU."""


class PlainDecoder:
    """A Llama (Touvron et al. 2023, section 2.2) or a GPT-2 (Radford et al. 2019, section 2.3).

    `weights` by the trainer's names, such as "blocks.0.attention.q.weight" (outputs, inputs), all of one dtype. Without
    "head.weight" the output matrix is the embedding's.
    """

    experts: PlainExperts | None = None
    """The experts of sparse layers."""

    def __init__(self, weights: Mapping[str, Tensor], sizes: PlainSizes) -> None:
        self.weights = weights
        self.sizes = sizes

    def loss(self, ids: Tensor, targets: Tensor, sample_ids: Tensor | None = None) -> Tensor:
        """Return the cross-entropy in nats, summed over all targets but IGNORED; `ids` and `targets` (B, T) int64.

        `sample_ids` (B,): the sequences' numbers, on which dropout depends; None: no dropout.
        """
        logits = self.logits(ids, sample_ids)
        valid = targets != IGNORED
        chosen = logits.gather(-1, targets.where(valid, 0)[..., None])[..., 0]
        return ((logits.logsumexp(-1) - chosen) * valid).sum()

    def logits(self, ids: Tensor, sample_ids: Tensor | None = None) -> Tensor:
        """Return the logits (B, T, V) of each next token."""
        w = self.weights
        sizes = self.sizes
        x = w["embed.tokens.weight"][ids]
        if not sizes.rope_base:
            x = x + w["embed.positions.weight"][: ids.shape[1]]
        x = self._drop("embed", x, sample_ids)
        for layer in range(sizes.layers):
            block = f"blocks.{layer}"
            x = x + self._attention(block, self._norm(f"{block}.attention_norm", x), sample_ids)
            hidden = self._mlp(f"{block}.mlp", self._norm(f"{block}.mlp_norm", x))
            x = x + self._drop(f"{block}.mlp.out", hidden, sample_ids)
        return self._norm("norm", x) @ w.get("head.weight", w["embed.tokens.weight"]).T

    def _attention(self, block: str, x: Tensor, sample_ids: Tensor | None) -> Tensor:
        """Return causal attention: softmax(q k / sqrt(E)) v per head (Vaswani et al. 2017, equation 1), (B, T, D).

        Query heads in consecutive groups share a key and a value head (Ainslie et al. 2023, section 2.2).
        """
        name = f"{block}.attention"
        sizes = self.sizes
        q, k, v = self._heads(name, x)
        group = [head * k.shape[2] // sizes.heads for head in range(sizes.heads)]
        scores = torch.einsum("bihe,bjhe->bhij", q, k[:, :, group]) / math.sqrt(q.shape[-1])
        position = torch.arange(x.shape[1])
        distance = position[:, None] - position
        scores = scores + self._bias(distance)
        scores = scores.masked_fill(distance < 0, -math.inf)  # a token sees none after it
        window = self._window(int(block.split(".")[1]))
        if window:
            scores = scores.masked_fill(distance >= window, -math.inf)
        largest = scores.amax(-1, keepdim=True)
        exponentials = (scores - largest).exp()
        total = exponentials.sum(-1, keepdim=True)
        if f"{name}.sinks" in self.weights:  # gpt-oss: one more score, of a key without a value
            total = total + (self.weights[f"{name}.sinks"][:, None, None] - largest).exp()
        shares = self._drop(name, exponentials / total, sample_ids)
        mixed = torch.einsum("bhij,bjhe->bihe", shares, v[:, :, group]).flatten(2)
        return self._drop(f"{name}.out", self._linear(f"{name}.o", mixed), sample_ids)

    def _window(self, layer: int) -> int:
        """Return the number of tokens that a token of a layer attends to; 0: all before it."""
        full_every = self.sizes.full_every
        if full_every and (layer + 1) % full_every == 0:
            return 0
        return self.sizes.window

    def _heads(self, name: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of each head, (B, T, heads, E), with the positions of rotary ones."""
        sizes = self.sizes
        q = self._queries(name, x)
        k = self._linear(f"{name}.k", x)
        v = self._linear(f"{name}.v", x)
        norms = self.weights.get(f"{name}.q_norm.weight")
        joint = norms is not None and len(norms) == q.shape[-1]  # OLMoE has one of all heads together
        if joint:
            q = self._norm(f"{name}.q_norm", q)
            k = self._norm(f"{name}.k_norm", k)
        q = q.unflatten(-1, (sizes.heads, -1))
        k = k.unflatten(-1, (sizes.kv_heads, -1))
        v = v.unflatten(-1, (sizes.kv_heads, -1))
        if norms is not None and not joint:
            q = self._norm(f"{name}.q_norm", q)
            k = self._norm(f"{name}.k_norm", k)
        if sizes.rope_base:
            q = self._rotate(q)
            k = self._rotate(k)
        return q, k, v

    def _queries(self, name: str, x: Tensor) -> Tensor:
        """Return the queries of all heads, (B, T, H E)."""
        return self._linear(f"{name}.q", x)

    def _bias(self, distance: Tensor) -> Tensor:
        """Return the bias of the score of a query and a key by their distance, (T, T)."""
        return torch.zeros_like(distance)

    def _rotate(self, x: Tensor) -> Tensor:
        """Rotate `x` (B, T, H, E) by positions (Su et al. 2021, equation 34), with features i and i + E/2 as a pair."""
        half = x.shape[-1] // 2
        frequencies = torch.tensor([self._frequency(i, half) for i in range(half)], dtype=x.dtype)
        angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None, None] * frequencies
        first = x[..., :half]
        second = x[..., half:]
        cos = angles.cos() * self.sizes.attention_factor
        sin = angles.sin() * self.sizes.attention_factor
        return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)

    def _frequency(self, pair: int, pairs: int) -> float:
        """Return the angle from one position to the next of a pair of features, scaled as the model's options say.

        Linear: Chen et al. 2023, equation 4. llama3: as Meta's published code has it. yarn: Peng et al. 2023, sections
        3.2 and 3.3.
        """
        sizes = self.sizes
        frequency = sizes.rope_base ** (-pair / pairs)
        if sizes.scaling == "none":
            return frequency
        kept = 0.0
        if sizes.scaling == "llama3":
            turns = sizes.original_context / (2 * math.pi / frequency)
            kept = min(1.0, max(0.0, (turns - sizes.turns[0]) / (sizes.turns[1] - sizes.turns[0])))
        if sizes.scaling == "yarn":
            kept = self._kept_by_yarn(pair, pairs)
        return kept * frequency + (1 - kept) * frequency / sizes.factor

    def _kept_by_yarn(self, pair: int, pairs: int) -> float:
        """Return the share of a pair's frequency that YaRN does not scale: 1 before a ramp over pairs, 0 after it."""
        last = self._pair_that_turns(self.sizes.turns[0], pairs)
        first = self._pair_that_turns(self.sizes.turns[1], pairs)
        if self.sizes.truncate:
            first = math.floor(first)
            last = math.ceil(last)
        start = max(first, 0)
        stop = min(last, 2 * pairs - 1)
        length = stop - start if stop != start else 0.001
        return 1 - min(1.0, max(0.0, (pair - start) / length))

    def _pair_that_turns(self, turns: float, pairs: int) -> float:
        """Return the number of the pair that turns so often in the original context, as a fraction."""
        sizes = self.sizes
        return pairs * math.log(sizes.original_context / (2 * math.pi * turns), sizes.rope_base)

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        """SwiGLU (Shazeer 2020, equation 6), or GELU's tanh approximation (Hendrycks & Gimpel 2016, section 2).

        Of a sparse layer the chosen experts' outputs and the shared experts'.
        """
        if self.experts is not None and f"{name}.router.weight" in self.weights:
            outputs = self.experts.outputs(name, x)
            shared = f"{name}.shared"
            if f"{shared}.up.weight" in self.weights:
                outputs = outputs + self._mlp(shared, x)
            return outputs
        up = self._linear(f"{name}.up", x)
        if f"{name}.gate.weight" in self.weights:
            gate = self._linear(f"{name}.gate", x)
            return self._linear(f"{name}.down", gated(gate, up, self.sizes.clamped))
        inner = math.sqrt(2 / math.pi) * (up + 0.044715 * up**3)
        return self._linear(f"{name}.down", up / 2 * (1 + inner.tanh()))

    def _norm(self, name: str, x: Tensor, eps: float = 0.0) -> Tensor:
        """LayerNorm (Ba et al. 2016, equation 4) where there is a bias, else RMSNorm (Zhang & Sennrich 2019)."""
        bias = self.weights.get(f"{name}.bias")
        if bias is not None:
            x = x - x.mean(-1, keepdim=True)
        mean_square = x.square().mean(-1, keepdim=True)
        y = x / (mean_square + (eps or self.sizes.norm_eps)).sqrt() * self.weights[f"{name}.weight"]
        return y if bias is None else y + bias

    def _linear(self, name: str, x: Tensor) -> Tensor:
        y = x @ self.weights[f"{name}.weight"].T
        bias = self.weights.get(f"{name}.bias")
        return y if bias is None else y + bias

    def _drop(self, name: str, x: Tensor, sample_ids: Tensor | None) -> Tensor:
        """Dropout (Srivastava et al. 2014); element i of sequence s of a layer is a function of (name, s, i)."""
        p = self.sizes.dropout
        if sample_ids is None or not p:
            return x
        key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
        elements = np.arange(1, x[0].numel() + 1, dtype=np.uint64)
        keys = splitmix64(sample_ids.numpy().astype(np.uint64), np.uint64(key))
        draws = splitmix64(elements, keys[:, None]) >> np.uint64(11)
        kept = torch.from_numpy(draws >= np.uint64(p * 2**53)).view(x.shape)
        return x * kept / (1 - p)


def splitmix64(counter: UInt64s, seed: UInt64s | np.uint64) -> UInt64s:
    """Return output number `counter` of SplitMix64 (Steele et al. 2014, figure 11), modulo 2^64."""
    z = counter * np.uint64(0x9E3779B97F4A7C15) + seed
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
