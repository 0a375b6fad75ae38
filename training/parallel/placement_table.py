"""The placement table: the piece of each parameter that a rank holds, and the axes its gradient is summed over.

Derived from it: the pieces themselves, which are the boxes of checkpoints; which rank counts a piece in the gradient
norm; which sums of gradients follow the backward pass; and how many ranks must hold the same values. A parameter
without a row is an error: nothing is replicated for being forgotten.
"""

from training.model.decoder import Decoder
from training.parallel.layout import ParallelConfig
from training.sharding.placement import Placement

# Of every parameter: ZeRO's rows along "shard". With ZeRO-0 that axis has one rank; ZeRO-1 and 2 gather the rows for
# the forward pass once a step, and ZeRO-3 whenever they are used
DATA_PARALLEL = Placement(shard={"shard": 0}, replicated=("replicate",), gradient_sum=("replicate", "shard"))
# Of an embedding that is also the output matrix, where these are two pipeline stages (Narayanan et al. 2021, section
# 3.2): "tied" are the ranks of the first and the last stage
TIED = Placement(replicated=("tied",), gradient_sum=("tied",))


def tensor_parallel_table(sequence_parallel: bool) -> dict[str, Placement]:
    """Megatron's placement of each parameter over "tp", by the end of its name (Shoeybi et al. 2019, section 3).

    Norms, learned positions and biases of row-parallel products act outside the tensor-parallel regions. There each
    rank has all tokens and computes the same gradient, or with sequence parallelism some of the tokens and a term of it
    (Korthikanti et al. 2022, section 4.2.2).
    """
    columns, rows = Placement(shard={"tp": 0}), Placement(shard={"tp": 1})  # of W; torch stores W^T, (outputs, inputs)
    outside = Placement(replicated=("tp",), gradient_sum=("tp",) if sequence_parallel else ())
    of_all_heads = Placement(replicated=("tp",), gradient_sum=("tp",))  # each rank's own give a term of its gradient
    table = {
        "embed.tokens": {"weight": columns},  # shards the vocabulary
        "embed.positions": {"weight": outside},
        "embed_norm": {"weight": outside, "bias": outside},
        "input_norm": {"weight": outside, "bias": outside},
        "attention_norm": {"weight": outside, "bias": outside},
        "attention.q": {"weight": columns, "bias": columns},  # shards the heads
        "attention.k": {"weight": columns, "bias": columns},
        "attention.v": {"weight": columns, "bias": columns},
        "attention.q_norm": {"weight": of_all_heads, "bias": of_all_heads},
        "attention.k_norm": {"weight": of_all_heads, "bias": of_all_heads},
        "attention.query": {"weight": of_all_heads},
        "attention.o": {"weight": rows, "bias": outside},
        "mlp_norm": {"weight": outside, "bias": outside},
        "mlp.gate": {"weight": columns, "bias": columns},
        "mlp.up": {"weight": columns, "bias": columns},
        "mlp.down": {"weight": rows, "bias": outside},
        "norm": {"weight": outside, "bias": outside},
        "head": {"weight": columns},  # shards the vocabulary
    }
    return {f"{module}.{leaf}": placement for module, leaves in table.items() for leaf, placement in leaves.items()}


def grid_table() -> dict[str, Placement]:
    """The placement of each parameter on a grid, by the end of its name (Xu et al. 2021; Wang et al. 2021).

    Every matrix, the vocabulary's too, is split by its outputs over columns and by its inputs over rows; products sum
    its gradient over the tokens of all rows. Vectors are split as the features that they scale or are added to, and the
    rows have terms of their gradients: the papers hold them on one row, and broadcast them each time.
    """
    matrix = Placement(shard={"column": 0, "row": 1}, replicated=("depth",), gradient_sum=("depth",))
    vector = Placement(shard={"column": 0}, replicated=("depth", "row"), gradient_sum=("depth", "row"))
    of_positions = Placement(shard={"column": 1}, replicated=("depth", "row"), gradient_sum=("depth", "row"))
    of_heads = Placement(replicated=("depth", "row", "column"), gradient_sum=("depth", "row", "column"))
    linear = {"weight": matrix, "bias": vector}
    norm = {"weight": vector, "bias": vector}
    table = {
        "embed.tokens": {"weight": matrix},
        "embed.positions": {"weight": of_positions},
        **dict.fromkeys(("embed_norm", "input_norm", "attention_norm", "mlp_norm", "norm"), norm),
        **{f"attention.{name}": linear for name in ("q", "k", "v", "o")},
        "attention.q_norm": {"weight": of_heads, "bias": of_heads},
        "attention.k_norm": {"weight": of_heads, "bias": of_heads},
        "attention.query": {"weight": of_positions},
        **{f"mlp.{name}": linear for name in ("gate", "up", "down")},
        "head": {"weight": matrix},
    }
    return {f"{module}.{leaf}": placement for module, leaves in table.items() for leaf, placement in leaves.items()}


def cube_table() -> dict[str, Placement]:
    """The placement of each parameter on a cube, by the end of its name (Bian et al. 2021, section 3).

    As on a grid, but that layers split the inputs of every matrix once more, and that the first products of attention
    and MLP have the rows as outputs and the columns as inputs: the stream has the features of columns.
    """
    inner = Placement(shard={"row": 0}, replicated=("depth", "column"), gradient_sum=("depth", "column"))
    first = {"weight": Placement(shard={"row": 0, "column": 1, "depth": 1}), "bias": inner}
    last = Placement(shard={"column": 0, "row": 1, "depth": 1})
    table = grid_table() | {"embed.tokens.weight": first["weight"], "head.weight": first["weight"]}
    for name in ("attention.q", "attention.k", "attention.v", "mlp.gate", "mlp.up"):
        table |= {f"{name}.{leaf}": placement for leaf, placement in first.items()}
    return table | {"attention.o.weight": last, "mlp.down.weight": last}


def _tensor_table(layout: ParallelConfig) -> dict[str, Placement]:
    if layout.tensor == "1d":
        return tensor_parallel_table(layout.sequence_parallel)
    return cube_table() if layout.tensor == "3d" else grid_table()


def placement_table(decoder: Decoder, layout: ParallelConfig) -> dict[str, Placement]:
    """The placement of every parameter of the whole decoder, by name; a tied matrix has both its names."""
    table = _tensor_table(layout)
    tied = bool(decoder.config.tied) and layout.stages > 1
    placements = {}
    for name, _ in decoder.named_parameters(remove_duplicate=False):
        found = [row for end, row in table.items() if f".{name}".endswith(f".{end}")]
        assert len(found) == 1, f"{name} has {len(found)} rows in the placement table"
        twice = TIED if tied and name in ("embed.tokens.weight", "head.weight") else Placement()
        placements[name] = found[0] | DATA_PARALLEL | twice
    return placements
