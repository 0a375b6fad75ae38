"""Family: a model type of transformers, as a table of its tensors' names and of its config.json's fields."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from gristmill.errors import UsageError
from training.model.model_config import ModelConfig

# How a Hugging Face tensor holds our matrices, which are (outputs, inputs) like nn.Linear's:
# "linear": as they are; "conv1d": (inputs, outputs), several concatenated along the outputs (GPT-2);
# "per head": several, interleaved head by head along the outputs: (heads, several, head width) rows (GPT-NeoX, BLOOM)
TensorLayout = Literal["linear", "conv1d", "per head"]


# transformers' names of the activations: ours. "gelu" is exact there, and the tanh approximation is here
ACTIVATIONS = {
    "gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu", "gelu": "gelu-exact", "relu": "relu",
    "quick_gelu": "gelu-fast",
}  # fmt: skip
QKV = "blocks.{}.attention.q blocks.{}.attention.k blocks.{}.attention.v"


class TensorRow(NamedTuple):
    """A row of a family's table of tensors; {} in the names is the layer's number. Stands for weight and bias."""

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


def _nothing(_: Any) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Family:
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
    forces_tokenizer: bool = False
    """True if AutoTokenizer reads every folder of this type by the type's own class, whatever the folder says."""
    read: Callable[[dict[str, Any]], dict[str, Any]] = _nothing
    """Further values of ModelConfig, from config.json with all defaults. Raises UsageError for what we lack."""
    write: Callable[[ModelConfig], dict[str, Any]] = _nothing
    """Further fields of config.json, from a resolved ModelConfig."""

    @property
    def head(self) -> str:
        """Name of the output matrix's tensor."""
        return next(f"{row.theirs}.weight" for row in self.tensors if row.ours == "head")
