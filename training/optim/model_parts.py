"""Parts of a model, as weight decay and Muon tell its parameters apart: by name and global shape."""

from typing import Literal

from training.model.decoder import is_lookup

Part = Literal["hidden", "embeddings", "head", "norms", "biases"]
MATRICES: tuple[Part, ...] = ("hidden", "embeddings", "head")


def part_of(name: str, global_shape: tuple[int, ...]) -> Part:
    """The part that a parameter belongs to; a tied matrix is an embedding, and "hidden" is any other matrix.

    >>> part_of("blocks.0.attention.q.weight", (8, 8)), part_of("blocks.0.attention.q.bias", (8,))
    ('hidden', 'biases')
    """
    if len(global_shape) < 2:
        return "biases" if name.endswith("bias") else "norms"
    if is_lookup(name):
        return "embeddings"
    return "head" if name.startswith("head.") else "hidden"
