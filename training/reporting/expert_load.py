"""Expert load: how evenly the tokens fall on the experts of each layer, recorded with the metrics, and in the log."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from training.checkpoint.record import CheckpointRecord
from training.distributed.stop_signals import StopSignals
from training.parallel.expert.routing import Loads, Routing
from training.plugin import LogRecord, Plugin

_STARVING = 0.1  # of the mean load


class ExpertLoad(Plugin):
    """Records the load of the experts since the last report, names experts that starve, and updates the bias."""

    def __init__(self, routing: Routing, say: Callable[[str], None]) -> None:
        self.routing = routing
        self.say = say
        self._step = self._reported = 0
        self._said = ""

    def after_load(self, step: int, stored: CheckpointRecord | None, stop: StopSignals) -> int:  # noqa: ARG002
        self._reported = step
        return step

    @contextmanager
    def update(self, loss_scale: float) -> Iterator[None]:  # noqa: ARG002
        yield
        self.routing.update_bias()

    def after_step(self, step: int) -> int:
        self._step = step
        return step

    def log_records(self) -> list[LogRecord]:
        """One record, whose numbers are by layer: `max_load` and `min_load` are over the mean; `entropy` of the loads
        over that of equal ones; `balance_loss` per token, the router's z-loss included; with a capacity `dropped`, the
        share of the choices whose expert was full. At times also `loads`, of every expert over the mean."""
        loads = self.routing.take()
        config = self.routing.config
        starving = describe_starving(loads, config.sparse_layers)
        if starving != self._said:
            self.say(starving or "no expert starves any more")
        self._said = starving
        values: dict[str, Any] = {"max_load": {}, "min_load": {}, "entropy": {}, "balance_loss": {}}
        for layer in config.sparse_layers:
            counts = loads.counts[layer]
            share = counts / counts.sum()
            entropy = -torch.xlogy(share, share).sum() / math.log(max(2, config.experts))
            tokens = counts.sum() / config.experts_per_token
            mean = counts.mean()
            measures = (counts.max() / mean, counts.min() / mean, entropy, loads.losses[layer] / tokens)
            for name, value in zip(values, measures, strict=True):
                values[name][str(layer)] = round(float(value), 6)
        if config.capacity_factor:
            shares = loads.dropped_shares
            values["dropped"] = {str(layer): round(float(shares[layer]), 6) for layer in config.sparse_layers}
            worst = max(config.sparse_layers, key=lambda layer: float(shares[layer]))
            total = float(loads.dropped.sum() / loads.counts.sum())
            self.say(f"dropped {total:.2%} of the choices of experts, in layer {worst} {float(shares[worst]):.2%}")
        if _period(self._step) > _period(self._reported):
            means = loads.counts / loads.counts.mean(1, keepdim=True)
            values["loads"] = {str(layer): means[layer].round(decimals=3).tolist() for layer in config.sparse_layers}
        self._reported = self._step
        return [("experts", self._step, values)]


def _period(step: int) -> int:
    """Twenty to each power of ten: with each, a large model records thousands of numbers."""
    return int(20 * math.log10(step)) if step else -1


def describe_starving(loads: Loads, layers: list[int]) -> str:
    """Return a line that names the experts with under a tenth of the mean load; empty if there are none."""
    starving = []
    for layer in layers:
        counts = loads.counts[layer]
        experts = (counts < _STARVING * counts.mean()).nonzero().flatten().tolist()
        if experts:
            starving.append(f"{', '.join(map(str, experts))} of layer {layer}")
    return f"starving experts, with under a tenth of the mean load: {'; '.join(starving)}" if starving else ""
