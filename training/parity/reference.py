"""Reference: the independent runs that a case is compared with, by the plain decoder or by transformers' own models.

Both train in one process in float64, from the case's initial weights and on its batches, with torch's optimizers.
"""

import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from training.hugging_face.hf_config import find_family, write_hf_config
from training.hugging_face.hf_tensors import hf_tensors
from training.model.batch import Batch
from training.model.decoder import meta_decoder
from training.parallel.initialize import init_shard
from training.parity.cases import Case
from training.parity.plain_decoder import IGNORED, PlainDecoder, PlainSizes
from training.parity.plain_muon import PlainMuon
from training.parity.plain_variants import PlainParts, PlainVariant
from training.parity.worker import ADAMW, LOGIT_POSITIONS, LR, SEED, global_batch
from training.sharding.shard_spec import ShardSpec

Named = dict[str, Tensor]


@dataclass(frozen=True)
class GlobalResult:
    """What a case yields, as global tensors on the CPU."""

    losses: Tensor
    """Each step's mean loss, then an evaluation's, in nats per token."""
    gradients: Named
    """Of the first step, by the parameters' names."""
    weights: Named
    """After the last step."""
    logits: Tensor | None = None
    """At LOGIT_POSITIONS of the evaluation's first sequence, (N, V); None if they are not compared."""
    mismatch: str = ""
    """First difference between ranks that hold the same shard, compared bitwise; empty if there is none."""


def run_reference(case: Case) -> GlobalResult:
    """Train the case's reference; `case.reference` says which. Runs in one process, on the CPU."""
    model = _Transformers(case) if case.reference == "transformers" else _Plain(case)
    optimizer = _optimizer(case, model)
    losses, gradients = [], {}
    for step in range(case.steps):
        batch, targets = global_batch(case, step)
        optimizer.zero_grad()
        parts = _documents_alone(batch)
        loss = torch.stack([model.loss(part) for part, _ in parts]).sum() / targets
        (loss + sum(_z_loss(case, model, part) for part, _ in parts) / targets).backward()
        losses.append(loss.detach())
        if step == 0:
            gradients = {name: grad.clone() for name, grad in model.named("grad").items()}
        if case.optimizer != "sgd":
            torch.nn.utils.clip_grad_norm_(model.parameters, ADAMW.max_grad_norm)
        optimizer.step()
    batch, targets = global_batch(case, case.steps)
    with torch.no_grad():
        logits = torch.empty(*batch.ids.shape, case.model.vocab_size, dtype=torch.float64)
        for part, where in _documents_alone(batch):
            logits.flatten(0, 1)[where] = model.logits(part.ids)
        losses.append(_summed_loss(logits, batch.targets) / targets)
    return GlobalResult(torch.stack(losses), gradients, model.named("data"), logits[0, list(LOGIT_POSITIONS)])


def _z_loss(case: Case, model: "_Plain | _Transformers", batch: Batch) -> Tensor | float:
    """The case's coefficient times the squared log-sum-exp of the logits, summed over the batch's targets."""
    if not case.z_loss:
        return 0.0
    log_z = model.logits(batch.ids).logsumexp(-1)
    return case.z_loss * log_z[batch.targets != IGNORED].square().sum()


def _documents_alone(batch: Batch) -> list[tuple[Batch, Tensor]]:
    """The documents of the batch, each a sequence of its own, by length; the whole batch if it has none.

    With each batch, where its tokens are in the flattened one: (documents, length) int64.
    """
    every = torch.arange(batch.ids.numel())
    if batch.positions is None:
        return [(batch, every.view_as(batch.ids))]
    starts = every[batch.positions.flatten() == 0]
    lengths, parts = torch.cat([starts, starts.new_tensor([len(every)])]).diff(), []
    for length in lengths.unique().tolist():
        where = starts[lengths == length, None] + every[:length]
        ids, targets = (t.flatten()[where] for t in (batch.ids, batch.targets))
        parts.append((Batch(ids, targets, batch.sample_ids[:1].expand(len(where))), where))
    return parts


def transformers_is_installed() -> bool:
    """True where transformers can be imported."""
    return importlib.util.find_spec("transformers") is not None


class _Plain:
    """The plain decoder."""

    def __init__(self, case: Case) -> None:
        model = case.model
        self.weights = {name: w.requires_grad_() for name, w in _initial_weights(case).items()}
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


class _Transformers:
    """transformers' own model of the family, with our names by the tables of import and export."""

    def __init__(self, case: Case) -> None:
        import transformers  # takes seconds, and may be missing

        family = find_family(case.model)
        fields: dict[str, Any] = write_hf_config(family, case.model, 0, torch.float64)
        config = transformers.AutoConfig.for_model(**fields)
        self._model = transformers.AutoModelForCausalLM.from_config(config).double()
        self._tensors, self._head = hf_tensors(family, case.model), family.head
        self.parameters = list(self._model.parameters())
        initial = _initial_weights(case)
        for tensor in self._tensors:
            for name, pieces in tensor.pieces(self._theirs(tensor.name).data).items():
                for view, spec in pieces:
                    view.copy_(initial[name][spec.slices])

    def logits(self, ids: Tensor) -> Tensor:
        found: Tensor = self._model(ids).logits
        return found

    def loss(self, batch: Batch) -> Tensor:
        return _summed_loss(self.logits(batch.ids), batch.targets)

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


def _summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed cross-entropy in nats, 0-d, of logits (B, T, V) and targets (B, T)."""
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def _initial_weights(case: Case) -> Named:
    """The case's initial weights by name, rounded to its parameters' dtype, in float64."""
    config = case.model
    dtype = torch.float64 if case.precision == "fp64" else torch.float32
    found = {}
    for name, parameter in meta_decoder(config).named_parameters():
        values = torch.empty(parameter.shape, dtype=dtype)
        init_shard(values, name, ShardSpec.whole(tuple(values.shape)), config, SEED)
        found[name] = values.double()
    return found


def _optimizer(case: Case, model: "_Plain | _Transformers") -> "torch.optim.Optimizer | PlainMuon":
    """torch's plain SGD, or its AdamW, with which matrices decay and norms and biases do not; or plain Muon."""
    if case.optimizer == "sgd":
        return torch.optim.SGD(model.parameters, lr=LR)
    matrices: list[Tensor] = []
    if case.optimizer == "muon":
        assert isinstance(model, _Plain)
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
