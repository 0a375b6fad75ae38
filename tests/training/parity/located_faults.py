"""Planted faults and what they are: the first recorded tensor that each makes wrong, how, and along which axis.

Written from what a fault does, some after a look at what is found in float64; a few have several right answers. Axes
with the same ranks in a layout are joined by |.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial

from gristmill_parity.cases import Case
from gristmill_parity.recording import Verdict
from tests.training.parity import test_certificate as certificate
from tests.training.parity import test_context as context
from tests.training.parity import test_documents as documents
from tests.training.parity import test_experts as experts
from tests.training.parity import test_grid as grid
from tests.training.parity import test_kv_heads as kv_heads
from tests.training.planted_faults import Fault


@dataclass(frozen=True)
class Planted:
    """A fault in a case, and what is to be said of it."""

    fault: Fault
    case: Case
    tensor: str
    """A pattern of the tensor's name and kind; several are joined by |."""
    kind: str
    axis: str
    """The axis that is to be named, or none."""
    hidden_in_16_bits: bool = False
    """True of a fault that is smaller than rounding to 16 bits."""

    @property
    def name(self) -> str:
        return name_of(self.fault)

    @property
    def key(self) -> str:
        fault = self.fault
        name: str = fault.func.__name__ if isinstance(fault, partial) else fault.__name__
        return name

    def in_precision(self, precision: str) -> "Planted":
        chosen = replace(self.case, precision=precision, reference="one process")  # type: ignore[arg-type]
        return replace(self, case=chosen)

    def mistakes(self, verdict: Verdict) -> list[str]:
        """Return what of a verdict is not right: tensor, kind, axis."""
        if verdict.is_clean:
            return ["none found"]
        right = {
            "tensor": any(fnmatchcase(verdict.tensor, pattern) for pattern in self.tensor.split("|")),
            "kind": verdict.pattern.kind in self.kind.split("|"),
            "axis": not self.axis or any(axis in verdict.pattern.axes[:2] for axis in self.axis.split("|")),
        }
        return [name for name, is_right in right.items() if not is_right]


def name_of(fault: Fault) -> str:
    """Return a fault's name, of one with an argument with it."""
    if isinstance(fault, partial):
        return f"{fault.func.__name__} {' '.join(fault.keywords.values())}".replace("_", " ")
    return fault.__name__.replace("_", " ")


_ATTENTION = "blocks.*.attention.o input"
_MLP = "blocks.*.mlp output"
_ROUTER = "blocks.*.mlp.router.weight own gradient"
_INTO_ROUTER = "blocks.*.mlp input gradient|blocks.*.mlp_norm output gradient"
# by the name of the fault and its layout; the first whose words are in the case's name
_TRUTH: dict[str, tuple[str, str, str]] = {
    "no_sum_of_input_gradients": ("norm output gradient", "not summed", "tp"),
    "no_sum_of_outputs": ("embed.tokens output", "not summed", "tp"),
    "vocabulary_from_zero": ("head output", "other", "tp"),
    "every_head_drops_as_the_first": (_ATTENTION, "other", "tp"),
    "all_draw_the_same_shard": ("embed.tokens.weight initial weight", "shifted", "tp"),
    "sequence_halves_swapped": ("embed.tokens output", "shifted", "tp"),
    "every_position_from_zero": ("embed.positions output", "shifted", "tp"),
    "norms_not_summed_over_the_sequence": ("norm.weight own gradient", "not summed", "tp"),
    "norms_summed_twice": ("norm.weight own gradient", "factor", "tp"),
    "loss_scaled_by_replicas": ("head output gradient", "factor", "dp|replicate"),
    "gradients_averaged": ("* gradient", "factor", "replicate|shard"),
    "first_micro_batch_forgotten": ("* gradient", "missing term", "micro-batch"),
    "groups_of_replicas_not_summed": ("* gradient", "not summed", "replicate"),
    "updates_not_published": ("* used weight", "stale", "shard"),
    "updates_used_before_they_arrive": ("* used weight", "stale", "shard"),
    "stale_gathered_parameters": ("* used weight", "stale", "shard"),
    "ends_not_summed": ("embed.tokens.weight *gradient", "not summed", "tied"),
    "stages_swapped": ("blocks.0 input", "other", "pp"),
    "last_micro_batch_dropped": ("head output", "missing term", "micro-batch"),
    "computed_again_otherwise": ("blocks.0* (computed again)", "computed again", ""),
    "a_ring_step_lost": (_ATTENTION, "other", "cp"),
    "a_mask_shifted_by_a_block": (_ATTENTION, "other", "cp"),
    "a_window_shifted_by_a_block": (_ATTENTION, "other", "cp"),
    "documents_of_other_chunks": (_ATTENTION, "other", "cp"),
    "positions_in_order llama": (_ATTENTION, "other", "cp"),
    "positions_in_order gpt2": ("embed.positions output", "shifted|other order", "cp"),
    "gradients_that_stay": ("blocks.*.attention.[kv].weight own gradient", "other", "cp|replicate"),
    "blocks_of_equal_weight": (_ATTENTION, "other", "cp"),
    "heads_of_other_ranks": (_ATTENTION, "other|other order|shifted", "cp"),
    "exchange_without_gradient": ("blocks.*.attention.[qkv].weight own gradient", "other", "cp|replicate"),
    "dropout_by_own_positions": ("embed.dropout output", "other", "cp"),
    "weights_dropped_by_own_positions": (_ATTENTION, "other", "cp"),
    "heads_dropped_like_other_ranks": (_ATTENTION, "other", "cp"),
    "distances_within_a_block": (_ATTENTION, "other", "cp"),
    "terms_not_summed": ("blocks.*.attention.[kv].weight *gradient", "not summed", "kv"),
    "heads_in_another_order": (_ATTENTION, "other|other order|shifted", "tp"),
    "wrong_root": (_ATTENTION, "other", "column"),
    "not_transposed": ("embed.tokens output", "other|other order|shifted", "row|column"),
    "transposed_blocks": (_ATTENTION, "other", "row|column"),
    "local_statistics": ("blocks.0.attention_norm output", "scaled rows", "column"),
    "no_sum_over_layers": ("head.weight *gradient", "not summed", "depth"),
    "no_sum_of_vectors_over_rows": ("norm.* *gradient", "not summed", "row"),
    "every_column_drops_as_the_first": ("embed.dropout output", "other", "column"),
    "axes_not_exchanged": ("blocks.0.attention.o output", "other", "row|column|depth"),
    "targets_of_other_sequences": ("head output", "other|copies differ", "row|column|depth"),
    "no_sum_over_the_layers_of_a_cube": ("* gradient", "not summed", "depth"),
    "weights_not_normalised": (_MLP, "scaled rows", ""),
    "bias_in_the_weights": (_MLP, "other", ""),
    # the loss that is scaled is nearly all of this gradient
    "losses_scaled_by_micro_batches": (_ROUTER, "other|factor", ""),
    "losses_counted_by_every_rank": (_ROUTER, "other|factor", "tp"),
    "counts_of_one_rank": (f"{_ROUTER}|{_INTO_ROUTER}", "other", "dp|cp|replicate"),
    "gradients_of_experts_summed_twice": ("blocks.*.mlp.experts.*.weight gradient", "mixed", "tp"),
    "losses_left_out": (_ROUTER, "missing term", ""),
    "experts_counted_twice_over_data_parallelism": (
        "blocks.*.mlp.experts.*.weight gradient", "factor", "expert_replicate",
    ),
    # too small a norm clips less
    "norm_without_experts": ("* state *", "factor", "ep|dp|replicate"),
    "shared_key_not_rotated": (_ATTENTION, "other", ""),
    "sinks_left_out": (_ATTENTION, "other", ""),
    "biases_of_experts_added_by_every_rank": ("blocks.*.mlp.experts.down.bias own gradient|" + _MLP, "factor", "tp"),
    "last_tokens_first": (_MLP, "other", ""),
    "capacity_of_a_rank_s_tokens": (_MLP, "other", "cp"),
    "padding_chooses": (_MLP, "other", ""),
    "rows_in_the_order_of_ranks": (_MLP, "other", "ep|dp|replicate"),
    "not_summed": ("*own gradient", "not summed", "tp"),
    "dense_mask_shifted_by_one": (_ATTENTION, "other", ""),
    "later_stages_get_none": ("blocks.2.attention.o input", "other", "pp"),
    "every_rank_takes_the_first_positions": ("embed.positions output", "shifted", "tp"),
}  # fmt: skip
_SMALLER_THAN_ROUNDING = ("bias_in_the_weights", "computed_again_otherwise", "norm_without_experts")
_NO_TENSOR = ("drops_without_counting",)
"""Faults of a counter alone."""


def planted_faults() -> Iterator[Planted]:
    """Yield every fault of a layout that the certificate's tests plant."""
    listed: list[tuple[Fault, Case]] = []
    for module in (certificate, context, grid, experts):
        listed += [(fault, chosen) for fault, chosen, _ in module.FAULTS]
    listed += [(fault, kv_heads.CASES[0]) for fault in (kv_heads.terms_not_summed, kv_heads.heads_in_another_order)]
    names = {
        "mlp.router.weight": "sequence", "attention.q_a.weight": "latent", "attention.kv_a.weight": "latent",
        "attention.kv_a_norm.weight": "latent",
    }  # fmt: skip
    for name, sparse in names.items():
        listed.append((partial(experts.not_summed, name=name), experts.case(sparse, experts.TP)))
    of_layouts = [faults for faults in documents.FAULTS.values() if faults[1].processes > 1]
    listed += [(fault, chosen) for fault, chosen, _ in of_layouts]
    for fault, chosen in listed:
        key = fault.func.__name__ if isinstance(fault, partial) else fault.__name__
        if key in _NO_TENSOR:
            continue
        tensor, kind, axis = _TRUTH.get(f"{key} {chosen.preset}") or _TRUTH[key]
        if isinstance(fault, partial):
            tensor = f"blocks.*.{fault.keywords['name']} own gradient"
        yield Planted(fault, chosen, tensor, kind, axis, key in _SMALLER_THAN_ROUNDING)


def clean_cases() -> list[Case]:
    """Return twenty layouts of all kinds, in which nothing is to be found."""
    chosen = certificate.COVERING[::4][:12]
    more = [*context.CASES[0:20:6], *kv_heads.CASES[:1], *grid.CASES[1:4:2]]
    return [*chosen, *more, experts.case("sequence", experts.TP)]
