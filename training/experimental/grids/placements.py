"""Placements: the block of each parameter that a rank of a grid or a cube has."""

from training.sharding.placement import Placement


def grid_table() -> dict[str, Placement]:
    """Return the placement of each parameter on a grid, by the end of its name (Xu et al. 2021; Wang et al. 2021).

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
    placements = dict[str, Placement]()
    for module, leaves in table.items():
        for leaf, placement in leaves.items():
            placements[f"{module}.{leaf}"] = placement
    return placements


def cube_table() -> dict[str, Placement]:
    """Return the placement of each parameter on a cube, by the end of its name (Bian et al. 2021, section 3).

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
