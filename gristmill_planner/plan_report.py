"""Plan report: the best layouts as a table, in words, formula by formula, or as JSON."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from rich.table import Table

from gristmill_planner.break_even import tensor_break_even
from gristmill_planner.communication_time import hidden_bytes
from gristmill_planner.compute_time import IMBALANCE, Product, head_of_rank, layer_of_rank, model_flops, wave_share
from gristmill_planner.fitted_constants import Constants
from gristmill_planner.hardware import SUFFIX, Device
from gristmill_planner.pipeline_simulator import PassCosts
from gristmill_planner.planned_run import GRISTMILL, PlannedRun, Software
from gristmill_planner.search import PlannedLayout
from gristmill_planner.step_time import divided_by_time, rank_parameters, rank_times, step_time

_GIB = 1 << 30
_PARTS = {
    "compute": "compute",
    "tensor": "collectives within layers",
    "pipeline": "messages between stages",
    "bubble": "the pipeline's bubble",
    "data": "communication between replicas",
    "update": "the optimizer and the start of a step",
}


def choices_table(choices: Sequence[PlannedLayout], tokens: float) -> Table:
    """Return the layouts, best first; `tokens` of the whole run."""
    columns = ("layout", "micro-batch", "recompute", "GiB (rank)", "s a step", *_PARTS, "TFLOP/s", "MFU", "days")
    table = Table(*columns, box=None, pad_edge=False)
    for choice in choices:
        run = choice.run
        time = choice.time
        parts = [f"{100 * getattr(time, name) / time.total:.0f} %" for name in _PARTS]
        table.add_row(
            run.layout.describe(),
            f"{run.micro_batch} x {run.layout.micro_batches}",
            run.recompute,
            f"{choice.memory.total / _GIB:.0f} ({choice.memory.rank})",
            f"{time.total:.3g}",
            *parts,
            f"{achieved_flops(choice) / 1e12:.3g}",
            f"{100 * achieved_flops(choice) / run.cluster.device.flops:.0f} %",
            f"{days(choice, tokens):.3g}",
        )
    return table


def trust(device: Device, gpu: str | None, software: Software) -> str:
    """Say what the plan's constants were measured on, and what no plan has been compared with."""
    if gpu is not None and gpu.endswith(SUFFIX):
        return (
            f"The constants are those that --calibrate measured ({gpu}): for two processes on one machine, without a "
            "network."
        )
    if software != GRISTMILL:
        return (
            "How far to trust this: it is for the program of published runs of 2021 and 2022, on V100s and A100s, "
            "whose attention was not fused. It says nothing of that program today, nor how fast this trainer is "
            "next to it (docs/reference/planner-accuracy.md)."
        )
    seen = {
        "h100": "one H100 took 13 to 21 % less time than planned for a Llama of 1.1B, 53 % less for GPT-2 of 124M",
        "h200": "one H200 took 4 to 14 % less time than planned for a Llama of 1.1B, 44 % less for GPT-2 of 124M",
    }.get(device.name, "this trainer was measured on no GPU of this kind")
    power = ""
    if device.watts:
        power = (
            f" Rates are the data sheet's, with {device.watts} W a card: cards that are limited to less are slower "
            "(nvidia-smi -q -d POWER)."
        )
    return (
        "How far to trust this: the constants are fitted to published steps of Megatron-LM and DeepSpeed on V100s and "
        f"A100s; {seen}, and no plan for it has been compared with several GPUs. Compare layouts by it, rather than "
        f"count on its seconds (docs/reference/planner-accuracy.md).{power}"
    )


def achieved_flops(choice: PlannedLayout) -> float:
    """Return the model's FLOP/s of a GPU, without what is computed again (Chowdhery et al. 2022, section 4.1)."""
    run = choice.run
    return model_flops(run.model, run.batch, run.seq_len) / choice.time.total / run.cluster.devices


def days(choice: PlannedLayout, tokens: float) -> float:
    """Return the days to train on `tokens`."""
    run = choice.run
    return tokens / (run.batch * run.seq_len) * choice.time.total / 86_400


def about(choice: PlannedLayout, constants: Constants) -> list[str]:
    """Say what limits one layout, where its memory goes, and how its layers are divided."""
    return [_limits(choice), _memory(choice), _division(choice, constants), *_experts(choice)]


def _limits(choice: PlannedLayout) -> str:
    time = choice.time
    shares = {name: getattr(time, name) / time.total for name in _PARTS}
    compute = shares.pop("compute")
    largest, second = sorted(shares, key=lambda name: (shares[name], name), reverse=True)[:2]
    return (
        f"{choice.run.layout.describe()} computes for {100 * compute:.0f} % of a step; most of the rest is "
        f"{_PARTS[largest]} ({100 * shares[largest]:.0f} %), followed by {_PARTS[second]} "
        f"({100 * shares[second]:.0f} %)."
    )


def _memory(choice: PlannedLayout) -> str:
    device = choice.run.cluster.device
    memory = choice.memory
    kinds = [f"{name} {size / _GIB:.1f}" for name, size in memory.kinds.items() if size >= 0.05 * _GIB]
    peaks = f"; each kind at its own peak: {', '.join(kinds)} GiB" if kinds else ""
    fullest = f"Its fullest rank is pipeline rank {memory.rank}:" if choice.run.layout.pp > 1 else "Every rank has"
    return f"{fullest} {memory.total / _GIB:.1f} of {device.memory / _GIB:.0f} GiB{peaks}."


def _division(choice: PlannedLayout, constants: Constants) -> str:
    run = choice.run
    if run.layout.pp == 1:
        return "It has no pipeline, so every rank has all layers."
    best = divided_by_time(run, constants)
    other = step_time(replace(run, stage_layers=best), constants).total
    layers = f"Layers per pipeline stage: {_runs(run.layers)}."
    if other > 0.999 * choice.time.total:
        return layers + " No other split has a faster slowest stage."
    return layers + f" Split as {_runs(best)}, a step would take {other:.3g} s."


def _experts(choice: PlannedLayout) -> list[str]:
    if choice.run.axes["ep"].ranks == 1:
        return []
    return [
        f"The busiest expert-parallel rank is assumed to get {IMBALANCE} times the mean number of tokens: how evenly a "
        "router chooses is not known in advance."
    ]


def _runs(layers: Sequence[int]) -> str:
    """Return the layers of the stages in order, such as "9 each in stages 0 to 9, 5 in stage 10".

    >>> _runs([9, 9, 8, 6]), _runs([3, 3])
    ('9 each in stages 0 and 1, 8 in stage 2, 6 in stage 3', '3 each')
    """
    words = list[str]()
    first = 0
    for count, same in groupby(layers):
        last = first + len(list(same)) - 1
        if last == first:
            words.append(f"{count} in stage {first}")
        else:
            to = "and" if last == first + 1 else "to"
            words.append(f"{count} each in stages {first} {to} {last}")
        first = last + 1
    return f"{layers[0]} each" if len(words) == 1 else ", ".join(words)


def next_choice(choices: Sequence[PlannedLayout]) -> str:
    """Say what the second choice would cost."""
    if len(choices) < 2:
        return "No other layout fits."
    first, second = choices[:2]
    longer = 100 * (second.time.total / first.time.total - 1)
    takes = f"{abs(longer):.1f} % {'longer' if longer >= 0 else 'less'}"
    changes = {name: getattr(second.time, name) - getattr(first.time, name) for name in _PARTS}
    main_change = max(changes, key=lambda name: abs(changes[name]))
    spared = (first.memory.total - second.memory.total) / _GIB
    memory = f"{abs(spared):.0f} GiB {'less' if spared > 0 else 'more'}"
    return (
        f"The next, {second.run.layout.describe()}, takes {takes} and {memory}: the largest difference "
        f"is {changes[main_change]:+.3g} s of {_PARTS[main_change]}."
    )


def formulas(choice: PlannedLayout, constants: Constants) -> list[str]:
    """Return each formula with its numbers and source, for one layout."""
    run = choice.run
    layout = choice.run.layout
    time = choice.time
    tp = run.axes["tp"].ranks
    device = run.cluster.device
    layer, head = rank_times(run, constants)
    work = layer_of_rank(run)
    output = head_of_rank(run)
    shapes = []
    for product in work.products:
        times = f" ({product.count:.0f} times)" if product.count > 1 else ""
        shapes.append(f"{product.m:.0f} x {product.n:.0f} x {product.k:.0f}{times}")
    products = ", ".join(shapes)
    return [
        f"layer, for {run.micro_batch} x {run.seq_len} tokens on one of {tp} tensor-parallel ranks: "
        f"{work.flops / 1e12:.3g} TFLOP in products m x n x k of {products}; {work.traffic / 1e9:.3g} GB of traffic",
        f"product: 2 m n k / (w x {constants.product_share:.2f} x {device.flops / 1e12:.0f} TFLOP/s x k / (k + "
        f"{constants.product_depth:.0f})) + bytes / (0.9 x {device.bandwidth / 1e12:.2f} TB/s) + "
        f"{1e6 * constants.product_latency:.0f} µs (Williams et al. 2009, roofline; fitted shares)",
        *_waves(work.products, device),
        f"layer: forward {1e3 * layer.forward:.3g} ms, backward {1e3 * layer.backward:.3g} ms with recompute "
        f"{run.recompute}; at least the host's {1e3 * constants.launch:.2g} ms a forward pass",
        *_collectives(run, layer.collectives),
        _tensor_degrees(run, constants),
        f"head: {output.flops / 1e12:.3g} TFLOP forward, {1e3 * (head.forward + head.backward):.3g} ms per micro-batch",
        f"pipeline: {layout.micro_batches} micro-batches through {layout.stages} stages by {layout.schedule}; the "
        f"bubble of {time.bubble:.3g} s is what a micro-batch takes on the other ranks, / {layout.virtual_stages} "
        "stages per rank (Narayanan et al. 2021, section 2.2; Qi et al. 2023)",
        f"replicas: {rank_parameters(run) / 1e9:.3g} billion parameters on a rank, ZeRO-{layout.zero} over "
        f"{layout.zero_group}; {time.data:.3g} s that nothing hides (Rajbhandari et al. 2020, section 7)",
        f"update: {constants.update_bytes:.0f} bytes a parameter, and {1e3 * constants.step:.0f} ms a step: "
        f"{time.update:.3g} s",
    ]


def _waves(products: Sequence[Product], device: Device) -> list[str]:
    """Return a line of how full products' waves are; none for a device without multiprocessors."""
    if not device.processors:
        return []
    shares = ", ".join(f"{wave_share(product, device):.2f}" for product in products)
    return [
        f"w, what a product's tiles fill of the waves in which {device.processors} multiprocessors take them: {shares} "
        '(NVIDIA, "Matrix Multiplication Background")'
    ]


def _collectives(run: PlannedRun, seconds: float) -> list[str]:
    """Say what ranks send each other within a layer, and how long it takes, both passes of a micro-batch."""
    layout = run.layout
    size = hidden_bytes(run)
    ep = run.axes["ep"].ranks
    if layout.on_grid:
        return [
            f"{layout.tensor} grid of {' x '.join(map(str, layout.grid))}: blocks of X of {size / 1e6:.3g} MB and of "
            f"matrices, by training/parallel/traffic.py: {1e3 * seconds:.3g} ms a layer that nothing hides (Xu et al. "
            "2021, table 1; Wang et al. 2021; Bian et al. 2021)"
        ]
    duration = f": {1e3 * seconds:.3g} ms a layer" if layout.cp == ep == 1 else ""
    lines = [
        f"tensor-parallel all-reduce: 2 (t - 1) / t x {size / 1e6:.3g} MB, t = {run.parts}, twice a layer and pass"
        f"{duration} (Shoeybi et al. 2019, section 3)"
    ]
    if ep > 1:
        rows = run.model.experts_per_token * size
        lines.append(
            f"tokens to their experts and back: four all-to-alls of {rows / 1e6:.3g} MB a sparse layer over ep "
            f"{ep}, {IMBALANCE} times that on the busiest rank; with all other collectives {1e3 * seconds:.3g} "
            "ms a layer on average (Lepikhin et al. 2020)"
        )
    if layout.cp > 1:
        lines.append(
            f"context parallelism, {layout.context} of {layout.cp}: keys and values, by training/parallel/traffic.py; "
            f"with all-reduces {1e3 * seconds:.3g} ms a layer that nothing hides"
        )
    return lines


def _tensor_degrees(run: PlannedRun, constants: Constants) -> str:
    """Say how long a layer's passes take by tensor-parallel ranks, and where more of them gain nothing."""
    times = []
    for ranks, seconds, within in tensor_break_even(run, constants):
        times.append(f"{1e3 * seconds:.3g} ms on {ranks} ({100 * within / seconds:.0f} %)")
    return f"tensor-parallel ranks: a layer's passes (share of collectives) would take {', '.join(times)}"


def stage_costs(run: PlannedRun, constants: Constants) -> list[PassCosts]:
    """Return the seconds of the passes of each stage, for the pipeline simulator."""
    layer, head = rank_times(run, constants)
    costs = []
    for layers in run.layers:
        half = layers * layer.backward / 2
        costs.append(PassCosts(layers * layer.forward, half, half))
    last = costs[-1]
    half_of_head = head.backward / 2
    costs[-1] = PassCosts(last.forward + head.forward, last.inputs + half_of_head, last.weights + half_of_head)
    return costs


def as_record(choice: PlannedLayout, tokens: float) -> dict[str, Any]:
    """Return one layout for programs; seconds and bytes."""
    run = choice.run
    return {
        "layout": run.layout.record(),
        "micro_batch": run.micro_batch,
        "recompute": run.recompute,
        "stage_layers": list(run.layers),
        "seconds": {**vars(choice.time), "total": choice.time.total},
        "bytes": {**choice.memory.kinds, "total": choice.memory.total, "rank": choice.memory.rank},
        "flops_per_second": achieved_flops(choice),
        "days": days(choice, tokens),
    }
