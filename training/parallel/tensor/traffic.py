"""Tensor traffic: what ranks that share matrices send each other, by the formulas of its papers."""

from training.parallel.traffic_inputs import Traffic, TrafficInputs, Volume, add_traffic


def tensor_traffic(inputs: TrafficInputs) -> Traffic:
    """Within layers, and of gradients."""
    return add_traffic([_layers(inputs), _gradients(inputs)]) if inputs.layout.tp > 1 else {}


def _layers(inputs: TrafficInputs) -> Traffic:
    """Per layer two all-reduces of the hidden states forward and two backward.

    (Shoeybi et al. 2019, figure 4.) With sequence parallelism each is an all-gather and a reduce-scatter (Korthikanti
    et al. 2022, figure 5). One more forward for the embedding and one more backward for the output matrix. The loss
    takes two all-reduces a chunk of tokens, of three numbers per token together.
    """
    layout = inputs.layout
    micro_batches = layout.micro_batches
    each = inputs.hidden_bytes // layout.micro_batches
    # each of a layer's two regions is entered and left in both passes; an embedding is left, an output matrix entered
    both = micro_batches * (4 * inputs.layers + inputs.holds_stage(0) + inputs.holds_stage(-1))
    # recomputing a block stops before its last all-reduce, unless dropout after it is needed
    sums = both + (2 if inputs.config.dropout else 1) * inputs.recomputed_layers
    # norms over all heads: the queries' and the keys' mean squares, a number for each token
    norms = 2 * (2 * micro_batches * inputs.layers + inputs.recomputed_layers) if inputs.config.qk_norm_joint else 0
    of_norms = Volume(norms, norms * inputs.tokens // micro_batches * inputs.wide)
    chunks = 2 * micro_batches * _loss_chunks(inputs)
    loss = Volume(chunks, 3 * inputs.tokens * inputs.wide)
    loss = loss if inputs.holds_stage(-1) else Volume(0, 0)
    if layout.sequence_parallel:
        gathers = both + 2 * inputs.recomputed_layers
        return {
            ("tp", "all-gather"): Volume(gathers, gathers * each),
            ("tp", "reduce-scatter"): Volume(sums, sums * each),
            ("tp", "all-reduce"): loss + of_norms,
        }
    # entries forward and exits backward communicate nothing
    return {("tp", "all-reduce"): Volume(sums, sums * each) + loss + of_norms}


def _gradients(inputs: TrafficInputs) -> Traffic:
    """Sequence parallelism: replicated parameters have a partial gradient on each rank; one all-reduce sums them.

    Norms of the queries and keys of each head have one without it, too; and the ranks that have the same head of keys
    and values sum what their own queries give.
    """
    every = [p for stage in inputs.parameters.values() for p in stage]
    partial = [p for p in every if not p.divided and (inputs.layout.sequence_parallel or p.of_heads)]
    return {
        (axis, "all-reduce"): Volume(bool(summed), sum(map(inputs.own_numel, summed)) * inputs.wide)
        for axis, summed in (("tp", partial), ("kv", [p for p in every if p.copies > 1]))
    }


def _loss_chunks(inputs: TrafficInputs) -> int:
    """Return the chunks of tokens in which the loss takes a micro-batch, by the largest logits of a rank.

    One token at least.
    """
    rows = -(-inputs.config.vocab_size // inputs.layout.tp)
    tokens = inputs.tokens // inputs.layout.micro_batches
    return -(-tokens // max(1, inputs.chunk_bytes // (rows * inputs.wide)))
