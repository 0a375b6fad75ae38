"""Cube traffic: what 3D tensor parallelism communicates, by the paper's formulas.

For X of n x h and W of h x h' on l x l x l ranks a product gathers X's block and W's, and reduce-scatters Y's: of each
gathered tensor (l - 1) / l comes from other ranks, (l - 1) (n h + h h' + n h') / l^3 in all (Bian et al. 2021).
"""

from training.experimental.grids.grid_traffic import INT64, ModuleTraffic, Passes, vocabulary_part


class CubeTraffic(ModuleTraffic):
    """Calls and bytes by axis and operation, of a rank of a cube; its sizes are those of its layer's grid."""

    def blocks(self, passes: Passes) -> None:
        """Transformer layers; attention exchanges the ids of sequences, if dropout needs them."""
        model, side = self.sizes.model, self.sizes.side
        width, queries, hidden = model.width, model.q_width, model.ffn_width
        self.turn("column", "row", width, (queries + 2 * model.kv_width) // side, passes)
        self.turn("row", "column", queries, width // side, passes)
        self.turn("column", "row", width, hidden * (2 if model.is_gated else 1) // side, passes)
        self.turn("row", "column", hidden, width // side, passes)
        self.norms(2, passes.forward, passes.backward)
        if model.dropout:
            self.exchange(passes.forward, self.sizes.sequences * INT64)

    def turn(self, into: str, out: str, inputs: int, outputs: int, passes: Passes) -> None:
        """A product of features of axis `into`, `inputs` of all, to `outputs` of this rank along axis `out`."""
        sizes, side, forward, backward = self.sizes, self.sizes.side, passes.forward, passes.backward
        x = sizes.tokens * inputs * sizes.itemsize  # gathered
        w = inputs // side * outputs * sizes.itemsize
        y = sizes.tokens * side * outputs * sizes.itemsize
        self.add(out, "all-gather", forward + backward, (forward + backward) * x)
        self.add("depth", "all-gather", forward + backward, (forward + backward) * w)
        self.add(into, "reduce-scatter", forward, forward * y)
        self.add(into, "all-gather", passes.begun, passes.begun * y)
        self.add(out, "reduce-scatter", backward, backward * x)
        self.add("depth", "reduce-scatter", backward, backward * w)

    def embedding(self, times: int) -> None:
        """The tokens' ids and the matrix's features are gathered, and what is looked up summed; and the gradients."""
        sizes = self.sizes
        features = times * sizes.tokens * sizes.model.width * sizes.itemsize
        matrix = times * self._ids * (sizes.model.width // sizes.side) * sizes.itemsize
        self.add("row", "all-gather", 2 * times, times * sizes.side * sizes.tokens * INT64 + features)
        self.add("row", "reduce-scatter", times, features)
        self.add("depth", "all-gather", times, matrix)
        self.add("depth", "reduce-scatter", times, matrix)

    def output(self, passes: Passes) -> None:
        """The output matrix and the loss, whose targets are those of other sequences."""
        sizes, times = self.sizes, passes.backward
        self.turn("column", "row", sizes.model.width, self._ids, passes)
        self.add("row", "all-reduce", 2 * times, 3 * times * sizes.tokens * sizes.wide)
        self.exchange(times, sizes.tokens * INT64)

    def exchange(self, times: int, size: int) -> None:
        """A tensor of `size` bytes for that of the rank that is this one with row and column exchanged."""
        if self.sizes.row != self.sizes.column:
            self.add("tp", "send", times, times * size)
            self.add("tp", "receive", times, times * size)

    @property
    def _ids(self) -> int:
        return vocabulary_part(self.sizes.model, self.sizes.side, self.sizes.row)
