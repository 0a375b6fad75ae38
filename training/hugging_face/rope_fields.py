"""Fields of config.json for rotary positions: transformers 5's rope_parameters, or 4's rope_theta and rope_scaling."""

from typing import Any

from gristmill.errors import UsageError

# Of every family with rotary positions; the default base is its own
ROPE_DEFAULTS: dict[str, Any] = {"rope_theta": None, "rope_scaling": None, "rope_parameters": None}


def read_rope(config: dict[str, Any], default_base: float = 10_000.0) -> dict[str, Any]:
    """ModelConfig's fields of the rotary positions. Raises UsageError for a scaling that our model lacks."""
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(config[name], dict | None):
            raise UsageError(f"its {name} is {config[name]!r}; wanted fields such as rope_type")
    scaling = dict(config["rope_scaling"] or config["rope_parameters"] or {})
    base = scaling.pop("rope_theta", None) or config["rope_theta"] or default_base
    kind = scaling.pop("rope_type", None) or scaling.pop("type", "default")
    rest = {key: value for key, value in scaling.items() if (key, value) != ("partial_rotary_factor", 1.0)}
    if kind != "default" or rest:
        raise UsageError(f"its rope_scaling is {rest | {'rope_type': kind}!r}; our model implements None only")
    return {"rope_base": base}
