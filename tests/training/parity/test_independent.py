"""Training agrees with independent references; a fault that every process shares turns red, by a number."""

import ast
import math
import sys
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import gristmill_parity.plain.decoder
import gristmill_parity.plain.experts
import gristmill_parity.plain.muon
import gristmill_parity.plain.variants
import training.model.attention
import training.model.layers
import training.model.mlp
import training.model.positions
import training.optim.muon
import training.train_step
from gristmill_parity.cases import Case
from gristmill_parity.comparison import Certifier, limits
from gristmill_parity.feature_cases import feature_case, feature_cases
from gristmill_parity.worker import RankResult, run_case
from training.distributed.rank_pool import RankPool
from training.experimental.parallel_config import ParallelConfig
from training.kernels.cross_entropy import IGNORE_INDEX
from training.model.batch import TokenBatch
from training.model.dropout import Dropout
from training.model.layers import RMSNorm
from training.model.positions import PositionEmbedding
from training.optim.adamw import AdamW
from training.optim.moments import MomentsOnDisk
from training.optim.muon import Muon, WholeMatrices
from training.parallel.parallel_model import ParallelModel

Patch = pytest.MonkeyPatch
DROPPED = feature_case("llama", ParallelConfig(), dropout=0.1)  # of embeddings, too
COMPILED = [case for case in feature_cases()[0] if case.compiled]


def is_here(case: Case) -> bool:
    """Grids, contexts, compression, local steps and experts have own files; `gristmill parity` has all 3D layouts."""
    layout = case.layout
    elsewhere = layout.tensor != "1d" or layout.cp > 1 or layout.compression != "none" or layout.local_steps
    elsewhere |= bool(case.sparse)
    return not (case.compiled or elsewhere) and (
        case.processes < 8 or (case.precision, case.documents) == ("bf16", False)
    )


@pytest.fixture(scope="module")
def certifier(rank_pool: RankPool) -> Certifier:
    return Certifier(rank_pool)


@pytest.mark.every(12)
@pytest.mark.parametrize("chosen", [*filter(is_here, feature_cases()[0]), DROPPED], ids=str)
def test_training_agrees_with_an_independent_reference(certifier: Certifier, chosen: Case) -> None:
    row = certifier.certify(chosen)
    assert row.passed, row.reason


@pytest.mark.parametrize(
    "reference",
    [
        gristmill_parity.plain.decoder,
        gristmill_parity.plain.variants,
        gristmill_parity.plain.muon,
        gristmill_parity.plain.experts,
    ],
)
def test_the_references_import_nothing_of_the_trainer(reference: ModuleType) -> None:
    tree = ast.parse(Path(str(reference.__file__)).read_text())
    modules = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    modules += [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
    modules = [module for module in modules if not str(module).startswith("gristmill_parity.plain.")]
    assert {str(module).partition(".")[0] for module in modules} <= {*sys.stdlib_module_names, "numpy", "torch"}
    assert "torch.nn.functional" not in modules


# Planted faults that every layout would share: each function patches one thing


def mask_removed(patch: Patch) -> None:
    right = F.scaled_dot_product_attention
    patch.setattr(F, "scaled_dot_product_attention", lambda *args, **kw: right(*args, **{**kw, "is_causal": False}))


def mask_of_dropout_removed(patch: Patch) -> None:
    patch.setattr(Tensor, "triu", lambda self, _diagonal: torch.zeros_like(self))


def mask_includes_the_next_token(patch: Patch) -> None:
    right = Tensor.triu
    patch.setattr(Tensor, "triu", lambda self, diagonal: right(self, diagonal + 1))


def attention_scale_doubled(patch: Patch) -> None:
    right = F.scaled_dot_product_attention
    patch.setattr(F, "scaled_dot_product_attention", lambda q, *args, **kw: right(2 * q, *args, **kw))


def heads_grouped_otherwise(patch: Patch) -> None:
    right = F.scaled_dot_product_attention

    def other(q: Tensor, k: Tensor, v: Tensor, **kw: Any) -> Tensor:
        times = q.shape[1] // k.shape[1]
        return right(q, k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1), **{**kw, "enable_gqa": False})

    patch.setattr(F, "scaled_dot_product_attention", other)


def rotary_with(change: Callable[[Tensor], Tensor]) -> Callable[[Patch], None]:
    """A fault: other positions in the rotary table."""

    def plant(patch: Patch) -> None:
        right = training.model.positions.rotary_table
        patch.setattr(
            training.model.positions, "rotary_table", lambda positions, *rest: right(change(positions), *rest)
        )

    return plant


positions_zero = rotary_with(torch.zeros_like)
positions_doubled = rotary_with(lambda positions: 2 * positions)
positions_backwards = rotary_with(lambda positions: -positions)


def positions_of_keys_shifted(patch: Patch) -> None:
    right, calls = training.model.attention.apply_rotary, []

    def shifted(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        calls.append(x)
        return right(x, table if len(calls) % 2 else tuple(t.roll(1, 0) for t in table))  # type: ignore[arg-type]

    patch.setattr(training.model.attention, "apply_rotary", shifted)


def rotary_pairs_swapped(patch: Patch) -> None:
    """Neighbouring features as a pair, as the paper has it, with weights that are made for halves."""
    right = training.model.attention.apply_rotary

    def neighbours(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        halves = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return right(halves, table).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)

    patch.setattr(training.model.attention, "apply_rotary", neighbours)


def learned_positions_shifted(patch: Patch) -> None:
    right = PositionEmbedding.forward
    patch.setattr(PositionEmbedding, "forward", lambda self, x, documents: right(self, x, documents).roll(1, 0))


class DoubledGradient(torch.autograd.Function):
    """The identity, whose gradient is doubled."""

    @staticmethod
    def forward(_ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def norm_gradient_doubled(patch: Patch) -> None:
    right = RMSNorm.forward
    patch.setattr(RMSNorm, "forward", lambda self, x: DoubledGradient.apply(right(self, x)))


def norm_without_epsilon(patch: Patch) -> None:
    right = training.model.layers.rms_norm
    patch.setattr(training.model.layers, "rms_norm", lambda x, weight, _eps: right(x, weight, 0.0))


def gate_and_up_swapped(patch: Patch) -> None:
    right = training.model.mlp.swiglu
    patch.setattr(training.model.mlp, "swiglu", lambda gate, up: right(up, gate))


def gelu_exact(patch: Patch) -> None:
    right = training.model.mlp.gelu
    patch.setattr(training.model.mlp, "gelu", lambda x, _approximate: right(x, "none"))


def dropout_not_scaled(patch: Patch) -> None:
    right = Dropout.forward

    def unscaled(self: Dropout, x: Tensor, sample_ids: Tensor | None) -> Tensor:
        return right(self, x, sample_ids) * ((1.0 - self.p) if self.training else 1.0)

    patch.setattr(Dropout, "forward", unscaled)


def gradients_with(factor: Callable[[TokenBatch], float]) -> Callable[[Patch], None]:
    """A fault: the loss is scaled otherwise, for its gradients."""

    def plant(patch: Patch) -> None:
        right = ParallelModel.forward_backward
        patch.setattr(
            ParallelModel, "forward_backward", lambda self, batch, scale: right(self, batch, scale * factor(batch))
        )

    return plant


scale_doubled = gradients_with(lambda batch: 2.0)
mean_over_ignored_targets = gradients_with(lambda batch: float((batch.targets != IGNORE_INDEX).double().mean()))


def ignored_targets_counted(patch: Patch) -> None:
    right = ParallelModel.forward_backward

    def counting(self: ParallelModel, batch: TokenBatch, scale: float) -> Tensor:
        return right(self, TokenBatch(batch.ids, batch.targets.clamp(min=0), batch.sample_ids), scale)

    patch.setattr(ParallelModel, "forward_backward", counting)


def not_clipped(patch: Patch) -> None:
    right = training.train_step.squared_grad_norm
    patch.setattr(training.train_step, "squared_grad_norm", lambda *args: 0.01 * right(*args))


def copies_counted_in_the_norm(patch: Patch) -> None:
    right = training.train_step.squared_grad_norm

    def every_copy(params: Any, device: torch.device) -> Tensor:
        return right([replace(param, is_primary=True) for param in params], device)

    patch.setattr(training.train_step, "squared_grad_norm", every_copy)


def adamw_with(change: Callable[[AdamW], None]) -> Callable[[Patch], None]:
    """A fault: an optimizer that is changed before each step."""

    def plant(patch: Patch) -> None:
        right = AdamW._update

        def changed(self: AdamW, lr: float) -> None:
            change(self)
            right(self, lr)

        patch.setattr(AdamW, "_update", changed)

    return plant


def _decay_everything(optimizer: AdamW) -> None:
    optimizer._decays = [True] * len(optimizer._decays)


def _uncorrected(optimizer: AdamW) -> None:
    optimizer.updates += 1


norms_decay = adamw_with(_decay_everything)
bias_correction_late = adamw_with(_uncorrected)


def moments_not_written(patch: Patch) -> None:
    patch.setattr(MomentsOnDisk, "write_back", lambda self, index: None)


def muon_scale_wrong(patch: Patch) -> None:
    patch.setattr(training.optim.muon, "_RMS", 0.1)


def muon_iterates_less(patch: Patch) -> None:
    patch.setattr(training.optim.muon, "_ITERATIONS", 4)


def pieces_orthogonalised_alone(patch: Patch) -> None:
    def each(self: WholeMatrices, piece: Any, function: Callable[[Tensor], Tensor], use: Any) -> None:
        for i in range(len(self.matrices)):
            use(i, function(piece(i)))

    patch.setattr(WholeMatrices, "map", each)


def momentum_forgotten(patch: Patch) -> None:
    right = Muon._update

    def fresh(self: Muon, lr: float) -> None:
        for momentum in self._momentum:
            momentum.zero_()
        right(self, lr)

    patch.setattr(Muon, "_update", fresh)


def run_with_fault(name: str, chosen: Case) -> RankResult:
    with pytest.MonkeyPatch.context() as patch:
        FAULTS[name][0](patch)
        return run_case(chosen)


ONE = ParallelConfig()
LLAMA, GPT2 = feature_case("llama", ONE), feature_case("gpt2", ONE)
DRY = feature_case("gpt2", ONE, dropout=0.0)
ADAMW = feature_case("gpt2", ONE, optimizer="adamw")
MUON = feature_case("llama", ONE, optimizer="muon")
FAULTS: dict[str, tuple[Callable[[Patch], None], Case, str]] = {
    "mask removed": (mask_removed, LLAMA, "loss"),
    "mask removed, GPT-2": (mask_removed, DRY, "loss"),
    "mask removed, bf16": (mask_removed, feature_case("llama", ONE, precision="bf16"), "loss"),
    "mask of dropout removed": (mask_of_dropout_removed, GPT2, "loss"),
    "mask includes the next token": (mask_includes_the_next_token, GPT2, "gradient"),
    "attention scale doubled": (attention_scale_doubled, LLAMA, "loss"),
    "heads grouped otherwise": (heads_grouped_otherwise, LLAMA, "loss"),
    "positions zero": (positions_zero, LLAMA, "loss"),
    "positions doubled": (positions_doubled, LLAMA, "loss"),
    "positions backwards": (positions_backwards, LLAMA, "loss"),
    "positions of keys shifted": (positions_of_keys_shifted, LLAMA, "loss"),
    "rotary pairs swapped": (rotary_pairs_swapped, LLAMA, "loss"),
    "learned positions shifted": (learned_positions_shifted, GPT2, "loss"),
    "norm's gradient doubled": (norm_gradient_doubled, LLAMA, "gradient"),
    "norm's gradient doubled, bf16": (norm_gradient_doubled, feature_case("llama", ONE, precision="bf16"), "gradient"),
    "norm without epsilon": (norm_without_epsilon, LLAMA, "gradient"),
    "gate and up swapped": (gate_and_up_swapped, LLAMA, "loss"),
    "exact gelu": (gelu_exact, GPT2, "gradient"),
    "dropout not scaled": (dropout_not_scaled, GPT2, "loss"),
    "scale doubled": (scale_doubled, LLAMA, "gradient"),
    "scale doubled, fp16": (scale_doubled, feature_case("llama", ONE, precision="fp16"), "gradient"),
    "scale doubled under ZeRO-3": (scale_doubled, feature_case("gpt2", ParallelConfig(dp=2, zero=3)), "gradient"),
    "mean over ignored targets": (mean_over_ignored_targets, GPT2, "gradient"),
    "ignored targets counted": (ignored_targets_counted, LLAMA, "loss"),
    "not clipped": (not_clipped, ADAMW, "weight"),
    "copies counted in the norm": (
        copies_counted_in_the_norm, feature_case("gpt2", ParallelConfig(tp=2), optimizer="adamw"), "weight",
    ),
    "norms decay": (norms_decay, ADAMW, "weight"),
    "bias correction late": (bias_correction_late, ADAMW, "weight"),
    "Muon's scale wrong": (muon_scale_wrong, MUON, "weight"),
    "Muon iterates less": (muon_iterates_less, MUON, "weight"),
    "Muon's momentum forgotten": (momentum_forgotten, MUON, "weight"),
    "pieces orthogonalised alone": (
        pieces_orthogonalised_alone, feature_case("llama", ParallelConfig(dp=2, zero=1), optimizer="muon"), "weight",
    ),
    "moments not written": (
        moments_not_written, feature_case("gpt2", ONE, optimizer="adamw", offload="disk"), "weight",
    ),
}  # fmt: skip


@pytest.mark.every(3)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_that_all_share_turns_red_by_a_finite_difference(certifier: Certifier, name: str) -> None:
    _, chosen, seen_in = FAULTS[name]
    faulty = copy(certifier)  # with the same references
    faulty.job = partial(run_with_fault, name)
    row = faulty.certify(chosen)
    assert not row.error, row.error
    assert not row.passed and limits(chosen)[seen_in] < row.differences[seen_in] < math.inf, row.reason
    assert seen_in in row.reason


@pytest.mark.thorough
@pytest.mark.skipif(not COMPILED, reason="no C++ compiler")
def test_compiled_blocks_agree_with_an_independent_reference(certifier: Certifier) -> None:
    row = certifier.certify(COMPILED[0])
    assert row.passed, row.reason
