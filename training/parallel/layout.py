"""The parallel layout: sizes of data, tensor, pipeline and context parallelism, and the checks that a model fits."""

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, Literal

from gristmill.config import Range
from gristmill.errors import require
from training.distributed.torch_version import require_torch
from training.model.model_config import ModelConfig
from training.parallel.compression.options import DEFAULT_RANK, check_compression
from training.parallel.context.options import check_context
from training.parallel.grid.options import check_grid
from training.parallel.tensor.options import check_tensor

Schedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zero-bubble", "zbv", "dualpipev"]

# pipeline stages per rank that each schedule is defined for; None: any number above 1
STAGES_PER_RANK: dict[str, int | None] = {
    "gpipe": 1, "1f1b": 1, "interleaved-1f1b": None, "looped-bfs": None, "zero-bubble": None, "zbv": 2, "dualpipev": 2,
}  # fmt: skip
# schedules that compute gradients of inputs and of weights separately (Qi et al. 2023)
SPLIT_BACKWARD = ("zero-bubble", "zbv", "dualpipev")
V_SHAPED = ("zbv", "dualpipev")  # rank r of p holds stages r and 2 p - 1 - r: the first and the last stage share one


@dataclass(frozen=True)
class ParallelConfig:
    """The parallel layout: dp x tp x pp x cp ranks."""

    dp: int = 0
    """Data-parallel replicas, which read different sequences; 0: the number of ranks / (tp x pp x cp)."""
    zero: Literal[0, 1, 2, 3] = 0
    """ZeRO stage, sharded over replicas: 0 nothing; 1 optimizer state; 2 also gradients; 3 also parameters (FSDP)."""
    zero_group: int = 0
    """Hybrid sharding (HSDP): shard over groups of this many neighbouring replicas, replicate between groups; 0: one
    group."""
    tp: int = 1
    """Tensor-parallel ranks: every matrix is sharded over them (Shoeybi et al. 2019, Megatron-LM)."""
    sequence_parallel: bool = False
    """With tp: shard the activations between the matrices along the sequence, which saves memory (Korthikanti et al.
    2022)."""
    pp: int = 1
    """Pipeline-parallel ranks: the layers are split into stages over them."""
    schedule: Schedule = "1f1b"
    """Pipeline schedule: the order of the micro-batches' forward and backward passes."""
    virtual_stages: int = 0
    """Pipeline stages per rank; 0: the schedule's default, 1 or 2."""
    micro_batches: int = 0
    """Micro-batches per step and replica, over which gradients are accumulated; 0: one per pipeline stage. More of
    them need less activation memory and shrink the pipeline's bubble."""
    reduce_bf16: bool = False
    """Sum gradients over replicas in bf16 instead of float32: half the bytes, less exact; with precision bf16 only."""
    tensor: Literal["1d", "2d", "2.5d", "3d"] = field(default="1d", repr=False)
    """How tp ranks divide matrices: 1d, by rows or columns; 2d, into blocks on a grid of q x q ranks (Xu et al. 2021,
    Optimus); 2.5d, on `depth` layers of such a grid, between which sequences are divided (Wang et al. 2021,
    Tesseract); 3d, on a cube of l x l x l ranks (Bian et al. 2021)."""
    depth: int = field(default=1, repr=False)
    """Layers of the grid, of 2.5d: tp is q x q x depth."""
    cp: int = field(default=1, repr=False)
    """Context-parallel ranks: the tokens of each sequence are divided over them, so that each has 1 / cp of all
    activations. For parameters they are replicas, over which ZeRO shards too."""
    context: Literal["ring", "ulysses"] = field(default="ring", repr=False)
    """How tokens see those of other cp ranks. ring: keys and values go around (Liu et al. 2023); ulysses: an exchange
    gives each rank all tokens of some heads (Jacobs et al. 2023)."""
    compression: Literal["none", "powersgd", "int8"] = field(default="none", repr=False)
    """What replicas send of their gradients, each remembering what it left out (error feedback). powersgd:
    approximations of rank `compression_rank` (Vogels et al. 2019); int8: 8-bit codes in blocks with a scale each."""
    compression_rank: int = field(default=DEFAULT_RANK, repr=False)
    """Rank of PowerSGD's approximations: a matrix of n x m numbers is sent as rank x (n + m)."""
    local_steps: int = field(default=0, repr=False)
    """DiLoCo (Douillard et al. 2023): each replica takes this many optimizer steps on its own sequences, then their
    weights are averaged, by an outer optimizer (optim.outer_lr, optim.outer_momentum). A replica is a data-parallel
    one, or with ZeRO a zero_group of them. 0: gradients are summed over all replicas in every step."""
    RENAMED: ClassVar[dict[str, str]] = {"shard": "zero_group"}
    RANGES: ClassVar[dict[str, Range]] = {
        **dict.fromkeys(("dp", "zero_group", "virtual_stages", "micro_batches", "local_steps"), Range(0, 2**31 - 1)),
        **dict.fromkeys(("tp", "pp", "depth", "cp", "compression_rank"), Range(1, 2**31 - 1)),
    }

    def resolve(self, processes: int, model: ModelConfig, seq_len: int) -> "ParallelConfig":
        """Return a copy with every 0 filled in for `processes` ranks. Raises UsageError if it does not fit."""
        full = replace(
            self,
            dp=self.dp or max(1, processes // max(1, self.tp * self.pp * self.cp)),
            virtual_stages=self.virtual_stages or (1 if self.pp == 1 else STAGES_PER_RANK[self.schedule] or 2),
        )
        full = replace(full, zero_group=full.zero_group or (full.dp if full.zero else 1))
        full = replace(full, micro_batches=full.micro_batches or (full.stages if full.pp > 1 else 1))
        full.check(processes, model, seq_len)
        return full

    def describe(self) -> str:
        """One line for logs, such as "dp 4 x ZeRO-2 x tp 2"."""
        words = [f"dp {self.dp}"]
        if self.zero:
            words.append(f"ZeRO-{self.zero}" + (f" over {self.zero_group}" if self.zero_group != self.dp else ""))
        if self.tp > 1:
            grid = "" if self.tensor == "1d" else f" ({self.tensor}, {' x '.join(map(str, self.grid))})"
            words.append(f"tp {self.tp}{grid}" + (" with sequence parallelism" if self.sequence_parallel else ""))
        if self.pp > 1:
            turns = f", {self.virtual_stages} stages each" if self.virtual_stages > 1 else ""
            words.append(f"pp {self.pp} ({self.schedule}{turns})")
        if self.cp > 1:
            words.append(f"cp {self.cp} ({self.context})")
        if self.compression != "none":
            words[0] += f" ({self.compression}{f' of rank {self.compression_rank}' * (self.compression == 'powersgd')})"
        if self.local_steps:
            words.append(f"{self.local_replicas} replicas of {self.local_steps} local steps")
        return " x ".join(words)

    def record(self) -> dict[str, Any]:
        """The fields, as checkpoints have them; those of a grid and of contexts only where there are some."""
        absent = (("tensor", "depth") if self.tensor == "1d" else ()) + (("cp", "context") if self.cp == 1 else ())
        absent += tuple({"compression", "compression_rank"} - self.compression_record().keys())
        absent += () if self.local_steps else ("local_steps",)
        return {key: value for key, value in asdict(self).items() if key not in absent}

    def compression_record(self) -> dict[str, str | int]:
        """The options of compression that have an effect, by name; they change what a run computes."""
        rank = {"compression_rank": self.compression_rank} if self.compression == "powersgd" else {}
        return {"compression": self.compression, **rank} if self.compression != "none" else {}

    @property
    def processes(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def replicas(self) -> int:
        """Ranks over which the gradient of a parameter is summed: they have other sequences, or tokens of them."""
        return self.dp * self.cp

    @property
    def shards(self) -> int:
        """Ranks over which ZeRO shards a parameter."""
        return self.zero_group * self.cp if self.zero else 1

    @property
    def local_replicas(self) -> int:
        """Replicas that take local steps, each of its own weights; 1 without local steps."""
        return self.replicas // self.shards if self.local_steps else 1

    @property
    def context_chunks(self) -> int:
        """Chunks of a sequence that a rank holds: of a ring two, an early and a late one, where cp divides it."""
        return 2 if self.cp > 1 and self.context == "ring" else 1

    @property
    def grid(self) -> tuple[int, int, int]:
        """Depth, rows and columns of the grid of tensor-parallel ranks; 1, 1, 1 without one."""
        if self.tensor == "3d":
            side = round(self.tp ** (1 / 3))
            return side, side, side
        side = 1 if self.tensor == "1d" else math.isqrt(self.tp // self.depth)
        return (1 if self.tensor == "1d" else self.depth), side, side

    @property
    def batch_shards(self) -> int:
        """Parts into which tensor-parallel ranks divide the sequences of a replica: layers times rows of a grid."""
        return self.grid[0] * self.grid[1]

    @property
    def sequence_shards(self) -> int:
        """Ranks that share the tokens of a sequence between the tensor-parallel regions."""
        return self.tp if self.sequence_parallel else 1

    @property
    def sequence_parts(self) -> int:
        """Number of equal parts into which a sequence must divide: chunks over cp ranks, tokens over tp ranks."""
        return self.cp * math.lcm(self.context_chunks, self.sequence_shards)

    @property
    def stages(self) -> int:
        """Pipeline stages over all ranks."""
        return self.pp * self.virtual_stages

    @property
    def stage_ranks(self) -> list[int]:
        """The pipeline rank that holds each stage."""
        ranks = list(range(self.pp))
        if self.schedule in V_SHAPED and self.pp > 1:
            return [*ranks, *reversed(ranks)]
        return ranks * self.virtual_stages

    def stages_of_rank(self, rank: int) -> list[int]:
        """The stages that pipeline rank `rank` holds, in ascending order."""
        return [stage for stage, holder in enumerate(self.stage_ranks) if holder == rank]

    def check(self, processes: int, model: ModelConfig, seq_len: int) -> None:
        """Raise UsageError unless this resolved layout fits `processes` ranks, the model and the sequence length."""
        _check_rank_count(self, processes)
        _check_zero_group(self)
        if self.tensor == "1d":
            check_tensor(self, model, seq_len)
        else:
            check_grid(self, model)
        check_context(self, model, seq_len)
        check_compression(self, model)
        require(
            self.pp > 1 or self.virtual_stages == 1,
            f"parallel.virtual_stages {self.virtual_stages} needs a pipeline, and parallel.pp is 1; "
            "try --parallel.pp 2, or --parallel.virtual_stages 1",
        )
        if self.pp > 1:
            _check_pipeline(self, model)
        require(self.micro_batches > 0, f"parallel.micro_batches is {self.micro_batches}; wanted 1 or more")


def _check_rank_count(layout: ParallelConfig, processes: int) -> None:
    dp, tp, pp, cp = layout.dp, layout.tp, layout.pp, layout.cp
    require(min(dp, tp, pp) > 0, f"parallel.dp, tp and pp are {dp}, {tp} and {pp}; wanted 1 or more of each")
    fits = processes % (tp * pp * cp) == 0
    advice = f"--parallel.dp {processes // (tp * pp * cp)}" if fits else f"{layout.processes} processes"
    factors = f"dp {dp} x tp {tp} x pp {pp}" + (f" x cp {cp}" if cp > 1 else "")
    require(
        layout.processes == processes,
        f"{factors} = {layout.processes} processes, and {processes} were started; try {advice}",
    )


def _check_zero_group(layout: ParallelConfig) -> None:
    require(
        layout.zero > 0 or layout.zero_group == 1,
        f"parallel.zero_group {layout.zero_group} has no effect with parallel.zero 0; try --parallel.zero 2",
    )
    require(
        layout.zero_group > 0 and layout.dp % layout.zero_group == 0,
        f"parallel.dp {layout.dp} is not divisible by parallel.zero_group {layout.zero_group}; try one of its divisors",
    )


def _check_pipeline(layout: ParallelConfig, model: ModelConfig) -> None:
    name, per_rank = layout.schedule, STAGES_PER_RANK[layout.schedule]
    require(
        layout.virtual_stages == per_rank if per_rank else layout.virtual_stages > 1,
        f"parallel.virtual_stages is {layout.virtual_stages}; schedule {name} is defined for {per_rank or '2 or more'} "
        f"stages per rank; try --parallel.virtual_stages {per_rank or 2}",
    )
    require(
        model.layers >= layout.stages,
        f"model.layers {model.layers} cannot fill {layout.stages} pipeline stages ({layout.pp} ranks x "
        f"{layout.virtual_stages}); try --parallel.pp {max(1, model.layers // layout.virtual_stages)}",
    )
    count = layout.micro_batches
    least = {"1f1b": layout.pp, "dualpipev": layout.stages}.get(name, 1)
    require(
        count >= least,
        f"parallel.micro_batches {count} are too few: schedule {name} of {layout.stages} stages takes {least} or "
        f"more; try --parallel.micro_batches {least}",
    )
    rounds = max(1, count // layout.pp)
    require(
        layout.virtual_stages == 1 or count % rounds == 0,
        f"parallel.micro_batches {count} do not divide into rounds of {layout.pp}, as schedule {name} takes them; "
        f"try --parallel.micro_batches {-(-count // layout.pp) * layout.pp}",
    )
    if name in SPLIT_BACKWARD:
        require_torch(
            "2.13",
            f"parallel.schedule {name}",
            "before, torch's separate pass for the gradients of weights fails, or counts some twice",
            "--parallel.schedule interleaved-1f1b",
        )
    require(
        layout.zero < 3 or name not in SPLIT_BACKWARD,
        f"parallel.zero 3 frees parameters that schedule {name} still needs for the weight gradients "
        "(torch drops gradients, or computes wrong ones); try --parallel.zero 2, or --parallel.schedule 1f1b",
    )
