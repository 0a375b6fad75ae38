"""Reference: the independent runs that a case is compared with, by the plain decoder or by transformers' own models.

All train in one process in float64, from the case's initial weights and on its batches, with torch's optimizers;
replicas that compress gradients or take local steps are plain decoders, too. Parameters have our names.
"""

import importlib.util
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gristmill_parity.cases import Case
from gristmill_parity.plain.compression import PlainInt8, PlainPowerSGD
from gristmill_parity.plain.decoder import IGNORED, PlainDecoder, PlainSizes
from gristmill_parity.plain.experts import PlainExperts, PlainRouting
from gristmill_parity.plain.muon import PlainMuon
from gristmill_parity.plain.variants import PlainLatentDecoder, PlainLatentSizes, PlainParts, PlainVariant
from gristmill_parity.worker import ADAMW, LOGIT_POSITIONS, LR, SEED, global_batch
from training.experimental.compression.powersgd import initial_q
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
        self.weights = {name: w.requires_grad_() for name, w in initial_weights(case).items()}
        self.parameters = list(self.weights.values())
        base = model.rope_base if model.positions == "rope" else 0.0
        sizes = PlainSizes(
            model.layers, model.heads, model.kv_heads, model.norm_eps, base, model.dropout, str(model.rope_scaling),
            model.rope_factor, model.rope_original_context, (model.rope_low, model.rope_high),
            model.rope_attention_factor, model.window or 0, model.full_attention_every, bool(model.rope_truncate),
            model.mlp == "swiglu-clamped",
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
        if model.kv_lora_rank:
            latent = PlainLatentSizes(model.qk_rope_head_dim, model.v_head_dim, model.rope_mscale_all_dim)
            self._decoder = PlainLatentDecoder(self.weights, sizes, latent)
        self.experts = self._decoder.experts = _plain_experts(model, self.weights) if model.experts else None
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
        found = {name: getattr(w, kind) for name, w in self.weights.items()}
        if self.experts is None or kind == "grad":
            return found
        if self.experts.routing.capacity:
            names = [f"blocks.{layer}.mlp.router" for layer in range(self.layers)]
            shares = [self.experts.dropped.get(name, 0) / self.experts.choices.get(name, 1) for name in names]
            found["dropped shares"] = torch.tensor(shares, dtype=torch.float64)
        return found | {f"{name}.choice_bias": bias for name, bias in self.experts.biases.items()}


def _plain_experts(model: ModelConfig, weights: Named) -> PlainExperts:
    return PlainExperts(
        weights,
        PlainRouting(
            model.experts_per_token, model.router == "sigmoid", bool(model.router_normalize), model.router_scale,
            model.expert_groups, model.groups_per_token, str(model.balance), model.balance_loss, model.router_z_loss,
            model.balance_rate, model.mlp == "swiglu-clamped", model.capacity_factor,
        ),
    )  # fmt: skip


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
        found: Tensor = self._model(ids).logits
        return found

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


_OF_ALL_EXPERTS = {f"{part}_proj{kind}" for part in ("gate_up", "down") for kind in ("", "_bias")}


def tensor_in_memory(model: Any, name: str, head: str, kind: str) -> Tensor:
    """Return the "data" or "grad" of a tensor of files, of that name, in transformers' `model`.

    The output matrix, `head`, may have another name in memory, and a layer's experts are two tensors there.
    """
    layer, _, matrix = name.replace(".block_sparse_moe.", ".mlp.").partition(".experts.")
    if not matrix:
        parameter = model.get_output_embeddings().weight if name == head else model.get_parameter(layer)
        found: Tensor = getattr(parameter, kind)
        return found
    if matrix in _OF_ALL_EXPERTS:
        whole: Tensor = getattr(model.get_parameter(name), kind)
        return whole
    expert, part, _ = matrix.split(".")
    fused, half = _FUSED[part]
    found = getattr(model.get_parameter(f"{layer}.experts.{fused}"), kind)[int(expert)]
    return found if half < 0 else found.chunk(2)[half]


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed cross-entropy in nats, 0-d, of logits (B, T, V) and targets (B, T)."""
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def initial_weights(case: Case) -> Named:
    """Return the case's initial weights by name, rounded to its parameters' dtype, in float64."""
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
    named = model.weights if isinstance(model, PlainModel) else {}
    biases = [w for name, w in named.items() if name.endswith("bias")]  # experts' have two dimensions
    if case.optimizer == "muon":
        blocks = [w for name, w in named.items() if name.startswith("blocks.") and w.ndim >= 2]
        matrices = [w for w in blocks if not any(w is bias for bias in biases)]
    rest = [w for w in model.parameters if not any(w is matrix for matrix in matrices)]
    groups = [
        {"params": [p for p in rest if (p.ndim >= 2 and not any(p is b for b in biases)) is decays]}
        | {"weight_decay": decay}
        for decays, decay in ((True, ADAMW.weight_decay), (False, 0.0))
    ]
    adamw = torch.optim.AdamW(groups, lr=ADAMW.lr, betas=ADAMW.betas, eps=ADAMW.eps)
    if case.optimizer == "adamw":
        return adamw
    return PlainMuon(matrices, adamw, ADAMW.lr, ADAMW.weight_decay, ADAMW.muon_momentum)


def clip_and_update(
    case: Case, model: PlainModel | TransformersModel, optimizer: torch.optim.Optimizer | PlainMuon
) -> Tensor:
    """Update the model by its gradients, which are clipped as the case says; returns their norm before that."""
    longest = math.inf if case.optimizer == "sgd" else ADAMW.max_grad_norm
    norm = torch.nn.utils.clip_grad_norm_(model.parameters, longest)
    optimizer.step()
    return norm


def set_learning_rate(optimizer: torch.optim.Optimizer | PlainMuon, rate: float) -> None:
    """Let the next updates have another learning rate."""
    if isinstance(optimizer, PlainMuon):
        optimizer.lr = rate
        optimizer = optimizer.other
    for group in optimizer.param_groups:
        group["lr"] = rate


_BY_COLUMNS = ("o.weight", "down.weight")  # of matrices those whose inputs tensor parallelism divides


class CompressedSteps:
    """Steps of one model by gradients that replicas sum compressed; `gradients` are the first sums."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = PlainModel(case)
        layout = case.layout
        self.optimizer = reference_optimizer(case, self.model)
        self.optimizers = [self.optimizer]
        self.gradients: Named = {}
        self.norms: list[Tensor] = []
        self.replicas = layout.dp
        self.rank = layout.compression_rank
        self.tp = layout.tp
        self._int8 = PlainInt8(self.replicas) if layout.compression == "int8" else None
        self._powersgd: dict[tuple[str, int], PlainPowerSGD] = {}

    def step(self, batch: TokenBatch, targets: int) -> Tensor:
        """Take a step; returns the mean loss before it."""
        each = list[Named]()
        total = torch.zeros((), dtype=torch.float64)
        for replica in range(self.replicas):
            self.optimizer.zero_grad()
            loss = self.model.loss(own_sequences(batch, replica, self.replicas)) / targets
            loss.backward()
            total += loss.detach()
            each.append({name: grad.clone() for name, grad in self.model.named("grad").items()})
        sums = self._sums(each)
        for name, weight in self.model.weights.items():
            weight.grad = sums[name].clone()
        self.gradients = self.gradients or sums
        self.norms.append(clip_and_update(self.case, self.model, self.optimizer))
        return total

    def _sums(self, each: list[Named]) -> Named:
        """Return the sums that all replicas get: of vectors exactly, of matrices compressed."""
        sums = {name: torch.stack([own[name] for own in each]).sum(0) for name in each[0]}
        matrices = [name for name in reversed(sums) if sums[name].ndim == 2]  # as a backward pass has them
        if self.tp > self.case.model.kv_heads:  # of heads of which several ranks have terms
            matrices = [name for name in matrices if not name.endswith(("k.weight", "v.weight"))]
        if self._int8 is None:
            return sums | {name: self._low_rank(name, [own[name] for own in each]) for name in matrices}
        rows = [torch.cat([own[name].flatten() for name in matrices]) for own in each]
        parts = self._int8.sum(rows).split([sums[name].numel() for name in matrices])
        return sums | {name: part.view_as(sums[name]) for name, part in zip(matrices, parts, strict=True)}

    def _low_rank(self, name: str, gradients: list[Tensor]) -> Tensor:
        """By PowerSGD: each tensor-parallel rank of its own piece of the matrix, if that makes it smaller."""
        dim = int(name.endswith(_BY_COLUMNS))
        found = []
        for index, pieces in enumerate(zip(*(g.chunk(self.tp, dim) for g in gradients), strict=True)):
            n, m = pieces[0].shape
            if self.rank * (n + m) >= n * m:
                found.append(torch.stack(pieces).sum(0))
                continue
            if (name, index) not in self._powersgd:
                first = initial_q((n, m), self.rank, SEED, name, pieces[0])
                self._powersgd[name, index] = PlainPowerSGD(self.replicas, first)
            found.append(self._powersgd[name, index].sum(pieces))
        return torch.cat(found, dim)


class LocalSteps:
    """Local steps, as algorithm 1 of Douillard et al. 2023 has them; `gradients` are the first outer ones.

    `model` has the shared weights, and torch's SGD is the outer optimizer.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = PlainModel(case)
        self.gradients: Named = {}
        self.norms: list[Tensor] = []
        self._each = [PlainModel(case) for _ in range(case.layout.dp)]
        self.optimizers = [reference_optimizer(case, one) for one in self._each]
        self._outer = torch.optim.SGD(
            self.model.parameters, lr=ADAMW.outer_lr, momentum=ADAMW.outer_momentum, nesterov=True
        )
        self._steps = 0

    def step(self, batch: TokenBatch, targets: int) -> Tensor:
        """Let each replica take a step; returns their mean loss before it."""
        total = torch.zeros((), dtype=torch.float64)
        norms = []
        for replica, (one, optimizer) in enumerate(zip(self._each, self.optimizers, strict=True)):
            own = own_sequences(batch, replica, len(self._each))
            optimizer.zero_grad()
            if one.experts is not None:
                one.experts.restart()
            loss = one.loss(own)
            of_routers = 0.0 if one.experts is None else one.experts.loss
            ((loss + of_routers) / int((own.targets != IGNORED).sum())).backward()
            total += loss.detach() / targets
            norms.append(clip_and_update(self.case, one, optimizer))
        self.norms.append(torch.stack(norms).square().mean().sqrt())
        self._steps += 1
        if self._steps % self.case.layout.local_steps == 0:
            self._meet()
        return total

    def _meet(self) -> None:
        """An outer step, after which all replicas have the shared weights."""
        for name, shared in self.model.weights.items():
            own = [one.weights[name].detach() for one in self._each]
            shared.grad = torch.stack([shared.detach() - weight for weight in own]).mean(0)
        self.gradients = self.gradients or {name: grad.clone() for name, grad in self.model.named("grad").items()}
        self._outer.step()
        for name, shared in self.model.weights.items():
            for one in self._each:
                one.weights[name].data.copy_(shared.detach())


def own_sequences(batch: TokenBatch, replica: int, replicas: int) -> TokenBatch:
    """Return the sequences of a replica: every `replicas`-th one."""
    return batch.rows(slice(replica, None, replicas))


@dataclass(frozen=True)
class GlobalResult:
    """The results of a case, as global tensors on the CPU."""

    losses: Tensor
    """Each step's mean loss, then an evaluation's, in nats per token."""
    gradients: Named
    """Of the first step, by the parameters' names; with local steps the outer ones of the first round."""
    weights: Named
    """After the last step."""
    logits: Tensor | None = None
    """At LOGIT_POSITIONS of the evaluation's first sequence, (N, V); None if they are not compared."""
    mismatch: str = ""
    """First difference between ranks that hold the same shard, compared bitwise; empty if there is none."""


def run_reference(case: Case) -> GlobalResult:
    """Train the case's reference; `case.reference` says which. Runs in one process, on the CPU."""
    run = reference_steps(case)
    losses = [run.step(*global_batch(case, step)) for step in range(case.steps)]
    batch, targets = global_batch(case, case.steps)
    logits = evaluated_logits(run.model, batch, case.model.vocab_size)
    losses.append(summed_loss(logits, batch.targets) / targets)
    return GlobalResult(torch.stack(losses), run.gradients, run.model.named("data"), logits[0, list(LOGIT_POSITIONS)])


@torch.no_grad()
def evaluated_logits(model: PlainModel | TransformersModel, batch: TokenBatch, vocabulary: int) -> Tensor:
    """Return the logits (B, T, V) of a batch, each of its documents alone."""
    logits = torch.empty(*batch.ids.shape, vocabulary, dtype=torch.float64)
    for part, where in _documents_alone(batch):
        logits.flatten(0, 1)[where] = model.logits(part.ids)
    return logits


def reference_steps(case: Case) -> "LocalSteps | CompressedSteps | OneModelSteps":
    """Return the steps of a case's reference, which is at its initial weights."""
    if case.layout.local_steps:
        return LocalSteps(case)
    return OneModelSteps(case) if case.layout.compression == "none" else CompressedSteps(case)


class OneModelSteps:
    """Steps of one process; `gradients` are those of the first."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = TransformersModel(case) if case.reference == "transformers" else PlainModel(case)
        self.optimizer = reference_optimizer(case, self.model)
        self.optimizers = [self.optimizer]
        self.gradients: Named = {}
        self.norms: list[Tensor] = []

    def step(self, batch: TokenBatch, targets: int) -> Tensor:
        """Take a step; returns the mean loss before it."""
        model = self.model
        experts = getattr(self.model, "experts", None)
        if experts is not None:
            experts.restart()
        self.optimizer.zero_grad()
        parts = _documents_alone(batch)
        loss = torch.stack([model.loss(part) for part, _ in parts]).sum() / targets
        of_routers = experts.loss / targets if experts is not None else 0.0
        (loss + of_routers + sum(_z_loss(self.case, model, part) for part, _ in parts) / targets).backward()
        self.gradients = self.gradients or {name: grad.clone() for name, grad in model.named("grad").items()}
        self.norms.append(clip_and_update(self.case, model, self.optimizer))
        if experts is not None:
            experts.update()
        return loss.detach()


def _z_loss(case: Case, model: PlainModel | TransformersModel, batch: TokenBatch) -> Tensor | float:
    """Return the case's coefficient times the squared log-sum-exp of the logits, summed over the batch's targets."""
    if not case.z_loss:
        return 0.0
    log_z = model.logits(batch.ids).logsumexp(-1)
    return case.z_loss * log_z[batch.targets != IGNORED].square().sum()


def _documents_alone(batch: TokenBatch) -> list[tuple[TokenBatch, Tensor]]:
    """Return the documents of the batch, each a sequence of its own, by length; the whole batch if it has none.

    With each batch, where its tokens are in the flattened one: (documents, length) int64.
    """
    every = torch.arange(batch.ids.numel())
    if batch.positions is None:
        return [(batch, every.view_as(batch.ids))]
    starts = every[batch.positions.flatten() == 0]
    lengths = torch.cat([starts, starts.new_tensor([len(every)])]).diff()
    parts = []
    for length in lengths.unique().tolist():
        where = starts[lengths == length, None] + every[:length]
        ids, targets = (t.flatten()[where] for t in (batch.ids, batch.targets))
        parts.append((TokenBatch(ids, targets, batch.sample_ids[:1].expand(len(where))), where))
    return parts


def transformers_is_installed() -> bool:
    """True where transformers can be imported."""
    return importlib.util.find_spec("transformers") is not None
