"""Optimizer memory: bytes of the states of AdamW, Muon, local steps and an average of the weights; of Muon's work."""

from gristmill_planner.memory.memory_inputs import MemoryInputs
from training.parallel.parameter_shapes import ParameterShape, stage_parameters

_ALIGNMENT = 64  # elements: where each parameter's moments begin in AdamW's buffers


def moment_bytes(inputs: MemoryInputs) -> int:
    """AdamW's two moments, 8 P / n; Muon's momentum, 4 P / n of its matrices; an average of the weights, 4 P / n.

    Of local steps also what replicas share, weights and outer momentum: 8 P / n (Douillard et al. 2023, algorithm 1).

    Those of a parameter that two stages of the rank share exist once.
    """
    found: dict[str, ParameterShape] = {}
    for stage in inputs.parameters.values():
        for p in stage:
            found[p.name.replace("head", "embed.tokens") if inputs.model.tied else p.name] = p
    rows = [p.rows_numel(inputs.shards, inputs.shard_rank) for p in found.values()]
    average = sum(rows) if inputs.ema else 0
    shared = 2 * sum(rows) if inputs.layout.local_steps else 0
    by_muon = [inputs.optimizer == "muon" and is_block_matrix(p) for p in found.values()]
    momentum = sum(numel for numel, is_muon in zip(rows, by_muon, strict=True) if is_muon)
    aligned = [-(-n // _ALIGNMENT) * _ALIGNMENT for n, is_muon in zip(rows, by_muon, strict=True) if not is_muon]
    return inputs.wide * (average + shared + momentum + (2 * sum(aligned) if _has_moments_here(inputs) else 0))


def update_bytes(inputs: MemoryInputs) -> int:
    """What Muon works with at most: of a matrix m x n, m >= n, 3 m n + 2 n^2 numbers, in bf16 on a GPU.

    The matrix, an iterate and the next one; X X^T and its polynomial. Sent and received pieces are at most 3 m n.
    """
    if inputs.optimizer != "muon":
        return 0
    stages, last = inputs.layout.stages_of_rank(inputs.rank), inputs.layout.stages - 1
    whole = [p for i in stages for p in stage_parameters(inputs.model, inputs.stage_layers[i], i == 0, i == last)]
    sides = [(max(p.shape), min(p.shape)) for p in whole if is_block_matrix(p)]
    itemsize = 2 if inputs.device == "cuda" and inputs.wide == 4 else inputs.wide
    return itemsize * max((3 * m * n + 2 * n * n for m, n in sides), default=0)


def is_block_matrix(p: ParameterShape) -> bool:
    """True for what Muon updates: a matrix of a block."""
    return len(p.shape) == 2 and p.unit not in ("embed", "head") and not p.name.endswith("attention.query.weight")


def _has_moments_here(inputs: MemoryInputs) -> bool:
    """True if there are moments, and in the memory of the device."""
    on_cpu = (inputs.device, inputs.moments) == ("cpu", "cpu")
    return inputs.optimizer != "sgd" and (inputs.moments == "device" or on_cpu)
