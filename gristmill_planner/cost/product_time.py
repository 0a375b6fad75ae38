"""Product time: seconds of a matrix product, at a rate that depends on its shape."""

import math

from gristmill_planner.cost.fitted_constants import Constants
from gristmill_planner.cost.hardware import Device
from gristmill_planner.cost.layer_work import Product

_TILES = {(256, 128): 1.0, (128, 256): 1.0, (128, 128): 0.9, (128, 64): 0.75, (64, 128): 0.75}
"""Tiles of the result that libraries compute on one multiprocessor, and the share of the best rate that they reach.

Small ones load more for each FLOP (NVIDIA, "Matrix Multiplication Background", which has the sizes; the shares are
assumed, not fitted).
"""


def product_time(product: Product, device: Device, constants: Constants) -> float:
    """Seconds of a product: its FLOPs at a rate that saturates with the summed side, its bytes, and a latency.

    Tensor cores need rows of a multiple of 8 elements, 16 bytes (NVIDIA, "Matrix Multiplication Background").
    """
    share = constants.product_share * product.k / (product.k + constants.product_depth)
    if product.n % 8 or product.k % 8:
        share /= constants.misaligned
    share *= wave_share(product, device)
    size = product.elements * device.element_bytes
    return product.flops / (share * device.flops) + size / (0.9 * device.bandwidth) + constants.product_latency


def wave_share(product: Product, device: Device) -> float:
    """Share of the multiprocessors' time that the tiles of a product fill, with the best tile; 1 without those.

    Tiles reach over the edges, and the last wave of them leaves multiprocessors idle (NVIDIA, "Matrix Multiplication
    Background", on tile and wave quantization).
    """
    if not device.processors:
        return 1.0
    return max(share * _filled(product, *tile, device.processors) for tile, share in _TILES.items())


def _filled(product: Product, rows: int, columns: int, processors: int) -> float:
    tiles = math.ceil(product.m / rows) * math.ceil(product.n / columns) * product.count
    exact = product.m * product.n * product.count / (rows * columns)
    return exact / (math.ceil(tiles / processors) * processors)
