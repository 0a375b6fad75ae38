"""Stage layers: the layers of each pipeline stage."""

from training.model.model_config import ModelConfig


def stage_layers(config: ModelConfig, stages: int, seq_len: int) -> list[range]:
    """Split the layers into consecutive ranges, one per stage, that minimize the cost of the most expensive stage.

    The embedding is a lookup and costs nothing. `seq_len`: tokens of a training sequence, which may be fewer than the
    model's context.
    """
    counts = divide_layers(config.layers, stages, _head_cost(config, seq_len))
    ends = [sum(counts[: i + 1]) for i in range(stages)]
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def divide_layers(layers: int, stages: int, head: float) -> list[int]:
    """Return the layers of each stage, one or more, with the least cost of the most expensive stage.

    `head`: cost of the output matrix, which the last stage has, in layers.
    """
    counts = [1] * stages
    costs = [1.0] * stages
    costs[-1] += head
    for _ in range(layers - stages):
        cheapest = costs.index(min(costs))
        counts[cheapest], costs[cheapest] = counts[cheapest] + 1, costs[cheapest] + 1
    return counts


def _head_cost(config: ModelConfig, seq_len: int) -> float:
    """Cost of the output matrix in layers: its multiplications over a layer's, with attention to half a sequence."""
    mlp = (3 if config.is_gated else 2) * config.width * config.active_width
    return config.vocab_size * config.width / (config.attention_numel + mlp + config.q_width * config.attended(seq_len))
