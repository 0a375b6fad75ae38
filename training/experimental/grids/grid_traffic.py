"""Grid traffic: what 2D and 2.5D tensor parallelism communicates, by the formulas of its papers.

For X of n x h and W of h x h' on q x q ranks a product, or one of its two gradients, is q collectives of X's block and
q of W's; (q - 1) / q of their elements come from, or go to, other ranks: (q - 1) (n h + h h') / q^2 (Xu et al. 2021,
table 1). In 2.5D n is the tokens of one layer of the grid (Wang et al. 2021).
"""

from collections import Counter
from dataclasses import dataclass, field, replace

from training.model.model_config import ModelConfig

INT64 = 8


@dataclass(frozen=True)
class GridSizes:
    """A model on one rank of a grid: `side` q, `row` i and `column` j; `tokens` of a micro-batch that its row has."""

    model: ModelConfig
    side: int
    row: int
    column: int
    tokens: int
    itemsize: int
    """Bytes of an element of activations and weights."""
    wide: int
    """Bytes of a statistic."""
    sequences: int = 0
    """Of a micro-batch that its row has."""


@dataclass(frozen=True)
class Passes:
    """How often something is computed."""

    forward: int
    backward: int
    begun: int
    """Backward passes: one for the gradients of inputs and one for those of weights are two."""


@dataclass
class ModuleTraffic:
    """Calls and bytes by axis and operation."""

    sizes: GridSizes
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    bytes: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, axis: str, operation: str, calls: int, size: int) -> None:
        """Add so many calls, of `size` bytes together."""
        self.calls[axis, operation] += calls
        self.bytes[axis, operation] += size

    def norms(self, count: int, forward: int, backward: int) -> None:
        """Norms of the stream: one statistic a token, of LayerNorm two; backward as many, at once."""
        each = 1 if self.sizes.model.norm == "rms" else 2
        numbers = count * each * (forward + backward) * self.sizes.tokens
        self.add("column", "all-reduce", count * (each * forward + backward), numbers * self.sizes.wide)


class GridTraffic(ModuleTraffic):
    """Calls and bytes by axis and operation, of a rank of a grid."""

    def blocks(self, passes: Passes) -> None:
        """Transformer layers."""
        model, forward, backward = self.sizes.model, passes.forward, passes.backward
        width, queries, keys = model.width, model.q_width, 2 * model.kv_width
        for inputs, outputs in (
            (width, queries + keys),
            (queries, width),
            (width, model.ffn_width * (2 if model.is_gated else 1)),
            (model.ffn_width, width),
        ):
            self.product(inputs, outputs // self.sizes.side, forward, backward)
        self.norms(2, forward, backward)

    def learned_queries(self, seq_len: int, forward: int, backward: int, recomputed: int) -> None:
        """What a query layer, counted as any other, has besides: a product for its queries, one for each position.

        Its first norm is that of the decoder's end, and is repeated with it.
        """
        own = GridTraffic(replace(self.sizes, tokens=seq_len), self.calls, self.bytes)
        own.product(self.sizes.model.width, 0, forward + recomputed, backward)
        self.norms(1, recomputed, 0)

    def product(self, inputs: int, outputs: int, forward: int, backward: int) -> None:
        """A product with weights of `inputs` and this column's `outputs`, so many times, and its two gradients."""
        sizes, q = self.sizes, self.sizes.side
        x = sizes.tokens * (inputs // q) * sizes.itemsize
        w = inputs // q * outputs * sizes.itemsize
        times = q * (forward + backward)
        self.add("column", "broadcast", times, times * x)
        self.add("row", "broadcast", times, times * w)
        self.add("column", "reduce", q * backward, q * backward * x)
        self.add("row", "reduce", q * backward, q * backward * w)

    def embedding(self, times: int) -> None:
        """The embedding and its gradient: the tokens' ids, then features between ranks of a row, and transposed."""
        sizes, q = self.sizes, self.sizes.side
        features = times * sizes.tokens * (sizes.model.width // q) * sizes.itemsize
        self.add("row", "all-gather", times, times * q * sizes.tokens * INT64)
        self.add("column", "reduce-scatter", times, q * features)
        self.add("column", "all-gather", times, q * features)
        if sizes.row != sizes.column:
            self.add("tp", "send", 2 * times, 2 * features)
            self.add("tp", "receive", 2 * times, 2 * features)

    def output(self, passes: Passes) -> None:
        """The output matrix, and three numbers a token of the loss in two calls."""
        sizes, times = self.sizes, passes.backward
        self.product(sizes.model.width, vocabulary_part(sizes.model, sizes.side, sizes.column), times, times)
        self.add("column", "all-reduce", 2 * times, 3 * times * sizes.tokens * sizes.wide)


def vocabulary_part(model: ModelConfig, side: int, index: int) -> int:
    """Ids of a grid's column, or of a cube's row; the last one may have fewer."""
    part = -(-model.vocab_size // side)
    return min(part, model.vocab_size - index * part)
