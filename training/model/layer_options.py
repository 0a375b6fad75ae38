"""Options of rotary positions, latent attention and sparse layers: their defaults, and the checks that they fit."""

import math
from typing import Any

from gristmill.errors import require
from training.model.model_options import ModelOptions

_TURNS = {"llama3": (1.0, 4.0), "yarn": (1.0, 32.0)}  # rope_low and rope_high


def rope_defaults(config: ModelOptions) -> dict[str, Any]:
    """Return the options of RoPE's scaling with every default filled in."""
    kind = config.rope_scaling or "none"
    factor = config.rope_factor or 1.0
    low, high = _TURNS.get(kind, (0.0, 0.0))
    attention = 0.1 * math.log(max(1.0, factor)) + 1 if kind == "yarn" else 1.0  # Peng et al. 2023, equation 22
    return {
        "rope_fraction": config.rope_fraction or 1.0,
        "rope_scaling": kind,
        "rope_factor": factor,
        "rope_low": config.rope_low or low,
        "rope_high": config.rope_high or high,
        "rope_truncate": config.rope_truncate is not False,
        "rope_attention_factor": config.rope_attention_factor or attention,
    }


def check_rope(config: ModelOptions) -> None:
    """Raise UsageError for rotary options that do not fit together, or that have no effect."""
    require(
        config.positions != "rope" or (config.rotary_dim > 0 and config.rotary_dim % 2 == 0),
        f"rotary positions need an even number of features per head, and of a head's {config.head_dim} are "
        f"{config.rotary_dim} rotated; try another --model.heads, --model.head_dim or --model.rope_fraction",
    )
    for name, none in (("rope_fraction", 1), ("rope_scaling", "none")):
        value = getattr(config, name)
        require(
            config.positions == "rope" or value == none,
            f"model.{name} {value} needs rotary positions, and model.positions is {config.positions}; "
            f"try --model.positions rope, or --model.{name} {none}",
        )
    kind = config.rope_scaling
    require(
        config.rope_factor == 1 if kind == "none" else config.rope_factor > 1,
        f"model.rope_factor is {config.rope_factor} and model.rope_scaling {kind}; "
        "expected a factor above 1 with a scaling, and none without; "
        "try --model.rope_scaling linear --model.rope_factor 2",
    )
    unused = {} if kind in _TURNS else {"rope_original_context": 0, "rope_low": 0, "rope_high": 0}
    unused |= {} if kind == "yarn" else {"rope_attention_factor": 1, "rope_truncate": True}
    for name, none in unused.items():
        value = getattr(config, name)
        require(value == none, f"model.{name} {value} has no effect with model.rope_scaling {kind}; leave it out")
    if kind in _TURNS:
        require(
            config.rope_original_context > 0,
            f"model.rope_scaling {kind} needs the length of pre-training's sequences; "
            "try --model.rope_original_context 8192",
        )
        require(
            0 < config.rope_low < config.rope_high,
            f"model.rope_low is {config.rope_low} and model.rope_high {config.rope_high}; expected low below high, "
            f"both above 0; try --model.rope_low {_TURNS[kind][0]} --model.rope_high {_TURNS[kind][1]}",
        )
        require(config.rope_base > 1, f"model.rope_base is {config.rope_base}; expected more than 1; try 10000")


ROTATED_OR_NOT = ("qk_nope_head_dim", "qk_rope_head_dim")
"""Features of a query with latent attention, in this order."""


def latent_defaults(config: ModelOptions) -> dict[str, Any]:
    """Return the widths of latent attention's heads with every default filled in; zeros without it."""
    if not config.kv_lora_rank:
        return {name: getattr(config, name) for name in (*ROTATED_OR_NOT, "v_head_dim")}
    plain = config.qk_nope_head_dim or config.width // max(1, config.heads)
    rotated = config.qk_rope_head_dim or 2 * max(1, plain // 4)
    return {"qk_nope_head_dim": plain, "qk_rope_head_dim": rotated, "v_head_dim": config.v_head_dim or plain}


def check_latent(config: ModelOptions) -> None:
    """Raise UsageError for options of latent attention that do not fit together, or that have no effect."""
    if not config.kv_lora_rank:
        for name in ("q_lora_rank", *ROTATED_OR_NOT, "v_head_dim", "rope_mscale_all_dim"):
            value = getattr(config, name)
            require(
                not value,
                f"model.{name} {value} has no effect without latent attention; try --model.kv_lora_rank 512, or leave "
                "it out",
            )
        return
    needed = {"positions": "rope", "rope_fraction": 1.0, "kv_heads": config.heads, "qk_norm": False}
    needed |= {"qkv_bias": False, "out_bias": False, "query_layer": False}
    needed |= {"head_dim": config.qk_nope_head_dim + config.qk_rope_head_dim}
    for name, value in needed.items():
        given = getattr(config, name)
        require(
            given == value,
            f"model.kv_lora_rank {config.kv_lora_rank} makes attention latent, which needs model.{name} "
            f"{str(value).lower()} and not {str(given).lower()}; try --model.{name} {str(value).lower()}",
        )
    require(
        config.residual != "deepnorm",
        f"model.kv_lora_rank {config.kv_lora_rank} and model.residual deepnorm: with latent attention, values would "
        "get the initial weights of keys; try --model.residual pre-norm",
    )
    require(
        config.v_head_dim <= config.head_dim,
        f"model.v_head_dim {config.v_head_dim} is above the {config.head_dim} of model.qk_nope_head_dim and "
        f"qk_rope_head_dim, to which values are padded; try --model.v_head_dim {config.head_dim}",
    )
    require(
        not config.rope_mscale_all_dim or config.rope_scaling == "yarn",
        f"model.rope_mscale_all_dim {config.rope_mscale_all_dim} has no effect with model.rope_scaling "
        f"{config.rope_scaling}; leave it at 0",
    )


_COUNTS = ("experts_per_token", "expert_width", "shared_experts", "dense_layers", "expert_groups", "groups_per_token")
_LOADS = ("capacity_factor", "balance_loss", "balance_rate", "router_z_loss")


def expert_defaults(config: ModelOptions, ffn_width: int) -> dict[str, Any]:
    """Return the options of sparse layers with every default filled in; of a dense model those that have no effect."""
    defaults: dict[str, Any] = {
        "sparse_every": config.sparse_every or 1,
        "router": config.router or "softmax",
        "router_normalize": config.router_normalize is not False,
        "router_bias": bool(config.router_bias),
        "router_scale": config.router_scale or 1.0,
    }
    if not config.experts:
        return {**defaults, "balance": config.balance or "none"}
    balance = config.balance or "sequence"
    groups = config.expert_groups or 1
    return {
        **defaults,
        "experts_per_token": config.experts_per_token or min(2, config.experts),
        "expert_width": config.expert_width or ffn_width,
        "expert_groups": groups,
        "groups_per_token": config.groups_per_token or groups,
        "balance": balance,
        "balance_loss": config.balance_loss or (0.01 if balance in ("switch", "sequence") else 0.0),
        "balance_rate": config.balance_rate or (0.001 if balance == "bias" else 0.0),
    }


def check_experts(config: ModelOptions) -> None:
    """Raise UsageError for options of sparse layers that do not fit together, or that have no effect."""
    if not config.experts:
        unused = {**dict.fromkeys((*_COUNTS, *_LOADS), 0), "sparse_every": 1, "router": "softmax"}
        unused |= {"router_normalize": True, "router_scale": 1.0, "router_bias": False, "balance": "none"}
        for name, none in unused.items():
            value = getattr(config, name)
            require(
                value == none,
                f"model.{name} {value} has no effect without experts; try --model.experts 8, or leave it out",
            )
        return
    experts = config.experts
    chosen = config.experts_per_token
    groups = config.expert_groups
    require(
        chosen <= experts,
        f"model.experts_per_token {chosen} is above model.experts {experts}; try --model.experts_per_token {experts}",
    )
    require(
        config.is_gated,
        f"model.experts {experts} needs gated MLPs, and model.mlp is {config.mlp}; try --model.mlp swiglu",
    )
    require(
        not config.mlp_bias or not config.shared_experts,
        f"model.shared_experts {config.shared_experts} have no biases, and model.mlp_bias is true; "
        "try --model.mlp_bias false",
    )
    require(
        bool(config.sparse_layers),
        f"model.dense_layers {config.dense_layers} and model.sparse_every {config.sparse_every} leave none of the "
        f"{config.layers} layers to the experts; try --model.dense_layers 0 --model.sparse_every 1",
    )
    divisors = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
    require(
        experts % groups == 0,
        f"model.experts {experts} do not divide into model.expert_groups {groups}; try one of {divisors}",
    )
    require(
        config.groups_per_token <= groups,
        f"model.groups_per_token {config.groups_per_token} is above model.expert_groups {groups}; try "
        f"--model.groups_per_token {groups}",
    )
    within = config.groups_per_token * experts // groups
    require(
        chosen <= within,
        f"model.experts_per_token {chosen} is above the {within} experts of model.groups_per_token "
        f"{config.groups_per_token}; try --model.groups_per_token {-(-chosen * groups // experts)}",
    )
    require(
        not config.capacity_factor or config.capacity_factor >= 1,
        f"model.capacity_factor is {config.capacity_factor}; expected 1 or more, with which equal loads fit, or 0: no "
        "token is dropped; try --model.capacity_factor 1.25",
    )
    require(
        config.balance != "none" or not config.balance_loss,
        f"model.balance_loss {config.balance_loss} has no effect with model.balance none; try --model.balance sequence",
    )
    require(
        config.balance == "bias" or not config.balance_rate,
        f"model.balance_rate {config.balance_rate} has no effect with model.balance {config.balance}; "
        "try --model.balance bias",
    )


def check_blocks(config: ModelOptions, recompute: str, compiled: bool) -> None:
    """Raise UsageError for recomputation or compilation of blocks with sinks or experts that torch does not support."""
    require(
        not config.sinks or recompute != "selective",
        "memory.recompute selective and model.sinks: it keeps the results of products, which for attention with sinks "
        "include the scores of all tokens; try --memory.recompute full",
    )
    require(
        not compiled or recompute == "none" or not (config.experts or config.sinks),
        f"compile and memory.recompute {recompute} with model.experts {config.experts} and model.sinks "
        f"{str(bool(config.sinks)).lower()}: a recomputed block is compiled in one piece, which experts and sinks are "
        "not; try --compile false, or --memory.recompute none",
    )
