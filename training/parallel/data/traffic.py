"""Data traffic: gradients and parameters between replicas, by the formulas of the papers of DDP and ZeRO."""

from collections.abc import Sequence

from training.parallel.parameter_shapes import ParameterShape, pack_buckets
from training.parallel.traffic_inputs import Traffic, TrafficInputs, Volume, add_traffic


def data_traffic(inputs: TrafficInputs) -> Traffic:
    """Return the traffic of a step: the gradients that replicas sum, and the parameters that ZeRO's ranks gather.

    Experts that are divided over ranks have fewer replicas than all else.
    """
    layout = inputs.layout
    formula = _fsdp if layout.shards_parameters else _buckets_traffic
    parts = list[Traffic]()
    for of_experts, prefix in ((False, ""), (True, "expert_")):
        groups, shards = layout.expert_mesh_shape[:2] if of_experts else layout.mesh_shape[1:3]
        chosen = list[list[ParameterShape]]()
        for stage in inputs.parameters.values():
            chosen.append([p for p in stage if p.of_experts is of_experts])
        traffic: Traffic = {}
        for (axis, operation), volume in formula(inputs, groups, shards, chosen).items():
            traffic[prefix + axis, operation] = volume
        parts.append(traffic)
    return add_traffic(parts)


def _buckets_traffic(
    inputs: TrafficInputs, groups: int, shards: int, stages: Sequence[Sequence[ParameterShape]]
) -> Traffic:
    """DDP: one all-reduce of a bucket of gradients (Li et al. 2020). ZeRO-1 and 2: reduce-scatter, then all-gather.

    (Rajbhandari et al. 2020, section 7.) ZeRO-2 reduce-scatters after each micro-batch: it keeps no full gradients.
    Gradients travel in the dtype in which replicas sum them, parameters in that of activations.
    """
    layout = inputs.layout
    if groups * shards == 1:
        return {}
    calls = 0
    elements = 0
    for stage in stages:
        for bucket in pack_buckets(stage, inputs.bucket_elements):
            calls += 1
            elements += sum(p.padded_numel(shards) for p in bucket)
    gradients = elements * inputs.reduced
    parameters = elements * inputs.itemsize
    times = layout.micro_batches if layout.zero == 2 and layout.shards > 1 else 1
    if shards == 1:
        return {("replicate", "all-reduce"): Volume(times * calls, times * gradients)}
    between = times * (groups > 1)
    return {
        ("shard", "reduce-scatter"): Volume(times * calls, times * gradients),
        ("shard", "all-gather"): Volume(calls, parameters),
        ("replicate", "all-reduce"): Volume(between * calls, between * gradients // shards),
    }


def _fsdp(inputs: TrafficInputs, groups: int, shards: int, stages: Sequence[Sequence[ParameterShape]]) -> Traffic:
    """ZeRO-3: all-gathers parameters per unit, and reduce-scatters gradients after each micro-batch.

    (Zhao et al. 2023, section 3.2.) Blocks are freed after the forward pass and gathered again. The last unit is kept
    for its backward pass, which follows; that of an embedding needs no parameters. A pipeline gathers once a step.
    """
    layout = inputs.layout
    micro_batches = inputs.layout.micro_batches
    gathered = Volume(0, 0)
    scattered = Volume(0, 0)
    between = Volume(0, 0)
    for parameters in stages:
        units: dict[str, int] = {}
        for p in parameters:
            unit = "head" if inputs.config.tied and layout.stages == 1 and p.unit == "embed" else p.unit
            units[unit] = units.get(unit, 0) + p.padded_numel(shards)
        for unit, numel in units.items():
            times = micro_batches if unit in ("embed", "head") else 2 * micro_batches
            if layout.pipeline is not None:
                times = 1
            gathered += Volume(times, times * numel * inputs.itemsize)
            scattered += Volume(micro_batches, micro_batches * numel * inputs.reduced)
            between += Volume(micro_batches, micro_batches * numel * inputs.reduced // shards)
    traffic: Traffic = {}
    if groups > 1:
        traffic["replicate", "all-reduce"] = between
    if shards > 1:  # else a rank has all of it
        traffic["shard", "all-gather"] = gathered
        traffic["shard", "reduce-scatter"] = scattered
    return traffic
