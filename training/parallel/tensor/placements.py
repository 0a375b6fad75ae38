"""Placements: which rows or columns of each parameter a tensor-parallel rank has."""

from torch import nn

from training.model.own_parts import own_weights
from training.sharding.placement import Placement

KV = "kv"
"""The axis of the tensor-parallel ranks that have the same head of keys and values."""


def joint_norms(copies: int) -> dict[str, Placement]:
    """The rows of norms over all heads together, in place of those of each head: divided like queries and keys."""
    rows = tensor_parallel_table(False, copies)
    return {f"attention.{name}_norm.weight": rows[f"attention.{name}.bias"] for name in ("q", "k")}


def own_placements(model: nn.Module, sequence_parallel: bool) -> dict[str, Placement]:
    """Return the placements of parameters of own parts of the user's, as these say, by the parameters' names."""
    outside = Placement(replicated=("tp",), gradient_sum=("tp",) if sequence_parallel else ())
    rows = {
        "colwise": Placement(shard={"tp": 0}),
        "rowwise": Placement(shard={"tp": 1}),
        "partial": Placement(replicated=("tp",), gradient_sum=("tp",)),
        "replicated": outside,
    }
    placed = own_weights(model).items()
    return {name: rows[weight.placement] for name, weight in placed if weight.placement is not None}


def tensor_parallel_table(sequence_parallel: bool, copies: int = 1) -> dict[str, Placement]:
    """Megatron's placement of each parameter over "tp", by the end of its name (Shoeybi et al. 2019, section 3).

    Norms, learned positions and biases of row-parallel products act outside the tensor-parallel regions. There each
    rank has all tokens and computes the same gradient, or with sequence parallelism some of the tokens and a term of it
    (Korthikanti et al. 2022, section 4.2.2). `copies`: ranks that have the same head of keys and values. Each attends
    with queries of its own, and so computes a term of that head's gradient.
    """
    # torch stores (outputs, inputs)
    colwise = Placement(shard={"tp": 0})
    rowwise = Placement(shard={"tp": 1})
    vocab = Placement(shard={"tp": 0})
    shared = Placement(shard={"tp": 0}, repeat={"tp": copies}, replicated=(KV,), gradient_sum=(KV,))
    of_kv = shared if copies > 1 else colwise
    outside = Placement(replicated=("tp",), gradient_sum=("tp",) if sequence_parallel else ())
    of_all_heads = Placement(replicated=("tp",), gradient_sum=("tp",))  # each rank's own give a term of its gradient
    of_outputs = Placement(shard={"tp": 1})
    table = {
        "embed.tokens": {"weight": vocab},
        "embed.positions": {"weight": outside},
        "embed_norm": {"weight": outside, "bias": outside},
        "input_norm": {"weight": outside, "bias": outside},
        "attention_norm": {"weight": outside, "bias": outside},
        "attention.q": {"weight": colwise, "bias": colwise},  # shards the heads
        "attention.k": {"weight": of_kv, "bias": of_kv},
        "attention.v": {"weight": of_kv, "bias": of_kv},
        "attention.q_norm": {"weight": of_all_heads, "bias": of_all_heads},
        "attention.k_norm": {"weight": of_all_heads, "bias": of_all_heads},
        "attention.q_a": {"weight": of_all_heads},  # latent attention: each rank expands them to its own heads
        "attention.q_a_norm": {"weight": of_all_heads},
        "attention.q_b": {"weight": colwise},
        "attention.kv_a": {"weight": of_all_heads},
        "attention.kv_a_norm": {"weight": of_all_heads},
        "attention.kv_b": {"weight": colwise},
        "attention": {"sinks": colwise},
        "attention.query": {"weight": of_all_heads},
        "attention.o": {"weight": rowwise, "bias": outside},
        "mlp_norm": {"weight": outside, "bias": outside},
        "mlp.gate": {"weight": colwise, "bias": colwise},
        "mlp.up": {"weight": colwise, "bias": colwise},
        "mlp.down": {"weight": rowwise, "bias": outside},
        "mlp.router": {
            "weight": of_all_heads,
            "bias": of_all_heads,
        },  # each rank weights its own part of the experts' outputs
        "experts.gate": {"weight": of_outputs, "bias": of_outputs},  # (experts, outputs, inputs), (experts, outputs)
        "experts.up": {"weight": of_outputs, "bias": of_outputs},
        "experts.down": {"weight": Placement(shard={"tp": 2}), "bias": of_all_heads},  # each rank adds a part of it
        "shared.gate": {"weight": colwise},
        "shared.up": {"weight": colwise},
        "shared.down": {"weight": rowwise},
        "norm": {"weight": outside, "bias": outside},
        "head": {"weight": vocab},
    }
    placements = dict[str, Placement]()
    for module, leaves in table.items():
        for leaf, placement in leaves.items():
            placements[f"{module}.{leaf}"] = placement
    return placements
