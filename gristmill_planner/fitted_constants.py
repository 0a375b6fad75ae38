"""Fitted constants: the shares of the data sheets' rates that programs reach, and the times that no sheet tells.

scripts/score_planner.py fits them to measured steps, by least squares of log(predicted / measured) with a soft L1 loss
and a weak prior around the typical values below, and writes fitted_constants.toml;
docs/reference/planner-accuracy.md has the errors.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Constants:
    """Shares are of the device's rate; times are in seconds."""

    product_share: float = 0.8
    """Of the peak FLOP/s that a large product reaches."""
    product_depth: float = 150.0
    """Length of the summed side at which a product reaches half of that."""
    product_latency: float = 4e-5
    """Of each product and the small kernels around it, in addition to its FLOPs and bytes."""
    misaligned: float = 16.0
    """Times as long for a product with a side that is no multiple of 8, as attention's if a head's width is none."""
    traffic_share: float = 0.8
    """Of the memory's bandwidth that kernels other than the products reach."""
    launch: float = 9e-4
    """The host's, for a layer's kernels of a forward pass; a device is no faster than its host."""
    launch_wait: float = 6e-5
    """Longer that takes with each further tensor-parallel rank, as their hosts wait for each other."""
    link_share: float = 0.75
    """Of the links within a node."""
    collective_latency: float = 3e-5
    """Of each collective or message."""
    network_share: float = 0.8
    """Of a node's network cards, in tensor-parallel collectives and messages between stages."""
    reduction_share: float = 0.5
    """Of a node's network cards, in sums of gradients over groups that have several ranks in a node."""
    lone_reduction_share: float = 0.5
    """The same, over groups that have one rank in each node: as many rings as the node has devices."""
    deepspeed_reduction_share: float = 0.5
    """The same, over both kinds of groups, under DeepSpeed."""
    deepspeed: float = 1.1
    """Times as long for the passes of layers under DeepSpeed's pipeline engine."""
    update_bytes: float = 40.0
    """That the optimizer reads and writes per parameter."""
    step: float = 5e-3
    """Of every step."""


@cache
def fitted_constants() -> Constants:
    """Return the constants that the project ships."""
    return Constants(**tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")))
