"""Reference models: what a case is compared with, the plain decoder or transformers' own model of the family.

In float64, with the case's initial weights; parameters have our names.
"""

import importlib.util
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from gristmill_parity.cases import Case
from gristmill_parity.plain.decoder import IGNORED, PlainDecoder, PlainSizes
from gristmill_parity.plain.experts import PlainExperts, PlainRouting
from gristmill_parity.plain.variants import PlainLatentDecoder, PlainLatentSizes, PlainParts, PlainVariant
from gristmill_parity.worker import SEED
from training.hugging_face.hf_config import find_family, write_hf_config
from training.hugging_face.hf_tensors import HFTensor, hf_tensors, parameters_of, pieces_by_parameter
from training.model.batch import TokenBatch
from training.model.decoder import meta_decoder
from training.model.model_config import ModelConfig
from training.parallel.initialize import init_shard
from training.sharding.shard_spec import ShardSpec

Named = dict[str, Tensor]


class PlainModel:
    """The plain decoder."""

    def __init__(self, case: Case) -> None:
        model = case.model
        self.layers = model.layers
        self.weights = initial_weights(case)
        for weight in self.weights.values():
            weight.requires_grad_()
        self.parameters = list(self.weights.values())
        self._decoder = _plain_decoder(case, self.weights)
        self.experts: PlainExperts | None = None
        if model.experts:
            self.experts = _plain_experts(model, self.weights)
            self._decoder.experts = self.experts
        self.logits = self._decoder.logits

    def loss(self, batch: TokenBatch) -> Tensor:
        if self.experts is None:
            return self._decoder.loss(batch.ids, batch.targets, batch.sample_ids)
        self.experts.padding = batch.padding
        loss = self._decoder.loss(batch.ids, batch.targets, batch.sample_ids)
        self.experts.padding = None
        return loss

    def named(self, kind: str) -> Named:
        """Return the "data" or "grad" of the parameters by our names, and with their data what routers have."""
        values = {name: getattr(weight, kind) for name, weight in self.weights.items()}
        experts = self.experts
        if experts is None or kind == "grad":
            return values
        if experts.routing.capacity:
            shares = []
            for layer in range(self.layers):
                router = f"blocks.{layer}.mlp.router"
                shares.append(experts.dropped.get(router, 0) / experts.choices.get(router, 1))
            values["dropped shares"] = torch.tensor(shares, dtype=torch.float64)
        for router, bias in experts.biases.items():
            values[f"{router}.choice_bias"] = bias
        return values


def _plain_decoder(case: Case, weights: Named) -> PlainDecoder:
    """Return the plain decoder that has the parts of a case's model."""
    model = case.model
    sizes = PlainSizes(
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.kv_heads,
        norm_eps=model.norm_eps,
        rope_base=model.rope_base if model.positions == "rope" else 0.0,
        dropout=model.dropout,
        scaling=str(model.rope_scaling),
        factor=model.rope_factor,
        original_context=model.rope_original_context,
        turns=(model.rope_low, model.rope_high),
        attention_factor=model.rope_attention_factor,
        window=model.window or 0,
        full_every=model.full_attention_every,
        truncate=bool(model.rope_truncate),
        clamped=model.mlp == "swiglu-clamped",
    )
    if model.kv_lora_rank:
        latent = PlainLatentSizes(
            rotated=model.qk_rope_head_dim, value=model.v_head_dim, mscale=model.rope_mscale_all_dim
        )
        return PlainLatentDecoder(weights, sizes, latent)
    if case.preset in ("llama", "gpt2") or model.norm == "rms":
        return PlainDecoder(weights, sizes)
    parts = PlainParts(
        residual=str(model.residual),
        activation=str(model.mlp),
        alibi=model.positions == "alibi",
        rotated=model.rotary_dim,
        position_offset=model.position_offset or 0,
    )
    return PlainVariant(weights, sizes, parts)


def _plain_experts(model: ModelConfig, weights: Named) -> PlainExperts:
    routing = PlainRouting(
        chosen=model.experts_per_token,
        sigmoid=model.router == "sigmoid",
        normalize=bool(model.router_normalize),
        scale=model.router_scale,
        groups=model.expert_groups,
        groups_chosen=model.groups_per_token,
        balance=str(model.balance),
        balance_loss=model.balance_loss,
        z_loss=model.router_z_loss,
        rate=model.balance_rate,
        clamped=model.mlp == "swiglu-clamped",
        capacity=model.capacity_factor,
    )
    return PlainExperts(weights, routing)


class TransformersModel:
    """transformers' own model of the family, with our names by the tables of import and export."""

    def __init__(self, case: Case) -> None:
        import transformers  # takes seconds, and may be missing

        family = find_family(case.model)
        fields: dict[str, Any] = write_hf_config(family, case.model, 0, torch.float64)
        config = transformers.AutoConfig.for_model(**fields)
        self._model = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager").double()
        self._tensors = hf_tensors(family, case.model)
        self._head = family.head
        self.parameters = list(self._model.parameters())
        initial = initial_weights(case)
        for name, pieces in pieces_by_parameter(self._theirs("data")).items():
            for view, spec in pieces:
                view.copy_(initial[name][spec.slices])

    def logits(self, ids: Tensor) -> Tensor:
        logits: Tensor = self._model(ids).logits
        return logits

    def loss(self, batch: TokenBatch) -> Tensor:
        return summed_loss(self.logits(batch.ids), batch.targets)

    def named(self, kind: str) -> Named:
        """Return the "data" or "grad" of the parameters by our names."""
        return parameters_of(self._theirs(kind))

    def _theirs(self, kind: str) -> Iterator[tuple[HFTensor, Tensor]]:
        """Yield the "data" or "grad" of their tensors, as files have them."""
        for tensor in self._tensors:
            if tensor.layout == "buffer":
                continue
            yield tensor, tensor_in_memory(self._model, tensor.name, self._head, kind)


# Experts' matrices in files: where they lie in memory, and which half of that matrix they are
_FUSED = {
    "gate_proj": ("gate_up_proj", 0), "w1": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1),
    "w3": ("gate_up_proj", 1), "down_proj": ("down_proj", -1), "w2": ("down_proj", -1),
}  # fmt: skip
_OF_ALL_EXPERTS = ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias")


def tensor_in_memory(model: Any, name: str, head: str, kind: str) -> Tensor:
    """Return the "data" or "grad" of a tensor of files, of that name, in transformers' `model`.

    The output matrix, `head`, may have another name in memory, and a layer's experts are two tensors there.
    """
    layer, _, matrix = name.replace(".block_sparse_moe.", ".mlp.").partition(".experts.")
    values: Tensor
    if not matrix:
        parameter = model.get_output_embeddings().weight if name == head else model.get_parameter(layer)
        values = getattr(parameter, kind)
        return values
    if matrix in _OF_ALL_EXPERTS:
        values = getattr(model.get_parameter(name), kind)
        return values
    expert, part, _ = matrix.split(".")
    fused, half = _FUSED[part]
    values = getattr(model.get_parameter(f"{layer}.experts.{fused}"), kind)[int(expert)]
    return values if half < 0 else values.chunk(2)[half]


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the summed cross-entropy in nats, 0-d, of logits (B, T, V) and targets (B, T)."""
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def initial_weights(case: Case) -> Named:
    """Return the case's initial weights by name, rounded to its parameters' dtype, in float64."""
    config = case.model
    dtype = torch.float64 if case.precision == "fp64" else torch.float32
    weights = {}
    for name, parameter in meta_decoder(config).named_parameters():
        values = torch.empty(parameter.shape, dtype=dtype)
        init_shard(values, name, ShardSpec.whole(tuple(values.shape)), config, SEED)
        weights[name] = values.double()
    return weights


def transformers_is_installed() -> bool:
    """Return True where transformers can be imported."""
    return importlib.util.find_spec("transformers") is not None
