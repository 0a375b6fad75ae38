"""Fields of config.json for rotary positions: transformers 5's rope_parameters, or 4's rope_theta and rope_scaling."""

from typing import Any

from gristmill.errors import UsageError
from training.model.model_config import ModelConfig

# Of every family with rotary positions; the default base is its own
ROPE_DEFAULTS: dict[str, Any] = {"rope_theta": None, "rope_scaling": None, "rope_parameters": None}
# rope_type: its fields, each with ModelConfig's of the same meaning
_SCALINGS: dict[str, dict[str, str]] = {
    "default": {},
    "linear": {"factor": "rope_factor"},
    "llama3": {
        "factor": "rope_factor", "original_max_position_embeddings": "rope_original_context",
        "low_freq_factor": "rope_low", "high_freq_factor": "rope_high",
    },
    "yarn": {
        "factor": "rope_factor", "original_max_position_embeddings": "rope_original_context",
        "beta_slow": "rope_low", "beta_fast": "rope_high", "attention_factor": "rope_attention_factor",
    },
}  # fmt: skip
_WITHOUT_EFFECT = (("partial_rotary_factor", 1.0), ("truncate", True))  # transformers' defaults


def read_rope(config: dict[str, Any], default_base: float = 10_000.0) -> dict[str, Any]:
    """ModelConfig's fields of the rotary positions. Raises UsageError for a scaling that our model lacks."""
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(config[name], dict | None):
            raise UsageError(f"its {name} is {config[name]!r}; wanted fields such as rope_type")
    scaling = dict(config["rope_scaling"] or config["rope_parameters"] or {})
    base = scaling.pop("rope_theta", None) or config["rope_theta"] or default_base
    kind, old_name = scaling.pop("rope_type", None), scaling.pop("type", None)
    kind = kind or old_name or "default"
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise UsageError(f"its rope_type is {kind!r}; our model implements {', '.join(_SCALINGS)}")
    names = _SCALINGS[kind]
    for key, value in scaling.items():
        if key not in names and value is not None and (key, value) not in _WITHOUT_EFFECT:
            raise UsageError(f"its rope_scaling has {key} {value!r}, which our model does not implement for {kind}")
    found = {ours: scaling[theirs] for theirs, ours in names.items() if scaling.get(theirs) is not None}
    if "original_max_position_embeddings" in names:
        found.setdefault("rope_original_context", config["max_position_embeddings"])
    return {"rope_base": base, "rope_scaling": "none" if kind == "default" else kind, **found}


def write_rope(model: ModelConfig) -> dict[str, Any]:
    """The fields as transformers 4 has them, which transformers 5 reads, too."""
    scaling = None
    if model.rope_scaling != "none":
        names = _SCALINGS[str(model.rope_scaling)]
        scaling = {"rope_type": model.rope_scaling} | {theirs: getattr(model, ours) for theirs, ours in names.items()}
    return {"rope_theta": model.rope_base, "rope_scaling": scaling}
