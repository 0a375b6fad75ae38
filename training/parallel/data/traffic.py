"""Data traffic: gradients and parameters between replicas, by the formulas of the papers of DDP and ZeRO."""

from collections.abc import Sequence

from training.parallel.parameter_shapes import ParameterShape, pack_buckets
from training.parallel.traffic_inputs import Traffic, TrafficInputs, Volume


def data_traffic(inputs: TrafficInputs) -> Traffic:
    """Of a step: the gradients that replicas sum, and the parameters that ZeRO's ranks gather."""
    return _fsdp(inputs) if inputs.layout.shards_parameters else _buckets_traffic(inputs)


def _buckets_traffic(inputs: TrafficInputs) -> Traffic:
    """DDP: one all-reduce of a bucket of gradients (Li et al. 2020). ZeRO-1 and 2: reduce-scatter, then all-gather.

    (Rajbhandari et al. 2020, section 7.) ZeRO-2 reduce-scatters after each micro-batch: it keeps no full gradients.
    Gradients travel in the dtype in which replicas sum them, parameters in that of activations.
    """
    layout = inputs.layout
    if layout.replicas == 1:
        return {}
    buckets = [numel for stage in inputs.parameters.values() for numel in _bucket_numels(inputs, stage)]
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


def _bucket_numels(inputs: TrafficInputs, parameters: Sequence[ParameterShape]) -> list[int]:
    """Elements of each bucket, padded."""
    packed = pack_buckets(parameters, inputs.bucket_elements)
    return [sum(p.padded_numel(inputs.layout.shards) for p in bucket) for bucket in packed]


def _fsdp(inputs: TrafficInputs) -> Traffic:
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
            times = micro_batches if unit in ("embed", "head") else 2 * micro_batches
            times = times if layout.pipeline is None else 1
            gathered += Volume(times, times * numel * inputs.itemsize)
            scattered += Volume(micro_batches, micro_batches * numel * inputs.reduced)
            between += Volume(micro_batches, micro_batches * numel * inputs.reduced // layout.shards)
    return {
        ("shard", "all-gather"): gathered,
        ("shard", "reduce-scatter"): scattered,
        ("replicate", "all-reduce"): between if layout.shards < layout.replicas else Volume(0, 0),
    }
