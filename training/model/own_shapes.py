"""Shapes of parameters of the user's own parts, for what counts without building a model."""

from training.model.model_config import ModelConfig


def own_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return placement and shape of the parameters of own parts in a layer, by their names in it."""
    if not config.own_names:
        return {}
    from training.model.block import described_shapes  # here, as it imports torch

    return described_shapes(config, layer)
