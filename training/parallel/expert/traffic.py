"""Expert traffic: the counts of tokens that routers sum, to keep the loads of experts equal."""

from training.parallel.traffic_inputs import Traffic, TrafficInputs, Volume, add_traffic

_COUNT_BYTES = 8


def expert_traffic(inputs: TrafficInputs) -> Traffic:
    """For the losses in each forward pass, for the bias once a step."""
    config, layout, parts = inputs.config, inputs.layout, list[Traffic]()
    data = " x ".join(
        name for name, size in zip(("replicate", "shard"), layout.mesh_shape[1:3], strict=True) if size > 1
    )
    row, held = config.experts * _COUNT_BYTES, 0
    for stage in inputs.stages:
        layers = sum(map(config.is_sparse, inputs.stage_layers[stage]))
        passes = layers * (layout.micro_batches + inputs.recomputations(stage))
        held += layers
        if config.balance == "switch" and layout.replicas > 1:
            parts.append({(data, "all-reduce"): Volume(passes, passes * row)})
        elif config.balance_loss and layout.cp > 1:
            sequences = inputs.sequences // layout.micro_batches
            parts.append({("cp", "all-reduce"): Volume(passes, passes * sequences * row)})
    if config.balance == "bias" and layout.replicas > 1 and held:
        parts.append({(data, "all-reduce"): Volume(1, held * row)})
    return add_traffic(parts)
