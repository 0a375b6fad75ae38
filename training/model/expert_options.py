"""Options of sparse layers: their defaults, and the check that they fit together."""

from typing import TYPE_CHECKING, Any

from gristmill.errors import require

if TYPE_CHECKING:
    from training.model.model_config import ModelConfig

_COUNTS = ("experts_per_token", "expert_width", "shared_experts", "dense_layers", "expert_groups", "groups_per_token")
_LOSSES = ("balance_loss", "balance_rate", "router_z_loss")


def expert_defaults(config: "ModelConfig", ffn_width: int) -> dict[str, Any]:
    """The options of sparse layers with every default filled in; of a dense model those that have no effect."""
    found: dict[str, Any] = {
        "sparse_every": config.sparse_every or 1,
        "router": config.router or "softmax",
        "router_normalize": config.router_normalize is not False,
        "router_scale": config.router_scale or 1.0,
    }
    if not config.experts:
        return {**found, "balance": config.balance or "none"}
    balance = config.balance or "sequence"
    groups = config.expert_groups or 1
    return {
        **found,
        "experts_per_token": config.experts_per_token or min(2, config.experts),
        "expert_width": config.expert_width or ffn_width,
        "expert_groups": groups,
        "groups_per_token": config.groups_per_token or groups,
        "balance": balance,
        "balance_loss": config.balance_loss or (0.01 if balance in ("switch", "sequence") else 0.0),
        "balance_rate": config.balance_rate or (0.001 if balance == "bias" else 0.0),
    }


def check_experts(config: "ModelConfig") -> None:
    """Raise UsageError for options of sparse layers that do not fit together, or that have no effect."""
    if not config.experts:
        unused = {**dict.fromkeys((*_COUNTS, *_LOSSES), 0), "sparse_every": 1, "router": "softmax"}
        unused |= {"router_normalize": True, "router_scale": 1.0, "balance": "none"}
        for name, none in unused.items():
            value = getattr(config, name)
            require(
                value == none,
                f"model.{name} {value} has no effect without experts; try --model.experts 8, or leave it out",
            )
        return
    experts, chosen, groups = config.experts, config.experts_per_token, config.expert_groups
    require(
        chosen <= experts,
        f"model.experts_per_token {chosen} is above model.experts {experts}; try --model.experts_per_token {experts}",
    )
    require(
        config.is_gated and not config.mlp_bias,
        f"model.experts {experts} needs gated MLPs without biases, and model.mlp is {config.mlp}, model.mlp_bias "
        f"{config.mlp_bias}; try --model.mlp swiglu --model.mlp_bias false",
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
        config.balance != "none" or not config.balance_loss,
        f"model.balance_loss {config.balance_loss} has no effect with model.balance none; try --model.balance sequence",
    )
    require(
        config.balance == "bias" or not config.balance_rate,
        f"model.balance_rate {config.balance_rate} has no effect with model.balance {config.balance}; "
        "try --model.balance bias",
    )
