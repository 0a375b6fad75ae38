"""ModelFamily: a model type of transformers, as a table of its tensors' names and of its config.json's fields."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from gristmill.errors import UsageError
from training.model.model_config import ModelConfig

# How a Hugging Face tensor holds our matrices, which are (outputs, inputs) like nn.Linear's:
# "linear": as they are; "conv1d": (inputs, outputs), several concatenated along the outputs (GPT-2);
# "experts": of all experts, (experts, inputs, outputs), several as neighbouring outputs (gpt-oss);
# "rotated heads", "rotated": the last rows, of each head or of all, are rotated, a pair of them being neighbours
# (DeepSeek), and here the first half and the second; "buffer": no weight or bias, but of this whole name;
# "per head": several, interleaved head by head along the outputs: (heads, several, head width) rows (GPT-NeoX, BLOOM)
TensorLayout = Literal["linear", "conv1d", "per head", "experts", "rotated heads", "rotated", "buffer"]


# transformers' names of the activations: ours. "gelu" is exact there, and the tanh approximation is here
ACTIVATIONS = {
    "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu", "gelu": "gelu-exact", "relu": "relu",
    "quick_gelu": "gelu-fast",
}  # fmt: skip
QKV = "blocks.{}.attention.q blocks.{}.attention.k blocks.{}.attention.v"


class TensorRow(NamedTuple):
    """A row of a family's table of tensors; {} in the names is the layer's number. Stands for weight and bias.

    A second {} in their name is an expert's number: our parameter has the matrices of all experts.
    """

    theirs: str
    ours: str
    """Our name, or names separated by spaces where one tensor holds several of our parameters."""
    layout: TensorLayout = "linear"


def read_activation(config: Mapping[str, Any], field: str) -> str:
    """ModelConfig.mlp of an MLP without gate. Raises UsageError for an activation that our model lacks."""
    if config[field] not in ACTIVATIONS:
        raise UsageError(f"its {field} is {config[field]!r}; our model implements {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[config[field]]


def write_activation(model: ModelConfig) -> str:
    """transformers' name of a model's activation; of a gated MLP any, as the family has none."""
    return next((theirs for theirs, ours in ACTIVATIONS.items() if ours == model.mlp), "gelu_new")


class FieldGroup(NamedTuple):
    """Fields of config.json that are not the same as ours one by one."""

    read: Callable[[dict[str, Any]], dict[str, Any]]
    """Values of ModelConfig, from config.json with all defaults. Raises UsageError for what we lack."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """Fields of config.json, from a resolved ModelConfig."""


@dataclass(frozen=True)
class ModelFamily:
    """How a model type is written in our terms: a table of tensors, a table of fields, and what is neither.

    A field of config.json is in `defaults` if it can change what the model computes, else in `ignored`; a field in
    neither is refused, as nobody knows what it means.
    """

    model_type: str
    """config.json's model_type."""
    architecture: str
    """transformers' class with the output matrix."""
    preset: str
    """Our preset with the same parts, or the nearest."""
    body: str
    """Prefix of all tensors but the output matrix's; files of a model without output matrix omit it."""
    tensors: tuple[TensorRow, ...]
    parts: Mapping[str, Any]
    """Values that fields of ModelConfig have in every model of the family."""
    fields: Mapping[str, str]
    """Field of ModelConfig: field of config.json with the same meaning."""
    defaults: Mapping[str, Any]
    """Fields of config.json that can change what the model computes: the defaults of transformers' class."""
    accepted: Mapping[str, tuple[Any, ...]]
    """Fields of config.json: the values that we implement; the first one is exported."""
    ignored: frozenset[str] = frozenset()
    """Further fields of config.json, which change nothing: dropout, heads for other tasks, order of summation."""
    nullable: frozenset[str] = frozenset()
    """Fields of config.json whose null is a value of its own, and not the default."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of fields, in older files: the name."""
    buffers: tuple[str, ...] = ()
    """Ends of names of tensors in older files that are no parameters."""
    beyond: str = ""
    """Prefix of the tensors of a layer after the last, of number {}, which predicts further tokens and is left out."""
    forces_tokenizer: bool = False
    """True if AutoTokenizer reads every folder of this type by the type's own class, whatever the folder says."""
    groups: tuple[FieldGroup, ...] = ()
    """Further fields, in the order in which they are written."""

    @property
    def head(self) -> str:
        """Return the name of the output matrix's tensor."""
        return next(f"{row.theirs}.weight" for row in self.tensors if row.ours == "head")


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
        "truncate": "rope_truncate",
    },
}  # fmt: skip
_WITHOUT_EFFECT = (("partial_rotary_factor", 1.0), ("truncate", True))  # transformers' defaults


def read_rope(config: dict[str, Any], default_base: float = 10_000.0) -> dict[str, Any]:
    """ModelConfig's fields of the rotary positions. Raises UsageError for a scaling that our model lacks."""
    for name in ("rope_scaling", "rope_parameters"):
        if not isinstance(config[name], dict | None):
            raise UsageError(f"its {name} is {config[name]!r}; expected fields such as rope_type")
    scaling = dict(config["rope_scaling"] or config["rope_parameters"] or {})
    base = scaling.pop("rope_theta", None) or config["rope_theta"] or default_base
    kind = scaling.pop("rope_type", None)
    old_name = scaling.pop("type", None)
    kind = kind or old_name or "default"
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise UsageError(f"its rope_type is {kind!r}; our model implements {', '.join(_SCALINGS)}")
    names = _SCALINGS[kind]
    for key, value in scaling.items():
        if key not in names and value is not None and (key, value) not in _WITHOUT_EFFECT:
            raise UsageError(f"its rope_scaling has {key} {value!r}, which our model does not implement for {kind}")
    options = {ours: scaling[theirs] for theirs, ours in names.items() if scaling.get(theirs) is not None}
    if "original_max_position_embeddings" in names:
        options.setdefault("rope_original_context", config["max_position_embeddings"])
    return {"rope_base": base, "rope_scaling": "none" if kind == "default" else kind, **options}


def write_rope(model: ModelConfig) -> dict[str, Any]:
    """Return the fields as transformers 4 has them, which transformers 5 reads, too."""
    scaling = None
    if model.rope_scaling != "none":
        names = _SCALINGS[str(model.rope_scaling)]
        scaling = {"rope_type": model.rope_scaling} | {theirs: getattr(model, ours) for theirs, ours in names.items()}
    return {"rope_theta": model.rope_base, "rope_scaling": scaling}


ROPE = FieldGroup(read_rope, write_rope)
ATTENTION_BIAS = FieldGroup(
    lambda config: dict.fromkeys(("qkv_bias", "out_bias"), config["attention_bias"]),
    lambda model: {"attention_bias": model.qkv_bias},
)
WINDOW = FieldGroup(
    lambda config: {} if config["sliding_window"] is None else {"window": config["sliding_window"]},
    lambda model: {"sliding_window": model.window or None},
)
