"""Pipeline traffic: hidden states between stages, and the gradient of an embedding that two stages have."""

from training.parallel.traffic_inputs import Traffic, TrafficInputs, Volume, add_traffic


def pipeline_traffic(inputs: TrafficInputs) -> Traffic:
    """Return the traffic of a step of this rank's stages."""
    return add_traffic([_activations(inputs), _tied_embedding(inputs)])


def _activations(inputs: TrafficInputs) -> Traffic:
    """Pipeline: hidden states forward and their gradients backward, between ranks (Huang et al. 2019)."""
    layout = inputs.layout
    rank = inputs.rank["pp"]
    parts = layout.sequence_shards * layout.batch_shards * layout.feature_shards
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
    if not inputs.config.tied or ends[0] == ends[1] or inputs.rank["pp"] not in ends:
        return {}
    names = ("embed.tokens.weight", "head.weight")
    shared = next(p for stage in inputs.parameters.values() for p in stage if p.name in names)
    return {("tied", "all-reduce"): Volume(1, inputs.own_numel(shared) * inputs.wide)}
