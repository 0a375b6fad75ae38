"""Memory of training: paper-level formulas of the bytes on a rank, by kind, for any layout.

They are for people, and for the search, which leaves out what does not fit: states (weights, masters, moments) are
within 2 % of live bytes, peaks within 9 % (docs/concepts/training-memory.md); exact bytes are those of a dry run
of the real code. P is the number of parameters of a rank before ZeRO shards them over n ranks, e the bytes of an
element in the compute dtype, N the tokens of a micro-batch on a rank, t the parts into which tensor parallelism divides
features.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import mul
from typing import ClassVar, Literal

from gristmill_planner.block_memory import BlockFeatures, block_features, mlp_features
from gristmill_planner.pipeline_simulator import most_in_flight
from gristmill_planner.planned_run import PlannedRun, layer_kinds
from training.experimental.parallel_config import ParallelConfig
from training.kernels.element_bytes import ACCUMULATION_BYTES, COMPUTE_BYTES
from training.memory.memory_config import Recompute
from training.model.model_config import ModelConfig
from training.optim.optim_config import part_of
from training.optim.optimizer_kinds import find_optimizer
from training.parallel.parameter_shapes import ParameterShape
from training.parallel.traffic import rank_parameters

BUCKET_BYTES = 25 << 20  # of gradient sums in a bucket
LOGIT_CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 1 << 30}  # of the logits at a time
TensorGrid = Literal["1d", "2d", "2.5d", "3d"]


@dataclass(frozen=True)
class HeldParameters:
    """Numbers of parameters on a rank, before ZeRO shards them."""

    total: int
    """P."""
    experts: int
    """Those of P that have replicas of their own."""
    matrices: int
    """Those of blocks' matrices, which Muon updates."""
    block: int
    """Those of the largest unit of a block that ZeRO-3 gathers at once."""
    end: int
    """Those of the embedding, or of the last norm and the output matrix, whichever is larger."""
    largest: int
    """Those of the largest parameter."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of each kind on pipeline rank `rank`, each at its own peak within a step, and `peak`, of all at once.

    What dropout keeps is not counted.
    """

    run: PlannedRun
    rank: int

    KINDS: ClassVar = ("weights", "master", "moments", "gradients", "gathered", "activations", "logits")

    @cached_property
    def peak(self) -> int:
        """Return the bytes of all kinds and of operations' working memory, at the fullest moment of a step.

        That is in the loss, where all activations are there; in the first block of a backward pass, with what is
        computed again; in its last block, with the gradients of the others; or when it ends, with all gradients.
        Sums of earlier micro-batches' gradients are there all along.
        """
        layout = self.run.layout
        summed = 0
        if layout.micro_batches > 1 and not self._runs_forward_first:
            summed = self._summed
        if layout.zero == 2 and layout.pp > 1:  # a pipeline waits for the last ones in its next backward pass
            summed += self._buckets
        largest_stage = max(map(self._stage, self._stages))
        others = max(0, self._kept - largest_stage)  # a backward pass frees all of one
        in_mlp = max(mlp_features(self.run.model, sparse) for sparse, _ in self._kinds_here) // self.run.parts
        in_block = self._bytes(in_mlp, 0)
        last_block = max(self._block("none", *kind) for kind in self._kinds_here) + self._hidden + in_block
        earlier = self.gradients - self._wide * (self._held.block + self._held.end) // layout.shards
        of_output = 0 if self.run.precision == "bf16" else self._e * self._of_output  # there a sum, as of the logits
        in_loss = self._kept + self.logits + summed + of_output + self._waiting
        in_first_block = self.activations + in_block + max(summed, self._wide * self._of_output) + self._waiting
        in_last_block = others + last_block + max(summed, earlier)
        at_end = others + self.gradients
        return self.states + self.gathered + max(in_loss, in_first_block, in_last_block, at_end)

    # states

    @cached_property
    def states(self) -> int:
        """Return the bytes of weights, masters and moments."""
        return self.weights + self.master + self.moments

    @cached_property
    def weights(self) -> int:
        """Return the bytes of modules' parameters: e P; in ZeRO-3 none outlives its use (Rajbhandari et al. 2020)."""
        return 0 if self.run.layout.zero == 3 else self._e * self._held.total

    @cached_property
    def master(self) -> int:
        """Return the bytes of master weights: 4 P / n in 16 bits, and under ZeRO-3; elsewhere 0: weights are masters.

        (Micikevicius et al. 2018, section 3.1; Rajbhandari et al. 2020, section 3.1.)
        """
        is_weights = self.run.layout.zero < 3 and self._e == self._wide
        return 0 if is_weights else self._wide * self._own(self._held.total)

    @cached_property
    def moments(self) -> int:
        """Return the bytes of AdamW's two moments, 8 P / n; Muon's momentum, 4 P / n of matrices; an average, 4 P / n.

        Of local steps also what replicas share, weights and outer momentum: 8 P / n (Douillard et al. 2023).
        """
        held = self._held
        states = self.run.states
        on_gpu = self.run.cluster.device.is_gpu
        is_here = states.moments == "device" or (states.moments == "cpu" and not on_gpu)
        kind = find_optimizer(states.name)
        of_matrices = kind.matrix_states * held.matrices
        is_kept = is_here or not kind.can_offload
        kept = is_kept * (of_matrices + kind.other_states * (held.total - held.matrices))
        others = held.total * (states.ema + 2 * (self.run.layout.local_steps > 0))
        of_expert = is_kept * kind.matrix_states + states.ema
        return self._wide * self._own(kept + others, of_expert)

    # gradients, and parameters that ranks gather from each other

    @cached_property
    def gradients(self) -> int:
        """Return peak gradient bytes (Rajbhandari et al. 2020, section 5.2): accumulated plus in flight.

        4 P where they are all-reduced (ZeRO-0), and in ZeRO-1 with micro-batches, with the largest one on its way, if
        it does not stay where it is computed; 4 P / n and three buckets on their way in ZeRO-1 and 2; in ZeRO-3 4 P /
        n, a unit's gradients and the copy that is sent. A 2.5D grid sums a copy of all. The loss computes the output
        matrix's gradient in the forward pass: each micro-batch that awaits its backward pass has one.
        """
        layout = self.run.layout
        held = self._held
        wide = self._wide
        if layout.zero == 3:
            return self._summed + (self._e + wide) * max(held.block, held.end) + self._waiting
        summed = self._summed * (2 if layout.tensor == "2.5d" else 1)
        if layout.shards > 1:
            return min(summed + self._buckets, wide * held.total) + self._waiting
        is_alone = layout.replicas == layout.micro_batches == 1
        stays = self._e == wide and is_alone and not self.run.model.tied
        on_its_way = 0 if stays else self._e * held.largest
        return summed + max(self._waiting, on_its_way)

    @cached_property
    def _of_output(self) -> int:
        """Return the elements of the output matrix's gradient, which the loss computes."""
        if not self._has_loss or self.run.layout.on_grid:
            return 0
        return self._vocabulary * self.run.model.width

    @cached_property
    def _waiting(self) -> int:
        """Return the bytes of output gradients of a pipeline's micro-batches that await backward passes, but one."""
        if not self._of_output or self.run.layout.pp == 1:
            return 0
        last_stage = len(self._stages) - 1
        waiting = max(numbers[last_stage] for numbers in self._in_flight)
        return self._e * self._of_output * (waiting - 1)

    @cached_property
    def _summed(self) -> int:
        """Return the bytes of gradient sums between micro-batches: of whole parameters, or of the rank's own rows."""
        if self.run.layout.zero == 1 and self.run.layout.micro_batches > 1:
            return self._wide * self._held.total
        return self._wide * self._own(self._held.total)

    @cached_property
    def _buckets(self) -> int:
        """Return the bytes of buckets of gradient sums; three at a time: one is filled while two are reduced."""
        bucket = max(BUCKET_BYTES, self._wide * self._held.largest)
        return min(3 * bucket, self._wide * self._held.total)

    @cached_property
    def gathered(self) -> int:
        """Return ZeRO-3's bytes of the unit at work, what was received of it, and the next one (Zhao et al. 2023).

        In a pipeline all units stay, with what the last one was received in.
        """
        held = self._held
        layout = self.run.layout
        if layout.zero < 3:
            return 0  # ZeRO-1 and 2 gather bucket by bucket, where less is there than at the peak
        unit = max(held.block, held.end)
        elements = held.total + unit if layout.pp > 1 else 2 * unit + held.block
        return self._e * elements

    # activations and logits

    @cached_property
    def activations(self) -> int:
        """Return the bytes kept for backward passes at their peak, and those of a block that is recomputed.

        By then the gradient of the block's output is in the place of that output and of the loss's gradient.
        """
        again = 0
        for kind in self._kinds_here:
            features = self._features(self.run.recompute, *kind)
            again = max(again, self._bytes(features.again, features.again_wide))
        if not again:
            return self._kept
        again += -self._hidden if self._has_loss else self._hidden
        return self._kept + max(0, again)

    @cached_property
    def _kept(self) -> int:
        """Return the bytes that micro-batches in flight keep for their backward passes, at their peak.

        Where backward is split (Qi et al. 2023), a micro-batch keeps all until the pass for weights, and the gradients
        from which those follow. In a pipeline torch receives each micro-batch of a step in a buffer of its own.
        """
        stages = self._stages
        layout = self.run.layout
        kept = [self._stage(stage) for stage in stages]
        split = [self.run.layers[stage] * self._split_gradients for stage in stages]
        peak = max(sum(map(mul, numbers, (*kept, *split))) for numbers in self._in_flight)
        buffers = 0  # for what neighbours on other ranks send
        for stage in stages:
            for neighbour in (stage - 1, stage + 1):
                if 0 <= neighbour < layout.stages and neighbour not in stages:
                    buffers += 1
        return peak + layout.micro_batches * buffers * self._hidden

    def _stage(self, stage: int) -> int:
        """Return the bytes that one micro-batch keeps in a stage: its blocks, tables of positions, and its end.

        The first block's input is in the buffer in which it was received; the end is the stage's output, or the last
        norm's input and the loss's gradient of its output.
        """
        model = self.run.model
        layout = self.run.layout
        e = self._e
        parts = self.run.parts
        size = self._blocks(stage, self.run.recompute) + self._hidden * (stage == 0)
        if stage == layout.stages - 1:
            features_of_end = model.width // parts + self._vocabulary if layout.on_grid else model.width
            size += e * self._tokens * features_of_end
        if model.positions == "alibi" and layout.cp == 1:  # the bias of each pair of tokens, of all blocks
            size += e * self.run.seq_len**2 * model.heads // parts
        return size

    def _blocks(self, stage: int, recompute: Recompute) -> int:
        """Return the bytes that a stage's blocks keep of a micro-batch."""
        return sum(count * self._block(recompute, *kind) for kind, count in self._kinds[stage].items())

    @cached_property
    def _kinds(self) -> tuple[Counter[tuple[bool, bool]], ...]:
        """Count the layers of each stage by whether they are sparse and have a window."""
        return layer_kinds(self.run.model, self.run.layers)

    @cached_property
    def _kinds_here(self) -> set[tuple[bool, bool]]:
        """Return the kinds of layers of this rank."""
        kinds = set[tuple[bool, bool]]()
        for stage in self._stages:
            kinds.update(self._kinds[stage])
        return kinds

    def _block(self, recompute: Recompute, sparse: bool, windowed: bool) -> int:
        """Return the bytes that a block keeps of a micro-batch from its forward pass to its backward pass."""
        features = self._features(recompute, sparse, windowed)
        return self._bytes(features.kept, features.wide)

    def _features(self, recompute: Recompute, sparse: bool, windowed: bool) -> BlockFeatures:
        """Return the features a token of a block of a kind."""
        model = self.run.model
        layout = self.run.layout
        in_ring = layout.cp > 1 and layout.context == "ring"
        copies_windows = not (model.sinks or in_ring)
        by_windows = windowed and (model.window or 0) < self.run.seq_len and copies_windows
        divided = (layout.sequence_parallel, layout.on_grid)
        features = block_features(model, self.run.parts, divided, by_windows, recompute, sparse)
        if layout.context == "ulysses" and recompute == "none":  # outputs, before and after the exchange
            return features._replace(kept=features.kept + model.q_width // self.run.parts)
        return features

    def _bytes(self, features: int, wide: int) -> int:
        """Return a micro-batch's bytes of so many features a token, in the compute dtype and in float32."""
        return self._tokens * (features * self._e + wide * self._wide)

    @cached_property
    def _split_gradients(self) -> int:
        """Return a block's bytes between its split backward passes: gradients of its products' and norms' outputs."""
        model = self.run.model
        divided = (False, self.run.layout.on_grid)
        features = block_features(model, self.run.parts, divided, False, "selective", model.experts > 0)
        return self._bytes(features.kept, 0)

    @cached_property
    def _in_flight(self) -> tuple[tuple[int, ...], ...]:
        """Return the micro-batches in flight at every moment that may be the fullest.

        By stage of the rank, those whose activations it keeps; then those between the parts of a split backward pass.
        """
        layout = self.run.layout
        pp = layout.pp
        if pp == 1:
            return ((1, 0),)
        count = layout.micro_batches
        if not self._runs_forward_first and count > 4 * pp and count % pp == 0:
            count = 4 * pp  # all rounds are alike
        return most_in_flight(pp, layout.schedule, layout.virtual_stages, count, self.rank)

    @property
    def _runs_forward_first(self) -> bool:
        pipeline = self.run.layout.pipeline
        return pipeline is not None and pipeline.runs_forward_first

    @cached_property
    def logits(self) -> int:
        """Return the loss's working memory, on the last stage's rank: a chunk of tokens at a time, never all logits.

        In float32 logits and log-probabilities; in 16 bits also a float32 copy, and in bf16 the float32 sum of the
        output matrix's gradient. On a GPU with the whole vocabulary logits and their gradient. On a grid all logits.
        """
        if not self._has_loss:
            return 0
        e = self._e
        wide = self._wide
        vocabulary = self._vocabulary
        on_gpu = self.run.cluster.device.is_gpu
        if self.run.layout.on_grid:
            bytes_a_logit = wide if e == wide else e + 2 * wide
            return self._tokens * vocabulary * bytes_a_logit
        chunk_bytes = LOGIT_CHUNK_BYTES["cuda" if on_gpu else "cpu"]
        tokens = min(self._tokens, chunk_bytes // (vocabulary * wide) or 1)
        is_fused = on_gpu and self.run.parts == 1
        bytes_a_logit = 2 * e if is_fused else 2 * wide + e * (e < wide)
        summed = wide * vocabulary * self.run.model.width if self.run.precision == "bf16" else 0
        return tokens * vocabulary * bytes_a_logit + summed

    # sizes

    @cached_property
    def _e(self) -> int:
        return COMPUTE_BYTES[self.run.precision]

    @cached_property
    def _wide(self) -> int:
        """Return the bytes of an element of masters, moments, gradient sums, statistics and the loss."""
        return ACCUMULATION_BYTES[self.run.precision]

    @cached_property
    def _tokens(self) -> int:
        """Return N, the tokens of a micro-batch on this rank."""
        layout = self.run.layout
        return self.run.micro_batch // layout.batch_shards * (self.run.seq_len // layout.cp)

    @cached_property
    def _hidden(self) -> int:
        """Return the bytes of a micro-batch's residual stream: sequence parallelism and grids divide them by t."""
        layout = self.run.layout
        parts = self.run.parts if layout.sequence_parallel or layout.on_grid else 1
        return self._tokens * self.run.model.width // parts * self._e

    def _own(self, numel: int, each: int = 1) -> int:
        """Return how many of `numel` elements this rank updates; `each`: elements for each of experts' parameters."""
        _, within, _ = self.run.layout.expert_mesh_shape
        experts = each * self._held.experts
        return (numel - experts) // self.run.layout.shards + experts // within

    @cached_property
    def _dense_and_sparse(self) -> tuple[int, int]:
        """Return how many dense and how many sparse layers the rank has."""
        dense = 0
        sparse = 0
        for stage in self._stages:
            for (is_sparse, _), count in self._kinds[stage].items():
                if is_sparse:
                    sparse += count
                else:
                    dense += count
        return dense, sparse

    @property
    def _vocabulary(self) -> int:
        """Return how many ids the rank has that has most of them."""
        return -(-self.run.model.vocab_size // self.run.parts)

    @cached_property
    def _stages(self) -> list[int]:
        return self.run.held[self.rank]

    @property
    def _has_loss(self) -> bool:
        return self.run.layout.stages - 1 in self._stages

    @cached_property
    def _held(self) -> HeldParameters:
        layout = self.run.layout
        ends = (0 in self._stages, self._has_loss)
        grid = layout.tp, layout.tensor, layout.depth, layout.ep
        return _held_parameters(self.run.model, grid, self._dense_and_sparse, ends, layout.stages == 1)


_UNDIVIDED = ParallelConfig(dp=1, zero_group=1, virtual_stages=1, micro_batches=1)


@lru_cache(4096)
def _held_parameters(
    model: ModelConfig, grid: tuple[int, TensorGrid, int, int], layers: tuple[int, int], ends_here: tuple[bool, bool],
    one_stage: bool,
) -> HeldParameters:  # fmt: skip
    """Return the parameters of dense and sparse `layers` and ends; `grid`: tensor-parallel ranks, kind, depth, and ep.

    `one_stage`: it has both ends, where a tied matrix is one.
    """
    tp, tensor, depth, ep = grid
    divided = replace(_UNDIVIDED, tp=tp, tensor=tensor, depth=depth, ep=ep)
    tied = model.tied and one_stage
    first = list[ParameterShape]()
    blocks = list[ParameterShape]()
    for is_sparse, count in enumerate(layers):
        alike = [layer for layer in range(model.layers) if model.is_sparse(layer) == is_sparse]
        if alike:
            first = rank_parameters(replace(model, tied=tied), divided, range(alike[0], alike[0] + 1), 0)
            blocks += count * [p for p in first if p.unit not in ("embed", "head")]
    ends = list[ParameterShape]()
    sizes_of_ends = list[int]()
    for name, is_here in zip(("embed", "head"), ends_here, strict=True):
        if is_here:
            end = [p for p in first if p.unit == name]
            ends += end
            sizes_of_ends.append(_numel(end))
    sizes_of_units = Counter[str]()
    for p in set(blocks):
        sizes_of_units[p.unit] += p.numel
    matrices = [p for p in blocks if part_of(p.name, p.shape) == "hidden"]
    experts = [p for p in blocks if p.of_experts]
    return HeldParameters(
        total=_numel(blocks) + sum(sizes_of_ends),
        experts=_numel(experts),
        matrices=_numel(matrices),
        block=max(sizes_of_units.values()),
        end=max(sizes_of_ends, default=0),
        largest=max(p.numel for p in [*blocks, *ends]),
    )


def _numel(parameters: Sequence[ParameterShape]) -> int:
    return sum(p.numel for p in parameters)
