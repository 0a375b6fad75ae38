"""Traffic theory: the collectives and bytes of a training step of any layout, by the papers' formulas.

It uses nothing of the code that it predicts, but what the options say: sizes, the stages' layers, the order of passes.
"""

from collections.abc import Sequence

from training.parallel.compression.traffic import compressed_traffic
from training.parallel.context.traffic import ContextSizes, context_traffic
from training.parallel.grid.cube_traffic import CubeTraffic, summed_parameters
from training.parallel.grid.traffic import GridTraffic, Passes
from training.parallel.parameter_shapes import ParameterShape, pack_buckets
from training.parallel.traffic_inputs import Traffic, TrafficInputs, Volume


def expected_traffic(inputs: TrafficInputs) -> Traffic:
    """Return this rank's traffic of one step, from the forward pass to the updated parameters."""
    on_grid = inputs.layout.tensor != "1d"
    parts = [
        _grid(inputs) if on_grid else _tensor_parallel(inputs),
        _grid_gradients(inputs) if on_grid else _tensor_parallel_gradients(inputs),
        _context(inputs),
        _zero3(inputs) if inputs.layout.zero == 3 else _data_parallel(inputs),
        _pipeline_parallel(inputs),
        _tied_embedding(inputs),
    ]
    total: Traffic = {}
    for part in parts:
        for key, volume in part.items():
            total[key] = total.get(key, Volume(0, 0)) + volume
    return {key: volume for key, volume in total.items() if volume.calls}


def _tensor_parallel(inputs: TrafficInputs) -> Traffic:
    """Tensor parallelism: per layer two all-reduces of the hidden states forward and two backward.

    (Shoeybi et al. 2019, figure 4.) With sequence parallelism each is an all-gather and a reduce-scatter (Korthikanti
    et al. 2022, figure 5). One more forward for the embedding and one more backward for the output matrix. The loss
    takes two all-reduces a chunk of tokens, of three numbers per token together.
    """
    layout = inputs.layout
    if layout.tp == 1:
        return {}
    micro_batches, each = layout.micro_batches, inputs.hidden_bytes // layout.micro_batches
    # number of times hidden states enter and leave a tensor-parallel region, in the forward and the backward pass
    entries = exits = backward_entries = backward_exits = 0
    for stage in inputs.stages:
        layers, recomputed = _layer_count(inputs, stage), _recomputations(inputs, stage)
        # recomputing a block stops before its last all-reduce, unless dropout after it is needed
        recomputed_exits = 2 if inputs.config.dropout else 1
        entries += layers * (2 * micro_batches + 2 * recomputed)
        exits += layers * (2 * micro_batches + recomputed_exits * recomputed)
        backward_entries += 2 * layers * micro_batches
        backward_exits += 2 * layers * micro_batches
    if inputs.holds_stage(0):
        exits, backward_exits = exits + micro_batches, backward_exits + micro_batches
    if inputs.holds_stage(-1):
        entries, backward_entries = entries + micro_batches, backward_entries + micro_batches
    chunks = 2 * micro_batches * _loss_chunks(inputs)
    loss = Volume(chunks, 3 * inputs.tokens * inputs.wide)
    loss = loss if inputs.holds_stage(-1) else Volume(0, 0)
    if layout.sequence_parallel:
        gathers, scatters = entries + backward_exits, exits + backward_entries
        return {
            ("tp", "all-gather"): Volume(gathers, gathers * each),
            ("tp", "reduce-scatter"): Volume(scatters, scatters * each),
            ("tp", "all-reduce"): loss,
        }
    sums = exits + backward_entries  # entries forward and exits backward communicate nothing
    return {("tp", "all-reduce"): Volume(sums, sums * each) + loss}


def _grid(inputs: TrafficInputs) -> Traffic:
    """2D, 2.5D and 3D: what each module communicates (training/parallel/traffic.py), times the passes."""
    kind, times = CubeTraffic if inputs.layout.tensor == "3d" else GridTraffic, inputs.layout.micro_batches
    found = kind(inputs.grid)
    for stage in inputs.stages:
        layers, recomputed, begun = (f(inputs, stage) for f in (_layer_count, _recomputations, _backward_passes))
        found.blocks(Passes(layers * (times + recomputed), layers * times, layers * begun))
        if stage == inputs.layout.stages - 1:
            found.norms(1, times, times)
            found.output(Passes(times, times, begun))
            if inputs.config.query_layer and isinstance(found, GridTraffic):
                found.learned_queries(inputs.seq_len, times, times, recomputed)
    if inputs.holds_stage(0):
        found.embedding(times)
        found.norms(bool(inputs.config.embed_norm), times, times)
    return {key: Volume(calls, found.bytes[key]) for key, calls in found.calls.items()}


def _grid_gradients(inputs: TrafficInputs) -> Traffic:
    """Layers of a grid sum the gradients of all that they hold, rows those of vectors; columns those of head norms.

    Products of a cube sum the gradients of matrices over layers, and columns of a cube those of the inner biases.
    """
    every = [p for stage in inputs.parameters.values() for p in stage]
    return {
        (axis, "all-reduce"): Volume(bool(found), sum(_own_numel(inputs, p) for p in found) * inputs.wide)
        for axis, found in summed_parameters(every, inputs.layout.tensor == "3d", inputs.layout.depth).items()
    }


def _context(inputs: TrafficInputs) -> Traffic:
    """Context parallelism: what attention sends between the ranks that share sequences, for all layers and passes."""
    layout, config = inputs.layout, inputs.config
    if layout.cp == 1:
        return {}
    tokens, widths = inputs.tokens // layout.micro_batches, (config.q_width // layout.tp, config.kv_width // layout.tp)
    sizes = ContextSizes(layout.context, layout.cp, tokens, *widths, inputs.itemsize, inputs.wide)
    passes = layout.micro_batches * sum(_layer_count(inputs, stage) for stage in inputs.stages)
    again = sum(_recomputations(inputs, stage) * _layer_count(inputs, stage) for stage in inputs.stages)
    found = context_traffic(sizes, passes + again, passes)
    return {("cp", operation): Volume(*volume) for operation, volume in found.items()}


def _loss_chunks(inputs: TrafficInputs) -> int:
    """Chunks of tokens in which the loss takes a micro-batch, by the largest logits of a rank; one token at least."""
    rows = -(-inputs.config.vocab_size // inputs.layout.tp)
    tokens = inputs.tokens // inputs.layout.micro_batches
    return -(-tokens // max(1, inputs.chunk_bytes // (rows * inputs.wide)))


def _recomputations(inputs: TrafficInputs, stage: int) -> int:
    """Number of times a stage's blocks are recomputed: once per backward pass, twice if backward is split."""
    return 0 if inputs.recompute == "none" else _backward_passes(inputs, stage)


def _backward_passes(inputs: TrafficInputs, stage: int) -> int:
    """Number of a stage's backward passes; those for inputs and for weights are two."""
    order = inputs.passes.get(stage, "B" * inputs.layout.micro_batches)
    return sum(order.count(kind) for kind in ("BIW" if stage else "BW"))  # the first stage's input has no gradient


def _tensor_parallel_gradients(inputs: TrafficInputs) -> Traffic:
    """Sequence parallelism: replicated parameters have a partial gradient on each rank; one all-reduce sums them.

    Norms of the queries and keys of each head have one without it, too.
    """
    if inputs.layout.tp == 1:
        return {}
    every = [p for stage in inputs.parameters.values() for p in stage if not p.divided]
    sizes = [_own_numel(inputs, p) for p in every if inputs.layout.sequence_parallel or p.of_heads]
    return {("tp", "all-reduce"): Volume(bool(sizes), sum(sizes) * inputs.wide)}


def _data_parallel(inputs: TrafficInputs) -> Traffic:
    """DDP: one all-reduce of a bucket of gradients (Li et al. 2020). ZeRO-1 and 2: reduce-scatter, then all-gather.

    (Rajbhandari et al. 2020, section 7.) ZeRO-2 reduce-scatters after each micro-batch: it keeps no full gradients.
    Gradients travel in the dtype in which replicas sum them, parameters in that of activations.
    """
    layout = inputs.layout
    if layout.replicas == 1:
        return {}
    if layout.compression != "none":
        packed = [b for stage in inputs.parameters.values() for b in pack_buckets(stage, inputs.bucket_elements)]
        sent = compressed_traffic(layout, packed, inputs.wide)
        return {("replicate", operation): Volume(*volume) for operation, volume in sent.items()}
    buckets = [numel for stage in inputs.parameters.values() for numel in _buckets(inputs, stage)]
    calls, gradients, parameters = len(buckets), sum(buckets) * inputs.reduced, sum(buckets) * inputs.itemsize
    times = layout.micro_batches if layout.zero == 2 else 1
    if layout.shards == 1:
        return {("replicate", "all-reduce"): Volume(calls, gradients)}
    between = times * (layout.shards < layout.replicas)
    return {
        ("shard", "reduce-scatter"): Volume(times * calls, times * gradients),
        ("shard", "all-gather"): Volume(calls, parameters),
        ("replicate", "all-reduce"): Volume(between * calls, between * gradients // layout.shards),
    }


def _buckets(inputs: TrafficInputs, parameters: Sequence[ParameterShape]) -> list[int]:
    """Elements of each bucket, padded."""
    packed = pack_buckets(parameters, inputs.bucket_elements)
    return [sum(p.padded_numel(inputs.layout.shards) for p in bucket) for bucket in packed]


def _zero3(inputs: TrafficInputs) -> Traffic:
    """ZeRO-3: all-gathers parameters per unit, and reduce-scatters gradients after each micro-batch.

    (Zhao et al. 2023, section 3.2.) Blocks are freed after the forward pass and gathered again. The last unit is kept
    for its backward pass, which follows; that of an embedding needs no parameters. A pipeline gathers once a step.
    """
    layout, micro_batches = inputs.layout, inputs.layout.micro_batches
    gathered = scattered = between = Volume(0, 0)
    for parameters in inputs.parameters.values():
        units: dict[str, int] = {}
        for p in parameters:
            unit = "head" if inputs.config.tied and layout.stages == 1 and p.unit == "embed" else p.unit
            units[unit] = units.get(unit, 0) + p.padded_numel(layout.shards)
        for unit, numel in units.items():
            times = 1 if layout.pp > 1 else micro_batches if unit in ("embed", "head") else 2 * micro_batches
            gathered += Volume(times, times * numel * inputs.itemsize)
            scattered += Volume(micro_batches, micro_batches * numel * inputs.reduced)
            between += Volume(micro_batches, micro_batches * numel * inputs.reduced // layout.shards)
    return {
        ("shard", "all-gather"): gathered,
        ("shard", "reduce-scatter"): scattered,
        ("replicate", "all-reduce"): between if layout.shards < layout.replicas else Volume(0, 0),
    }


def _pipeline_parallel(inputs: TrafficInputs) -> Traffic:
    """Pipeline: hidden states forward and their gradients backward, between ranks (Huang et al. 2019)."""
    layout, rank = inputs.layout, inputs.rank.pp
    parts = layout.tp if layout.sequence_parallel or layout.tensor != "1d" else 1
    each = inputs.hidden_bytes // (layout.micro_batches * parts)
    borders = sum(
        1
        for stage in inputs.stages
        for other in (stage - 1, stage + 1)
        if 0 <= other < layout.stages and layout.stage_ranks[other] != rank
    )
    volume = Volume(borders * layout.micro_batches, borders * layout.micro_batches * each)
    return {("pp", "send"): volume, ("pp", "receive"): volume}


def _tied_embedding(inputs: TrafficInputs) -> Traffic:
    """First and last stage all-reduce the gradient of the tied embedding (Narayanan et al. 2021, section 3.2)."""
    ends = inputs.layout.stage_ranks[0], inputs.layout.stage_ranks[-1]
    if not inputs.config.tied or ends[0] == ends[1] or inputs.rank.pp not in ends:
        return {}
    names = ("embed.tokens.weight", "head.weight")
    shared = next(p for stage in inputs.parameters.values() for p in stage if p.name in names)
    return {("tied", "all-reduce"): Volume(1, _own_numel(inputs, shared) * inputs.wide)}


def _layer_count(inputs: TrafficInputs, stage: int) -> int:
    return len(inputs.stage_layers[stage])


def _own_numel(inputs: TrafficInputs, p: ParameterShape) -> int:
    """Number of elements in the rows that this rank updates."""
    return p.rows_numel(inputs.layout.shards, inputs.rank.shard)
