"""Calibration: the planner's hardware row and constants of this CPU, measured in a few seconds.

Single products, a stream through memory, the trainer's own steps of two small models, and collectives of two processes.
The shortest of several times counts, and but for collectives the processor's own: other work only adds to it.
"""

import itertools
import math
import platform
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from gristmill.budget import free_memory, usable_cores
from gristmill_planner.compute_time import Product, layer_work
from gristmill_planner.fitted_constants import Constants
from gristmill_planner.hardware import Device
from training.distributed.rank_pool import RankPool
from training.experimental.parallel_config import ParallelConfig
from training.model.batch import TokenBatch
from training.model.decoder import meta_decoder
from training.model.model_config import ModelConfig
from training.optim.build_optimizer import build_optimizer
from training.optim.optim_config import OptimConfig
from training.parallel.gradients import scale_gradients, squared_grad_norm
from training.parallel.mesh import build_world
from training.parallel.parallelize import parallelize

_REPEATS = 7
_PRODUCTS = list(itertools.product((64, 512), (64, 512), (32, 128, 512)))  # m, n and k
_STREAM = 1 << 23  # elements, more than caches hold
_REDUCED = (1 << 10, 1 << 21)  # elements of the two all-reduces
_SEQ_LEN = 128
_WIDTH = 256
_SEQUENCES = (1, 8)


def calibrate(pool: RankPool, repeats: int = _REPEATS) -> tuple[Device, Constants]:
    """Return the row of this CPU with one thread a process, in float32, and constants that are no shares, but measured.

    `pool` has two processes or more; everything is measured `repeats` times.
    """
    rate, depth = pool.run(1, _product_rate, repeats)[0]
    bandwidth = pool.run(1, _stream_rate, repeats)[0]
    layers = [pool.run(1, _layer_seconds, sequences, repeats)[0] for sequences in _SEQUENCES]
    update = pool.run(1, step_seconds, _small_model(1), ParallelConfig(), 2, repeats)[0]["update"]
    latency, link = pool.run(2, _all_reduce, repeats)[0]
    share, product_latency = _in_layers(layers, rate, depth, bandwidth)
    parameters = sum(p.numel() for p in meta_decoder(_small_model(1)).parameters())
    memory = free_memory() / usable_cores()  # of a process, if each core has one
    source = f"measured on {platform.processor() or platform.machine()}, one thread a process"
    device = Device("this CPU", rate, memory, bandwidth, link, link, source, element_bytes=4, overlaps=False)
    return device, Constants(
        product_share=share, product_depth=depth, product_latency=product_latency, misaligned=1.0,
        traffic_share=1.0, launch=0.0, launch_wait=0.0, link_share=1.0, collective_latency=latency,
        network_share=1.0, reduction_share=1.0, lone_reduction_share=1.0, deepspeed_reduction_share=1.0,
        deepspeed=1.0, update_bytes=update * bandwidth / parameters, step=0.0,
    )  # fmt: skip


def step_seconds(model: ModelConfig, layout: ParallelConfig, sequences: int, steps: int) -> dict[str, float]:
    """Train `steps` steps of `sequences` as one of the ranks, and return the shortest seconds of a step.

    Also those that one process computes for its passes, and for its update.
    """
    layout = layout.resolve(dist.get_world_size(), model, model.context)
    world = build_world(layout, torch.device("cpu"))
    part = parallelize(meta_decoder(model), layout, world, 1)
    optimizer = build_optimizer(part.params, OptimConfig(), rank=world.rank)
    tokens = torch.randint(model.vocab_size, (sequences // layout.dp, model.context + 1))
    batch = TokenBatch(tokens[:, :-1], tokens[:, 1:], torch.arange(len(tokens)))
    shortest = dict.fromkeys(("step", "passes", "update"), math.inf)
    for _ in range(steps + 1):  # the first one allocates
        dist.barrier()
        started = time.perf_counter()
        began = time.process_time()
        part.forward_backward(batch, 1e-3)
        passed = time.process_time()
        world.all_reduce(squared_grad_norm(part.params, world.device))
        scale_gradients(part.params, 0.5)
        optimizer.step(1e-3)
        part.all_gather_params()
        optimizer.zero_grad()
        now = {
            "step": time.perf_counter() - started,
            "passes": passed - began,
            "update": time.process_time() - passed,
        }
        shortest = {name: min(shortest[name], seconds) for name, seconds in now.items()}
    return shortest


def _shortest(work: Callable[[], object], repeats: int, clock: Callable[[], float] = time.process_time) -> float:
    work()
    times = []
    for _ in range(repeats):
        started = clock()
        work()
        times.append(clock() - started)
    return min(times)


def _product_rate(repeats: int) -> tuple[float, float]:
    """Return the FLOP/s of long products, and the length of the summed side at which a product reaches half of them.

    Seconds are 2 m n k / rate + 2 m n depth / rate + latency, linear in what is unknown.
    """
    rows = []
    for m, n, k in _PRODUCTS:
        a = torch.randn(m, k)
        b = torch.randn(k, n)
        seconds = _shortest(lambda a=a, b=b: a @ b, 5 * repeats)  # type: ignore[misc]
        rows.append((2.0 * m * n * k, 2.0 * m * n, 1.0, seconds))
    table = np.array(rows)
    weighted = table[:, :3] / table[:, 3:]
    per_flop, per_element, _ = np.linalg.lstsq(weighted, np.ones(len(table)), rcond=None)[0]
    return 1 / per_flop, max(0.0, per_element / per_flop)


def _stream_rate(repeats: int) -> float:
    """Return the bytes/s that are read and written."""
    a = torch.ones(_STREAM)
    b = torch.ones(_STREAM)
    out = torch.ones(_STREAM)
    return 3 * 4 * _STREAM / _shortest(lambda: torch.add(a, b, out=out), repeats)


def _small_model(layers: int) -> ModelConfig:
    return ModelConfig(preset="gpt2", layers=layers, width=_WIDTH, heads=4).resolve(512, _SEQ_LEN)


def _layer_seconds(sequences: int, repeats: int) -> float:
    """Return the seconds of a layer's passes: by how much steps of five layers take longer than steps of one."""
    of_one = step_seconds(_small_model(1), ParallelConfig(), sequences, repeats)
    of_five = step_seconds(_small_model(5), ParallelConfig(), sequences, repeats)
    return (of_five["passes"] - of_one["passes"]) / 4


def _in_layers(layers: list[float], rate: float, depth: float, bandwidth: float) -> tuple[float, float]:
    """Return the share of the products' rate that layers reach, and seconds that each product takes longer there.

    From layers of two sizes, whose other kernels are taken to be bound by memory: seconds are products / share +
    traffic / bandwidth + latency x number of products.
    """
    rows = []
    left = []
    for sequences, seconds in zip(_SEQUENCES, layers, strict=True):
        work = layer_work(_small_model(1), sequences, _SEQ_LEN)
        products = list[Product]()
        for product in work.products:
            products += (product, *product.backward())
        elements = sum(product.elements for product in products)
        streamed = 4 * elements / (0.9 * bandwidth) + 3 * 2 * work.traffic / bandwidth
        flops = sum(product.flops * (1 + depth / product.k) for product in products)
        rows.append((flops / rate, len(products)))
        left.append(seconds - streamed)
    slower, _ = np.linalg.solve(np.array(rows), np.array(left))
    slower = max(slower, 1.0)  # no faster than the products alone
    return 1 / slower, max(0.0, (left[0] - slower * rows[0][0]) / rows[0][1])


def _all_reduce(repeats: int) -> tuple[float, float]:
    """Return the latency of a collective of two processes, and the bytes/s of its ring."""

    def seconds(numel: int) -> float:
        values = torch.ones(numel)
        return _shortest(lambda: dist.all_reduce(values), 5 * repeats, time.perf_counter)

    small = seconds(_REDUCED[0])
    large = seconds(_REDUCED[1])
    return small, 4 * (_REDUCED[1] - _REDUCED[0]) / max(large - small, 1e-9)
