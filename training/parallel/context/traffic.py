"""Context traffic: what ranks that share the tokens of a sequence send each other, by the formulas of its papers.

A rank has n tokens, with h features of queries and h' of keys, as many of values. Ring attention (Liu et al. 2023):
keys and values, 2 n h' elements, are sent on in all of N steps but the last, and backward once more, with
as many gradients one step behind. Ulysses (Jacobs et al. 2023): queries, keys, values and outputs,
n (2 h + 2 h') elements, are exchanged once forward and once backward, of which (N - 1) / N go to other ranks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from training.parallel.traffic_inputs import Traffic, TrafficInputs, Volume


@dataclass(frozen=True)
class ContextSizes:
    """Attention of a layer on one rank: `tokens` of a micro-batch, and features of `queries` and of `keys`."""

    kind: Literal["ring", "ulysses"]
    ranks: int
    tokens: int
    queries: int
    keys: int
    itemsize: int
    """Bytes of an element of activations."""
    wide: int
    """Bytes of a gradient that ranks add to."""


def context_traffic(inputs: TrafficInputs) -> Traffic:
    """Context parallelism: what attention sends between the ranks that share sequences, for all layers and passes."""
    layout = inputs.layout
    if layout.cp == 1:
        return {}
    tokens = inputs.tokens // layout.micro_batches
    widths = layout.attention_widths(inputs.config)
    sizes = ContextSizes(layout.context, layout.cp, tokens, *widths, inputs.itemsize, inputs.wide)
    passes = layout.micro_batches * inputs.layers
    volumes = attention_traffic(sizes, passes + inputs.recomputed_layers, passes)
    return {("cp", operation): Volume(*volume) for operation, volume in volumes.items()}


def attention_traffic(sizes: ContextSizes, forward: int, backward: int) -> Mapping[str, tuple[int, int]]:
    """Return the calls and bytes by operation, of so many forward and backward passes of attention layers."""
    if sizes.kind == "ulysses":
        elements = sizes.tokens * 2 * (sizes.queries + sizes.keys)
        return {"all-to-all": (2 * (forward + backward), (forward + backward) * elements * sizes.itemsize)}
    steps = sizes.ranks - 1
    elements = 2 * sizes.tokens * sizes.keys
    calls = steps * (forward + 2 * backward)
    sent = steps * elements * ((forward + backward) * sizes.itemsize + backward * sizes.wide)
    return {"send": (calls, sent), "receive": (calls, sent)}
