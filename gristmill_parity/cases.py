"""Cases of the parity certificate: a small model, a layout and how it trains; all, or a set that covers all pairs."""

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from gristmill.errors import UsageError
from training.config import Precision
from training.experimental.parallel_config import ParallelConfig
from training.kernels.keyed_random import key_from_name
from training.memory.memory_config import OffloadTarget, Recompute
from training.model.model_config import ModelConfig
from training.parallel.pipeline.schedules import SCHEDULES, Schedule
from training.presets.presets import find_preset

VOCAB_SIZE = 67  # a prime: never divisible by the number of processes
SEQ_LEN = 24
Preset = str  # of the model


@dataclass(frozen=True)
class Shrunk:
    """Options of a published model's preset in a small model, in addition to the sizes of all of them."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Values of ModelConfig's fields: small enough that its parts do something in a sequence of SEQ_LEN tokens."""
    in_transformers: bool = True
    """True if transformers has the model."""
    has_own_parts: bool = True
    """False if another preset has its parts; it is then only in the full certificate."""


SHRUNK = {
    "llama-3.2-1b": Shrunk({"rope_original_context": 64}),
    "mistral-7b": Shrunk({"window": 7}),
    "qwen2.5-0.5b": Shrunk(),
    "qwen3-0.6b": Shrunk({"head_dim": 20}),
    "gpt-neox-20b": Shrunk({"rope_fraction": 0.34}),
    "bloom-176b": Shrunk({"ffn_width": 384, "heads": 6, "kv_heads": 6}),  # 112 heads are no power of two
    "opt-175b": Shrunk({"init_std": 0.04}),  # with larger ones rounding moves an input across ReLU's kink in 50 steps
    "mixtral-8x7b": Shrunk({"experts": 4, "balance": "none"}),  # references have no auxiliary loss by default
    "qwen3-30b-a3b": Shrunk({
        "head_dim": 20, "experts": 5, "experts_per_token": 2, "expert_width": 48, "balance": "none",
    }),
    "olmoe-1b-7b": Shrunk({"experts": 6, "experts_per_token": 3, "balance": "none"}),
    "deepseek-v3": Shrunk({
        "q_lora_rank": 20, "kv_lora_rank": 14, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
        "experts": 6, "experts_per_token": 2, "expert_width": 24, "dense_layers": 1, "expert_groups": 3,
        "groups_per_token": 2, "balance": "none", "rope_original_context": 8,
    }),
    "gpt-oss-20b": Shrunk({
        "head_dim": 20, "window": 7, "experts": 4, "experts_per_token": 2, "rope_original_context": 8,
        "balance": "none",
    }),
    "glm-130b": Shrunk(in_transformers=False),
    "codegeex-13b": Shrunk(in_transformers=False),
    "llama-2-7b": Shrunk(has_own_parts=False),
    "llama-3.1-8b": Shrunk({"rope_original_context": 64}, has_own_parts=False),
    "gpt2-124m": Shrunk(has_own_parts=False),
    "mt-nlg-530b": Shrunk(has_own_parts=False),
    "pythia-160m": Shrunk({"rope_fraction": 0.34}, has_own_parts=False),
    "bloom-560m": Shrunk({"ffn_width": 384}, has_own_parts=False),
    "opt-125m": Shrunk({"init_std": 0.04}, has_own_parts=False),
}  # fmt: skip


SPARSE: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "switch": {
        "experts": 8, "experts_per_token": 2, "expert_width": 48, "balance": "switch", "balance_loss": 0.5,
        "router_z_loss": 0.05,
    },
    "sequence": {
        "experts": 5, "experts_per_token": 2, "expert_width": 24, "router_normalize": False, "shared_experts": 2,
        "dense_layers": 1, "balance": "sequence", "balance_loss": 0.5,
    },
    "bias": {
        "experts": 6, "experts_per_token": 3, "expert_width": 48, "router": "sigmoid", "router_scale": 2.5,
        "expert_groups": 3, "groups_per_token": 2, "sparse_every": 2, "balance": "bias", "balance_rate": 0.05,
        "balance_loss": 0.3, "router_z_loss": 0.05,
    },
    # DeepSeek-V3's attention and sparse layers; 8 heads, of 8 features that are not rotated and 4 that are
    "latent": {
        "kv_heads": 0, "q_lora_rank": 20, "kv_lora_rank": 14, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
        "v_head_dim": 6, "experts": 6, "experts_per_token": 2, "expert_width": 24, "shared_experts": 1,
        "dense_layers": 1, "router": "sigmoid", "router_scale": 2.5, "expert_groups": 3, "groups_per_token": 2,
        "balance": "bias", "balance_rate": 0.05, "rope_scaling": "yarn", "rope_factor": 4.0, "rope_base": 500.0,
        "rope_original_context": 8, "rope_mscale_all_dim": 1.0,
    },
    "latent, all": {
        "kv_heads": 0, "kv_lora_rank": 20, "experts": 3, "experts_per_token": 3, "expert_width": 48,
        "balance": "sequence",
    },
    # gpt-oss's attention and sparse layers
    "sinks": {
        "sinks": True, "window": 7, "full_attention_every": 2, "qkv_bias": True, "out_bias": True, "mlp_bias": True,
        "mlp": "swiglu-clamped", "router_bias": True, "experts": 6, "experts_per_token": 2, "expert_width": 24,
        "balance": "sequence", "balance_loss": 0.3, "rope_scaling": "yarn", "rope_factor": 4.0, "rope_base": 500.0,
        "rope_original_context": 8, "rope_truncate": False,
    },
    "sinks, all": {
        "sinks": True, "window": 7, "full_attention_every": 2, "mlp_bias": True, "mlp": "swiglu-clamped",
        "router_bias": True, "experts": 3, "experts_per_token": 3, "expert_width": 48, "balance": "sequence",
    },
    # an expert takes nine choices of each sequence, of which eight are its equal share
    "capacity": {
        "experts": 6, "experts_per_token": 2, "expert_width": 24, "capacity_factor": 1.1, "dense_layers": 1,
        "balance": "sequence", "balance_loss": 0.3,
    },
    # 16 bits round scores, so that a token may choose other experts than in float64: here it has all
    "all": {"experts": 3, "experts_per_token": 3, "expert_width": 48, "shared_experts": 1, "balance": "sequence"},
}  # fmt: skip
"""Sparse models, by name: options that together use every part of a sparse layer."""


def small_model(
    preset: Preset, layers: int, heads: int = 48, dropout: float = 0.0, init_std: float = 0.2, sparse: str = ""
) -> ModelConfig:
    """Return the configuration of a small model; its default number of heads is divisible by 2, 3, 4, 6 and 8.

    The default initial weights are large enough that every gradient matters. `sparse`: a name of SPARSE.
    """
    grouped = preset == "llama" or "kv_heads" in find_preset(preset).options
    sizes: dict[str, Any] = {
        "layers": layers,
        "width": 96,
        "heads": heads,
        "kv_heads": heads // 2 if grouped else heads,
        "ffn_width": 96,
        "dropout": dropout,
        "init_std": init_std,
        "vocab_size": VOCAB_SIZE,
        "context": SEQ_LEN,
    }
    if preset in SHRUNK:
        sizes.update(SHRUNK[preset].options)
    sizes.update(SPARSE[sparse])
    return ModelConfig(preset=preset, **sizes).resolve(VOCAB_SIZE, SEQ_LEN)


_SEQUENCES = 8  # per step, rounded up to a multiple of replicas x micro-batches
_MAX_STAGES = 16
_RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
Pair = frozenset[tuple[str, object]]  # two options and their values
_PRESETS: tuple[Preset, ...] = ("llama", "gpt2")


@dataclass(frozen=True)
class Case:
    """A small model and a resolved layout to train it in, and what the result is compared with."""

    preset: Preset
    layout: ParallelConfig
    layers: int
    sequences: int
    """Sequences per step, over all replicas."""
    recompute: Recompute = "none"
    precision: Precision = "fp64"
    reference: Literal["one process", "plain decoder", "transformers"] = "one process"
    """one process: of our own code, without recomputation, offloading and compilation; the others share no code
    with it, and are one process, too, but for replicas that send compressed gradients or take local steps."""
    heads: int = 48
    dropout: float = 0.0
    init_std: float = 0.2
    optimizer: Literal["sgd", "adamw", "muon"] = "sgd"
    """adamw, muon: with weight decay and clipped gradients."""
    z_loss: float = 0.0
    offload: OffloadTarget = "device"
    """Storage of AdamW's moments, and with ZeRO-3 of the parameters too."""
    steps: int = 3
    """Of training, before an evaluation."""
    compiled: bool = False
    documents: bool = False
    """Several documents a sequence, which do not see each other."""
    padding: bool = False
    """Sequences end in padding."""
    chats: bool = False
    """Of each document the tokens of every other turn are targets, as of packed chats: with documents and padding."""
    device: Literal["cpu", "cuda"] = "cpu"
    sparse: str = ""
    """A name of SPARSE: with experts."""

    @classmethod
    def of(cls, preset: Preset, layout: ParallelConfig, recompute: Recompute = "none", **options: Any) -> "Case":
        """Choose numbers of layers and sequences that the layout can split; `options` are further fields."""
        parts = layout.dp * layout.micro_batches * layout.batch_shards
        sequences = -(-_SEQUENCES // parts) * parts
        dropout = 0.1 if preset == "gpt2" else 0.0
        options = {"dropout": dropout, "sequences": sequences, **options}
        return cls(preset, layout, _layer_count(layout), recompute=recompute, **options)

    @property
    def model(self) -> ModelConfig:
        return small_model(self.preset, self.layers, self.heads, self.dropout, self.init_std, self.sparse)

    @property
    def processes(self) -> int:
        return self.layout.processes

    @property
    def sends_tensors(self) -> bool:
        """Return whether ranks send each other tensors outside collectives, as pipelines, grids and rings do."""
        return self.layout.pp > 1 or self.layout.tensor != "1d" or self.layout.cp > 1

    @property
    def counts_traffic(self) -> bool:
        """Return whether the traffic is compared with theory, whose formulas are for plain steps."""
        if self.optimizer != "sgd" or self.offload != "device" or self.compiled:
            return False
        layout = self.layout
        if layout.zero == 3 and layout.pp > 1 and torch.__version__ >= "2.14":
            return False  # torch 2.15 reduces a first stage's embedding once a step, those before with each micro-batch
        if layout.tensor == "3d" and (self.model.query_layer or self.documents):
            return False  # on a cube queries have other tokens, and documents' positions are exchanged
        if layout.context == "ulysses" and self.documents:
            return False  # whose positions are gathered
        return layout.ep == 1  # with more, how many tokens ranks send is the router's choice

    @property
    def of_reference(self) -> "Case":
        """Return the case as the reference runs it: one process on the CPU, if independent; else on the same device."""
        case = replace(self, layout=_reference_layout(self.layout), recompute="none", offload="device", compiled=False)
        if case.reference != "one process":
            case = replace(case, device="cpu")
        return case

    def __str__(self) -> str:
        return " ".join([self.preset, name_of_layout(self.layout), *self.options])

    @property
    def options(self) -> list[str]:
        """Return the options besides the layout, where they are not the usual ones, and the reference, in words."""
        words = [
            (f"recompute-{self.recompute}", self.recompute != "none"),
            (self.optimizer, self.optimizer != "sgd"),
            ("z-loss", self.z_loss > 0),
            (f"offload-{self.offload}", self.offload != "device"),
            (f"experts-{self.sparse}", self.sparse != ""),
            ("compiled", self.compiled),
            ("documents", self.documents),
            ("padding", self.padding),
            ("chats", self.chats),
            (self.precision, self.precision != "fp64"),
            (f"{self.steps} steps", self.steps != 3),
            (f"= {self.reference}", self.reference != "one process"),
        ]
        return [word for word, applies in words if applies]


def name_of_layout(layout: ParallelConfig) -> str:
    """Return the options of a layout in words, without those that have no effect."""
    words = [
        (f"dp{layout.dp} tp{layout.tp} pp{layout.pp}", True),
        (f"zero{layout.zero}", layout.zero > 0),
        (f"shard{layout.zero_group}", 1 < layout.zero_group < layout.dp),
        ("sp", layout.sequence_parallel),
        (f"{layout.tensor} {' x '.join(map(str, layout.grid))}", layout.tensor != "1d"),
        (f"cp{layout.cp} {layout.context}", layout.cp > 1),
        (f"ep{layout.ep}", layout.ep > 1),
        (f"{layout.schedule} v{layout.virtual_stages}", layout.pp > 1),
        (f"{layout.compression} {layout.compression_rank}", layout.compression == "powersgd"),
        ("int8", layout.compression == "int8"),
        (f"H{layout.local_steps}", layout.local_steps > 0),
        (f"m{layout.micro_batches}", layout.micro_batches > 1),
    ]
    return " ".join(word for word, applies in words if applies)


def _reference_layout(own: ParallelConfig) -> ParallelConfig:
    """Return the layout of a reference: one process, but for replicas that one process trains by turns."""
    one = ParallelConfig(dp=1, zero_group=1, virtual_stages=1, micro_batches=1)
    if own.local_steps:
        return replace(one, dp=own.local_replicas, local_steps=own.local_steps)
    if own.compression == "none":
        return one
    # PowerSGD approximates the pieces that tensor-parallel ranks have
    return replace(one, dp=own.dp, tp=own.tp, compression=own.compression, compression_rank=own.compression_rank)


def _layer_count(layout: ParallelConfig) -> int:
    """Return one layer more than stages, so that stages have different numbers of them."""
    return max(4, layout.stages + 1)


def all_cases(processes: int) -> tuple[list[Case], dict[ParallelConfig, str]]:
    """Return every layout of 1 … `processes` processes, and the refused layouts with the reason.

    Preset, number of micro-batches and recomputation are drawn pseudo-randomly, as a function of the layout.
    """
    cases = []
    refused = {}
    for layout in _layouts(processes):
        accepted, reason = _with_micro_batches(layout)
        if not accepted:
            refused[layout] = reason
            continue
        draw = key_from_name(f"{layout}")
        preset = _PRESETS[draw % 2]
        recompute = _RECOMPUTE[(draw >> 8) % 3]
        cases.append(Case.of(preset, accepted[(draw >> 16) % len(accepted)], recompute))
    return cases, refused


def _layouts(processes: int) -> Iterator[ParallelConfig]:
    """Yield every combination of layout options, including impossible ones; `micro_batches` is left at 0."""
    for count in range(1, processes + 1):
        for dp, tp in itertools.product(_divisors(count), repeat=2):
            if count % (dp * tp):
                continue
            pp = count // (dp * tp)
            yield from _layouts_of_sizes(dp, tp, pp)


def _layouts_of_sizes(dp: int, tp: int, pp: int) -> Iterator[ParallelConfig]:
    """Yield the layouts of given numbers of replicas, tensor-parallel ranks and pipeline ranks."""
    for sequence_parallel in (False, True) if tp > 1 else (False,):
        for zero, shard in _zero_options(dp):
            for schedule, virtual in _pipeline_options(pp):
                yield ParallelConfig(dp, zero, shard, tp, sequence_parallel, pp, schedule, virtual)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _zero_options(dp: int) -> list[tuple[Literal[0, 1, 2, 3], int]]:
    """Return ZeRO stages and group sizes: all replicas, or groups of them (hybrid sharding)."""
    stages: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)
    options: list[tuple[Literal[0, 1, 2, 3], int]] = [(0, 1)]
    for zero in stages:
        options += [(zero, shard) for shard in _divisors(dp) if shard > 1]
    return options


def _pipeline_options(pp: int) -> list[tuple[Schedule, int]]:
    """Return schedules, and the numbers of stages a rank that they take."""
    if pp == 1:
        return [("1f1b", 1)]
    options = []
    for schedule, kind in SCHEDULES.items():
        for stages_per_rank in (kind.stages_per_rank,) if kind.stages_per_rank else (2, 3):
            if stages_per_rank * pp <= _MAX_STAGES:
                options.append((schedule, stages_per_rank))
    return options


def _with_micro_batches(layout: ParallelConfig) -> tuple[list[ParallelConfig], str]:
    """Return the layout with each number of micro-batches that it accepts; if it accepts none, the reason."""
    if layout.pp == 1:
        numbers = [1, 2]
    else:
        numbers = [layout.stages, layout.stages + layout.pp, layout.stages + 1, layout.pp, 1]
    processes = layout.dp * layout.tp * layout.pp
    model = small_model("llama", _layer_count(layout))
    accepted: list[ParallelConfig] = []
    reason = ""
    for number in dict.fromkeys(numbers):
        try:
            accepted.append(replace(layout, micro_batches=number).resolve(processes, model, SEQ_LEN))
        except UsageError as error:
            reason = reason or str(error)
    return accepted, "" if accepted else reason


def covering_cases(processes: int = 4) -> list[Case]:
    """Return a small set of cases in which every possible pair of option values occurs, and three 3D layouts.

    Greedy: always takes the case with the most uncovered pairs per cost.
    """
    candidates = list(_candidates(processes))
    pairs = [_pairs(case) for case in candidates]
    uncovered = set().union(*pairs)
    heap = []
    for index, case in enumerate(candidates):
        heap.append((-_pairs_per_cost(case, pairs[index], uncovered), index))
    heapq.heapify(heap)
    chosen: list[Case] = []
    while uncovered:
        index = heap[0][1]
        score = _pairs_per_cost(candidates[index], pairs[index], uncovered)
        # scores only shrink: a case that is still first after its score was recomputed is the best of all
        if -score > heap[0][0]:
            heapq.heapreplace(heap, (-score, index))
            continue
        heapq.heappop(heap)
        chosen.append(candidates[index])
        uncovered -= pairs[index]
    return chosen + [case for case in _CASES_3D if _with_micro_batches(case.layout)[0]]


def _candidates(processes: int) -> Iterator[Case]:
    """Yield every layout with every preset and mode of recomputation."""
    for layout in _layouts(processes):
        if layout.virtual_stages > 2:
            continue  # three stages per rank cost more and run the same code as two
        for accepted in _with_micro_batches(layout)[0]:
            for preset in _PRESETS:
                for recompute in _RECOMPUTE:
                    yield Case.of(preset, accepted, recompute)


def _pairs_per_cost(case: Case, pairs: set[Pair], uncovered: set[Pair]) -> float:
    """Return the uncovered pairs in a case over its cost, which grows with processes and passes through blocks."""
    layout = case.layout
    passes_of_block = 1 if case.recompute == "none" else 2
    passes = layout.dp * layout.tp * case.layers * layout.micro_batches * passes_of_block
    return len(pairs & uncovered) / (10 * case.processes + passes)


def _pairs(case: Case) -> set[Pair]:
    """Return all pairs of the case's options with their values."""
    layout = case.layout
    # 1, 0 or -1: more micro-batches than stages, as many, or fewer
    more = (layout.micro_batches > layout.stages) - (layout.micro_batches < layout.stages)
    values: Sequence[tuple[str, object]] = [
        ("dp", min(layout.dp, 3)),
        ("tp", min(layout.tp, 3)),
        ("pp", min(layout.pp, 3)),
        ("zero", layout.zero),
        ("hybrid", 1 < layout.zero_group < layout.dp),
        ("sequence_parallel", layout.sequence_parallel),
        ("schedule", layout.schedule if layout.pp > 1 else None),
        ("virtual_stages", layout.virtual_stages),
        ("micro_batches", more),
        ("recompute", case.recompute),
        ("preset", case.preset),
    ]
    return {frozenset(pair) for pair in itertools.combinations(values, 2)}


_CASES_3D = [
    Case.of("gpt2", ParallelConfig(2, 1, 2, 2, True, 2, "1f1b", 1, 2)),
    Case.of("llama", ParallelConfig(2, 2, 2, 2, False, 2, "zbv", 2, 4)),
    Case.of("llama", ParallelConfig(1, 0, 1, 4, True, 2, "gpipe", 1, 2)),
]
