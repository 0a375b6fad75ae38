"""Reference models: the plain decoder and transformers' models of a case, with its initial weights, and the optimizers.

In one process and in float64; parameters have our names.
"""

from typing import Any

import torch
from torch import Tensor

from gristmill_parity.cases import Case
from gristmill_parity.plain.decoder import IGNORED, PlainDecoder, PlainSizes
from gristmill_parity.plain.muon import PlainMuon
from gristmill_parity.plain.variants import PlainParts, PlainVariant
from gristmill_parity.worker import ADAMW, LR, SEED
from training.hugging_face.hf_config import find_family, write_hf_config
from training.hugging_face.hf_tensors import hf_tensors
from training.model.batch import Batch
from training.model.decoder import meta_decoder
from training.parallel.initialize import init_shard
from training.sharding.shard_spec import ShardSpec

Named = dict[str, Tensor]


class PlainModel:
    """The plain decoder."""

    def __init__(self, case: Case) -> None:
        model = case.model
        self.weights = {name: w.requires_grad_() for name, w in initial_weights(case).items()}
        self.parameters = list(self.weights.values())
        base = model.rope_base if model.positions == "rope" else 0.0
        sizes = PlainSizes(
            model.layers, model.heads, model.kv_heads, model.norm_eps, base, model.dropout, str(model.rope_scaling),
            model.rope_factor, model.rope_original_context, (model.rope_low, model.rope_high),
            model.rope_attention_factor, model.window or 0,
        )  # fmt: skip
        parts = PlainParts(
            str(model.residual),
            str(model.mlp),
            model.positions == "alibi",
            model.rotary_dim,
            model.position_offset or 0,
        )
        plain = case.preset in ("llama", "gpt2") or model.norm == "rms"
        self._decoder = PlainDecoder(self.weights, sizes) if plain else PlainVariant(self.weights, sizes, parts)
        self.logits = self._decoder.logits

    def loss(self, batch: Batch) -> Tensor:
        return self._decoder.loss(batch.ids, batch.targets, batch.sample_ids)

    def named(self, kind: str) -> Named:
        """The "data" or "grad" of the parameters by our names."""
        return {name: getattr(w, kind) for name, w in self.weights.items()}


class TransformersModel:
    """transformers' own model of the family, with our names by the tables of import and export."""

    def __init__(self, case: Case) -> None:
        import transformers  # takes seconds, and may be missing

        family = find_family(case.model)
        fields: dict[str, Any] = write_hf_config(family, case.model, 0, torch.float64)
        config = transformers.AutoConfig.for_model(**fields)
        self._model = transformers.AutoModelForCausalLM.from_config(config).double()
        self._tensors, self._head = hf_tensors(family, case.model), family.head
        self.parameters = list(self._model.parameters())
        initial = initial_weights(case)
        for tensor in self._tensors:
            for name, pieces in tensor.pieces(self._theirs(tensor.name).data).items():
                for view, spec in pieces:
                    view.copy_(initial[name][spec.slices])

    def logits(self, ids: Tensor) -> Tensor:
        found: Tensor = self._model(ids).logits
        return found

    def loss(self, batch: Batch) -> Tensor:
        return summed_loss(self.logits(batch.ids), batch.targets)

    def named(self, kind: str) -> Named:
        """The "data" or "grad" of the parameters by our names."""
        parts = [tensor.parameters_of(getattr(self._theirs(tensor.name), kind)) for tensor in self._tensors]
        return {name: values for found in parts for name, values in found.items()}

    def _theirs(self, name: str) -> Tensor:
        """Their parameter; the output matrix may have another name in memory than in files."""
        found: Tensor = (
            self._model.get_output_embeddings().weight if name == self._head else self._model.get_parameter(name)
        )
        return found


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed cross-entropy in nats, 0-d, of logits (B, T, V) and targets (B, T)."""
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def initial_weights(case: Case) -> Named:
    """The case's initial weights by name, rounded to its parameters' dtype, in float64."""
    config = case.model
    dtype = torch.float64 if case.precision == "fp64" else torch.float32
    found = {}
    for name, parameter in meta_decoder(config).named_parameters():
        values = torch.empty(parameter.shape, dtype=dtype)
        init_shard(values, name, ShardSpec.whole(tuple(values.shape)), config, SEED)
        found[name] = values.double()
    return found


def reference_optimizer(case: Case, model: PlainModel | TransformersModel) -> torch.optim.Optimizer | PlainMuon:
    """torch's plain SGD, or its AdamW, with which matrices decay and norms and biases do not; or plain Muon."""
    if case.optimizer == "sgd":
        return torch.optim.SGD(model.parameters, lr=LR)
    matrices: list[Tensor] = []
    if case.optimizer == "muon":
        assert isinstance(model, PlainModel)
        matrices = [w for name, w in model.weights.items() if name.startswith("blocks.") and w.ndim == 2]
    rest = [w for w in model.parameters if not any(w is matrix for matrix in matrices)]
    groups = [
        {"params": [p for p in rest if (p.ndim >= 2) is decays], "weight_decay": decay}
        for decays, decay in ((True, ADAMW.weight_decay), (False, 0.0))
    ]
    adamw = torch.optim.AdamW(groups, lr=ADAMW.lr, betas=ADAMW.betas, eps=ADAMW.eps)
    if case.optimizer == "adamw":
        return adamw
    return PlainMuon(matrices, adamw, ADAMW.lr, ADAMW.weight_decay, ADAMW.muon_momentum)


def clip_and_update(
    case: Case, model: PlainModel | TransformersModel, optimizer: torch.optim.Optimizer | PlainMuon
) -> None:
    """Update the model by its gradients, which are clipped as the case says."""
    if case.optimizer != "sgd":
        torch.nn.utils.clip_grad_norm_(model.parameters, ADAMW.max_grad_norm)
    optimizer.step()
