"""Step time: seconds of a training step of a layout, split into compute, communication and bubble.

And the division of layers over pipeline stages that has the fastest slowest stage.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from gristmill_planner.communication_time import (
    Seconds,
    collective_time,
    gradient_all_reduce,
    head_collectives,
    hidden_bytes,
    layer_collectives,
    message,
)  # fmt: skip
from gristmill_planner.compute_time import RankWork, head_of_rank, layer_of_rank, product_time
from gristmill_planner.fitted_constants import Constants
from gristmill_planner.hardware import Device
from gristmill_planner.planned_run import PlannedRun
from training.model.model_config import ModelConfig
from training.parallel.expert.options import is_expert
from training.parallel.parameter_shapes import stage_parameters
from training.parallel.pipeline.schedules import SPLIT_BACKWARD
from training.parallel.pipeline.stage_layers import divide_layers

_LAUNCH_NORM = 6  # of the smooth maximum of the device's and the host's time

COMPILED_SHARE = 0.92
"""Of a layer's passes, what they take compiled: GPT-2 124M by this trainer 0.93 of a step on an H100, 0.91 on an H200
(docs/reference/gpu.md); torchtitan's Llama 3.1 8B 0.86 on H100s, where norms and rotation were not fused before."""


@dataclass(frozen=True)
class PassTime:
    """Seconds of a micro-batch's forward and backward pass, and of collectives among them."""

    forward: float
    backward: float
    collectives: float


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by what they are spent on; of the pipeline rank that has the most to do."""

    compute: float
    tensor: float
    pipeline: float
    bubble: float
    data: float
    update: float

    @property
    def total(self) -> float:
        return self.compute + self.tensor + self.pipeline + self.bubble + self.data + self.update


@lru_cache(4096)
def work_time(work: RankWork, device: Device, constants: Constants) -> tuple[float, float]:
    """Return the seconds of the forward and of the backward pass of `work` on the device."""
    traffic = _traffic_time(work, device, constants)
    forward = sum(product_time(product, device, constants) for product in work.products)
    backward = 0.0
    for product in work.products:
        for gradient in product.backward():
            backward += product_time(gradient, device, constants)
    return forward + traffic, backward + 2 * traffic


def _traffic_time(work: RankWork, device: Device, constants: Constants) -> float:
    return work.traffic * device.element_bytes / 2 / (constants.traffic_share * device.bandwidth)


def layer_time(run: PlannedRun, constants: Constants) -> PassTime:
    """Return the time of one layer: the slower of the device and of the host that launches its kernels.

    Two all-reduces of b s h elements a pass (Shoeybi et al. 2019, section 3), which sequence parallelism splits into
    as many bytes of gathers and scatters (Korthikanti et al. 2022, section 4.2.2); others in communication_time.py.
    """
    device = run.cluster.device
    work = layer_of_rank(run)
    forward, backward = work_time(work, device, constants)
    sent = layer_collectives(run, constants, *_by_kind(run, work, constants))
    launch = constants.launch + constants.launch_wait * (run.axes["tp"].ranks - 1)
    again = 0.0  # seconds of what is computed again
    if run.recompute == "selective":
        again = _traffic_time(work, device, constants)
    elif run.recompute == "full":
        again = forward + sent.forward
    whole_forward = _slower(forward + sent.forward, launch)
    launches = 3 if again > 0 else 2
    whole_backward = _slower(backward + sent.backward + again, launches * launch)
    slower = constants.deepspeed if run.software.deepspeed else 1.0
    if run.compiled:
        whole_forward = sent.forward + COMPILED_SHARE * (whole_forward - sent.forward)
        whole_backward = sent.backward + COMPILED_SHARE * (whole_backward - sent.backward)
    collectives = sent.forward + sent.backward
    if run.recompute == "full":
        collectives += sent.forward
    return PassTime(slower * whole_forward, slower * whole_backward, slower * collectives)


def _by_kind(run: PlannedRun, work: RankWork, constants: Constants) -> tuple[Seconds, Seconds]:
    """Return the seconds of a layer's products with matrices, and in attention, where communication may hide there."""
    if not run.layout.on_grid and run.layout.cp == 1:
        return Seconds(0.0, 0.0), Seconds(0.0, 0.0)
    device = run.cluster.device
    matrices = tuple(product for product in work.products if product not in work.attention)
    of_matrices = work_time(RankWork(matrices, 0.0), device, constants)
    of_attention = work_time(RankWork(work.attention, 0.0), device, constants)
    return Seconds(*of_matrices), Seconds(*of_attention)


def head_time(run: PlannedRun, constants: Constants) -> PassTime:
    """Return the time of the output matrix and the loss."""
    forward, backward = work_time(head_of_rank(run), run.cluster.device, constants)
    sent = head_collectives(run, constants)
    return PassTime(forward, backward + sent, sent)


def rank_times(run: PlannedRun, constants: Constants) -> tuple[PassTime, PassTime]:
    """Return the times of a layer and of the head: equal for runs that differ in pipelines, replicas and ZeRO alone."""
    return layer_time(run, constants), head_time(run, constants)


def step_time(run: PlannedRun, constants: Constants, times: tuple[PassTime, PassTime] | None = None) -> StepTime:
    """Return the seconds of a step of `run`; `times`, where they are known, are its `rank_times`."""
    layout = run.layout
    count = run.layout.micro_batches
    layer, head = times or rank_times(run, constants)
    of_layer = layer.forward + layer.backward
    of_head = head.forward + head.backward
    layers = run.rank_layers
    has_head = [layout.stages - 1 in stages for stages in run.held]
    slots = []  # seconds of a micro-batch's passes on each rank
    for rank in range(layout.pp):
        slots.append(layers[rank] * of_layer + (of_head if has_head[rank] else 0.0))
    sent = send_time(run, constants)
    busiest = max(range(layout.pp), key=slots.__getitem__)
    collectives = layers[busiest] * layer.collectives
    if has_head[busiest]:
        collectives += head.collectives
    bubble = _bubble(run, slots, sent, layer)
    data = data_time(run, constants, slots[busiest], layers[busiest] * layer.backward)
    return StepTime(
        compute=count * (slots[busiest] - collectives),
        tensor=count * collectives,
        pipeline=count * sent,
        bubble=bubble,
        data=data,
        update=_update_time(run, constants) + constants.step,
    )


def send_time(run: PlannedRun, constants: Constants) -> float:
    """Return the seconds that a rank spends on what it sends, or waits for, per micro-batch: forward and backward."""
    layout = run.layout
    if layout.pp == 1:
        return 0.0
    parts = run.axes["tp"].ranks if run.software.divided_messages else layout.sequence_shards
    return 2 * layout.virtual_stages * message(run.cluster, constants, hidden_bytes(run) / parts)


def _bubble(run: PlannedRun, slots: list[float], sent: float, layer: PassTime) -> float:
    """Return the seconds in which the busiest rank waits: the first micro-batch passes the other ranks, and returns.

    (p - 1)(f + b) of equal stages for GPipe and 1F1B, 1 / v of it interleaved (Narayanan et al. 2021, section 2.2);
    (p - 1)(f + i - w) / v if gradients of inputs i and of weights w are separate (Qi et al. 2023, table 2), which are
    taken to last as long. The pipeline simulator gives the same for equal stages.
    """
    layout = run.layout
    others = sum(slots) - max(slots) + (layout.pp - 1) * sent
    if layout.schedule in SPLIT_BACKWARD:
        others *= layer.forward / (layer.forward + layer.backward)
    return others / layout.virtual_stages


def data_time(run: PlannedRun, constants: Constants, slot: float, backward: float) -> float:
    """Return the seconds of communication between replicas that nothing hides.

    An all-reduce of the gradients; with ZeRO-1 half of one, and half of one of the weights in 16 bits; ZeRO-2 scatters
    gradients after each micro-batch; ZeRO-3 also gathers the weights for each pass, in a pipeline once (Rajbhandari et
    al. 2020, section 7; docs/concepts/parallelism.md). `slot` and `backward` are the rank's seconds of a micro-batch,
    and of its backward pass, which hides what is sent in the meantime.
    """
    layout = run.layout
    count = run.layout.micro_batches
    layers = _depth_time(run, constants)
    if layout.replicas == 1:
        return layers
    gradients, weights = _sum_and_gather(run, constants)
    if layout.zero == 3:
        gathers = 1 if layout.pp > 1 else 2 * count
        seconds = gathers * weights + count * gradients
        hidden = count * slot
    elif layout.zero == 2:
        seconds = weights + count * gradients
        hidden = count * backward
    else:
        seconds = gradients + weights
        hidden = backward
    return layers + seconds - min(hidden, run.software.hidden * seconds) * run.cluster.device.overlaps


def _sum_and_gather(run: PlannedRun, constants: Constants) -> tuple[float, float]:
    """Return the seconds of one sum of all gradients, and of one gather of all weights.

    ZeRO's ranks, which are neighbours, take each as half an all-reduce; several groups of them then all-reduce the part
    of the gradients that a rank has.
    """
    layout = run.layout
    software = run.software
    experts = rank_experts(run)
    share = constants.deepspeed_reduction_share if software.deepspeed else software.reduction_share
    sums = 0.0
    gathers = 0.0
    for parameters, prefix in ((rank_parameters(run) - experts, ""), (experts, "expert_")):
        within = run.axes[f"{prefix}shard"]
        groups = run.axes[f"{prefix}replicate"]
        summed = parameters * (2 if layout.reduce_bf16 else software.gradient_bytes)
        gathered = parameters * run.cluster.device.element_bytes
        scatter = gradient_all_reduce(run.cluster, constants, within, summed, share) / 2
        gather = gradient_all_reduce(run.cluster, constants, within, gathered, share) / 2
        sums += scatter + gradient_all_reduce(run.cluster, constants, groups, summed / within.ranks, share)
        gathers += gather
    return sums, gathers


def _depth_time(run: PlannedRun, constants: Constants) -> float:
    """Return the seconds of 2.5D's all-reduce of all gradients over the grid's layers, after the last backward pass."""
    if run.layout.tensor != "2.5d":
        return 0.0
    size = run.software.gradient_bytes * rank_parameters(run) / run.layout.shards
    return collective_time(run.cluster, constants, run.axes["depth"], "all-reduce", 1, size)


def _update_time(run: PlannedRun, constants: Constants) -> float:
    experts = rank_experts(run)
    updated = (rank_parameters(run) - experts) / run.layout.shards + experts / run.axes["expert_shard"].ranks
    return constants.update_bytes * updated / run.cluster.device.bandwidth


def rank_parameters(run: PlannedRun) -> float:
    """Return the parameters of the rank that has the most: its layers and an end of the model.

    Of one tensor-parallel rank. Layers of a 2.5D grid hold the same.
    """
    layout = run.layout
    ends = 2 if layout.pp == 1 and not run.model.tied else 1
    whole_layer, of_experts = layer_parameters(run.model)
    others = max(run.rank_layers) * (whole_layer - of_experts)
    whole = others + ends * run.model.vocab_size * run.model.width
    return whole / (run.axes["tp"].ranks // layout.depth) + rank_experts(run)


def rank_experts(run: PlannedRun) -> float:
    """Return how many of `rank_parameters` are of experts, which expert-parallel ranks divide."""
    return max(run.rank_layers) * layer_parameters(run.model)[1] / (run.axes["tp"].ranks * run.axes["ep"].ranks)


@lru_cache
def layer_parameters(model: ModelConfig) -> tuple[float, float]:
    """Return the parameters of a decoder layer, sparse and dense ones on average; and those of them of experts."""
    layers = range(model.layers if model.experts else 1)
    parameters = stage_parameters(model, layers, False, False)
    total = sum(p.numel for p in parameters)
    of_experts = sum(p.numel for p in parameters if is_expert(p.name))
    return total / len(layers), of_experts / len(layers)


def _slower(device: float, host: float) -> float:
    """Return a smooth maximum: the two hide each other but for where one overtakes the other."""
    power = _LAUNCH_NORM / 2
    return math.hypot(device**power, host**power) ** (2 / _LAUNCH_NORM)


def divided_by_time(run: PlannedRun, constants: Constants) -> tuple[int, ...]:
    """Return the layers of each stage of `run` with the least time of the slowest stage; the last has the head, too.

    That is also the least step time if there are many micro-batches.
    """
    layer, head = rank_times(run, constants)
    in_layers = (head.forward + head.backward) / (layer.forward + layer.backward)
    return tuple(divide_layers(run.model.layers, run.layout.stages, in_layers))
