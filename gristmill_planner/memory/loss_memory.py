"""Loss memory: bytes of logits, and of what is made of them, while the loss is computed."""

from gristmill_planner.memory.block_memory import BlockSizes


def loss_bytes(sizes: BlockSizes, chunk_bytes: int) -> int:
    """Bytes at work in the loss, which a step needs a chunk of tokens at a time.

    `chunk_bytes`: of a chunk's logits in the dtype of the loss. In float32: logits and log-probabilities. In 16 bits
    also a float32 copy of the logits while they are normalised, and in bf16 the float32 sum of the output matrix's
    gradient. With sequence parallelism also the gathered features.
    """
    vocabulary = sizes.vocabulary
    if sizes.on_grid:
        return _loss_bytes_on_grid(sizes)
    tokens = min(sizes.tokens, max(1, chunk_bytes // (vocabulary * sizes.wide)))
    features = sizes.tokens * sizes.model.width * sizes.itemsize if sizes.sequence_parallel else 0
    if sizes.itemsize == sizes.wide:
        return 2 * sizes.wide * tokens * vocabulary + features
    summed = sizes.wide * vocabulary * sizes.model.width if sizes.precision == "bf16" else 0
    return (sizes.itemsize + 2 * sizes.wide) * tokens * vocabulary + summed + features


def _loss_bytes_on_grid(sizes: BlockSizes) -> int:
    """All logits with the blocks that SUMMA multiplies; then in 16 bits with two float32 tensors of them.

    In float32 one of those is kept: the gradient. Of SUMMA two blocks of others are there at a time, of two ranks one.
    """
    received = 0 if sizes.tensor == "3d" else min(2, sizes.tp - 1)
    at_work = received * sizes.hidden * (sizes.tokens + sizes.vocabulary)
    wide = 2 * sizes.wide * sizes.logits if sizes.itemsize < sizes.wide else 0
    return sizes.itemsize * sizes.logits + max(sizes.itemsize * at_work, wide)


def loss_beside_gradient(sizes: BlockSizes) -> int:
    """On a grid: bytes at work in the loss beside the gradient of all logits, which it keeps."""
    return (sizes.itemsize if sizes.itemsize == sizes.wide else 2 * sizes.wide) * sizes.logits
