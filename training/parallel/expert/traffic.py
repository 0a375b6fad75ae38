"""Expert traffic: tokens that ranks send to their experts, and the counts that routers sum to keep loads equal."""

from training.parallel.traffic_inputs import Traffic, TrafficInputs, Volume, add_traffic

_COUNT_BYTES = 8


def expert_traffic(inputs: TrafficInputs) -> Traffic:
    """Counts: for the losses in each forward pass, for the bias once a step. Tokens: there and back, in each pass.

    Of tokens as many are assumed as where choices are equal: what a rank gets is what the routers choose. With them go
    the numbers of tokens for each expert, forward.
    """
    config = inputs.config
    layout = inputs.layout
    parts = list[Traffic]()
    data = " x ".join(
        name for name, size in zip(("replicate", "shard"), layout.mesh_shape[1:3], strict=True) if size > 1
    )
    row = config.experts * _COUNT_BYTES
    held = 0
    for stage in inputs.stages:
        layers = sum(map(config.is_sparse, inputs.stage_layers[stage]))
        passes = layers * (layout.micro_batches + inputs.recomputations(stage))
        held += layers
        if layout.ep > 1:
            backward = layers * layout.micro_batches
            choices = inputs.tokens // layout.micro_batches * config.experts_per_token * inputs.itemsize
            rows = choices * (2 * config.width + 1)  # there with their weights, and back
            parts.append(
                {("ep", "all-to-all"): Volume(4 * passes + 3 * backward, passes * (row + rows) + backward * rows)}
            )
        if config.capacity_factor and layout.cp > 1:  # the choices of all tokens of a sequence
            choices = inputs.tokens // layout.micro_batches * layout.cp * config.experts_per_token * _COUNT_BYTES
            parts.append({("cp", "all-gather"): Volume(passes, passes * choices)})
        if config.balance == "switch" and layout.replicas > 1:
            parts.append({(data, "all-reduce"): Volume(passes, passes * row)})
        elif config.balance_loss and layout.cp > 1:
            sequences = inputs.sequences // layout.micro_batches
            parts.append({("cp", "all-reduce"): Volume(passes, passes * sequences * row)})
    if config.balance == "bias" and layout.replicas > 1 and held:
        parts.append({(data, "all-reduce"): Volume(1, held * row)})
    return add_traffic(parts)
