"""Sparse models of the certificate, by name: options that together use every part of a sparse layer."""

from collections.abc import Mapping
from typing import Any

SPARSE: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "switch": {
        "experts": 8, "experts_per_token": 2, "expert_width": 48, "balance": "switch", "balance_loss": 0.5,
        "router_z_loss": 0.05,
    },
    "sequence": {
        "experts": 5, "experts_per_token": 2, "expert_width": 24, "router_normalize": False, "shared_experts": 2,
        "dense_layers": 1, "balance": "sequence", "balance_loss": 0.5,
    },
    "bias": {
        "experts": 6, "experts_per_token": 3, "expert_width": 48, "router": "sigmoid", "router_scale": 2.5,
        "expert_groups": 3, "groups_per_token": 2, "sparse_every": 2, "balance": "bias", "balance_rate": 0.05,
        "balance_loss": 0.3, "router_z_loss": 0.05,
    },
    # DeepSeek-V3's attention and sparse layers; 8 heads, of 8 features that are not rotated and 4 that are
    "latent": {
        "kv_heads": 0, "q_lora_rank": 20, "kv_lora_rank": 14, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 6, "experts": 6, "experts_per_token": 2, "expert_width": 24, "shared_experts": 1,
        "dense_layers": 1, "router": "sigmoid", "router_scale": 2.5, "expert_groups": 3, "groups_per_token": 2,
        "balance": "bias", "balance_rate": 0.05, "rope_scaling": "yarn", "rope_factor": 4.0, "rope_base": 500.0,
        "rope_original_context": 8, "rope_mscale_all_dim": 1.0,
    },
    "latent, all": {
        "kv_heads": 0, "kv_lora_rank": 20, "experts": 3, "experts_per_token": 3, "expert_width": 48,
        "balance": "sequence",
    },
    # gpt-oss's attention and sparse layers
    "sinks": {
        "sinks": True, "window": 7, "full_attention_every": 2, "qkv_bias": True, "out_bias": True, "mlp_bias": True,
        "mlp": "swiglu-clamped", "router_bias": True, "experts": 6, "experts_per_token": 2, "expert_width": 24,
        "balance": "sequence", "balance_loss": 0.3, "rope_scaling": "yarn", "rope_factor": 4.0, "rope_base": 500.0,
        "rope_original_context": 8, "rope_truncate": False,
    },
    "sinks, all": {
        "sinks": True, "window": 7, "full_attention_every": 2, "mlp_bias": True, "mlp": "swiglu-clamped",
        "router_bias": True, "experts": 3, "experts_per_token": 3, "expert_width": 48, "balance": "sequence",
    },
    # an expert takes nine choices of each sequence, of which eight are its equal share
    "capacity": {
        "experts": 6, "experts_per_token": 2, "expert_width": 24, "capacity_factor": 1.1, "dense_layers": 1,
        "balance": "sequence", "balance_loss": 0.3,
    },
    # 16 bits round scores, so that a token may choose other experts than in float64: here it has all
    "all": {"experts": 3, "experts_per_token": 3, "expert_width": 48, "shared_experts": 1, "balance": "sequence"},
}  # fmt: skip
