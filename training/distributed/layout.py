"""The layout of a run: how model and memory are divided, and which divisions are possible."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from gristmill.errors import require
from training.model.model_config import ModelConfig

Schedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "zero-bubble", "zbv", "dualpipev"]

# stages a rank: what the schedule is defined for (None: any number above 1)
STAGES_PER_RANK: dict[str, int | None] = {
    "gpipe": 1, "1f1b": 1, "interleaved-1f1b": None, "looped-bfs": None, "zero-bubble": None, "zbv": 2, "dualpipev": 2,
}  # fmt: skip
SPLIT_BACKWARD = ("zero-bubble", "zbv", "dualpipev")  # compute gradients of inputs and of weights apart


@dataclass(frozen=True)
class ParallelConfig:
    """How the model is spread over dp x tp x pp processes."""

    dp: int = 0
    """Replicas, which read different samples; 0: as many as there are processes for."""
    zero: Literal[0, 1, 2, 3] = 0
    """What the replicas divide among them: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too (FSDP)."""
    shard: int = 0
    """Hybrid sharding: this many neighbouring replicas divide it, and the groups repeat each other; 0: all."""
    tp: int = 1
    """Processes that divide every matrix (Megatron's tensor parallelism)."""
    sequence_parallel: bool = False
    """With tp: divide what lies between the matrices along the sequence, which saves memory."""
    pp: int = 1
    """Processes that divide the layers: a pipeline."""
    schedule: Schedule = "1f1b"
    """The order in which a pipeline's micro-batches are computed."""
    virtual_stages: int = 0
    """Stages a pipeline's process holds; 0: what the schedule wants, 1 or 2."""
    micro_batches: int = 0
    """Parts of a replica's batch that pass through the model one by one; 0: as few as the schedule takes.
    More of them need less memory, and make a pipeline's bubble smaller."""

    def resolve(self, processes: int, model: ModelConfig, seq_len: int) -> "ParallelConfig":
        """The same with no 0 left; UsageError for a layout that is impossible, saying what would be possible."""
        full = replace(
            self,
            dp=self.dp or max(1, processes // max(1, self.tp * self.pp)),
            virtual_stages=self.virtual_stages or (1 if self.pp == 1 else STAGES_PER_RANK[self.schedule] or 2),
        )
        full = replace(full, shard=full.shard or (full.dp if full.zero else 1))
        full = replace(full, micro_batches=full.micro_batches or (full.stages if full.pp > 1 else 1))
        full.check(processes, model, seq_len)
        return full

    def describe(self) -> str:
        """In a few words, for people."""
        words = [f"dp {self.dp}"]
        if self.zero:
            words.append(f"ZeRO-{self.zero}" + (f" over {self.shard}" if self.shard != self.dp else ""))
        if self.tp > 1:
            words.append(f"tp {self.tp}" + (" with sequence parallelism" if self.sequence_parallel else ""))
        if self.pp > 1:
            turns = f", {self.virtual_stages} stages each" if self.virtual_stages > 1 else ""
            words.append(f"pp {self.pp} ({self.schedule}{turns})")
        return " x ".join(words)

    @property
    def stages(self) -> int:
        return self.pp * self.virtual_stages

    def check(self, processes: int, model: ModelConfig, seq_len: int) -> None:
        """Raise UsageError unless the resolved layout is one of this model over so many processes."""
        _check_product(self, processes)
        _check_replicas(self)
        _check_tensor(self, model, seq_len)
        require(
            self.pp > 1 or self.virtual_stages == 1,
            f"parallel.virtual_stages {self.virtual_stages} divides what a pipeline's process has, and parallel.pp is "
            "1; try --parallel.pp 2, or --parallel.virtual_stages 1",
        )
        if self.pp > 1:
            _check_pipeline(self, model)
        require(self.micro_batches > 0, f"parallel.micro_batches is {self.micro_batches}; wanted 1 or more")


def _check_product(layout: ParallelConfig, processes: int) -> None:
    dp, tp, pp = layout.dp, layout.tp, layout.pp
    require(min(dp, tp, pp) > 0, f"parallel.dp, tp and pp are {dp}, {tp} and {pp}; wanted 1 or more of each")
    fits = processes % (tp * pp) == 0
    advice = f"--parallel.dp {processes // (tp * pp)}" if fits else f"{dp * tp * pp} processes"
    require(
        dp * tp * pp == processes,
        f"dp {dp} x tp {tp} x pp {pp} = {dp * tp * pp} processes, and {processes} were started; try {advice}",
    )


def _check_replicas(layout: ParallelConfig) -> None:
    require(
        layout.zero > 0 or layout.shard == 1,
        f"parallel.shard {layout.shard} divides nothing with parallel.zero 0; try --parallel.zero 2",
    )
    require(
        layout.shard > 0 and layout.dp % layout.shard == 0,
        f"parallel.dp {layout.dp} is not divisible by parallel.shard {layout.shard}; try one of its divisors",
    )


def _check_tensor(layout: ParallelConfig, model: ModelConfig, seq_len: int) -> None:
    tp = layout.tp
    common = math.gcd(model.heads, model.kv_heads, model.hidden)
    limit = max(n for n in range(1, tp + 1) if common % n == 0 and n * n <= model.vocab_size)
    for name in ("heads", "kv_heads", "hidden"):
        size = getattr(model, name)
        require(size % tp == 0, f"model.{name} {size} is not divisible by parallel.tp {tp}; try --parallel.tp {limit}")
    require(
        model.vocab_size >= tp * tp,  # so that the last rank has one, too
        f"a vocabulary of {model.vocab_size} is too small for parallel.tp {tp}; try --parallel.tp {limit}",
    )
    require(
        not layout.sequence_parallel or tp > 1,
        "parallel.sequence_parallel divides the sequence over parallel.tp, which is 1; try --parallel.tp 2",
    )
    require(
        not layout.sequence_parallel or seq_len % tp == 0,
        f"data.seq_len {seq_len} is not divisible by parallel.tp {tp}, over which sequence_parallel divides it; "
        f"try --data.seq_len {-(-seq_len // tp) * tp}",
    )


def _check_pipeline(layout: ParallelConfig, model: ModelConfig) -> None:
    name, wanted = layout.schedule, STAGES_PER_RANK[layout.schedule]
    require(
        layout.virtual_stages == wanted if wanted else layout.virtual_stages > 1,
        f"parallel.virtual_stages is {layout.virtual_stages}; schedule {name} is defined for {wanted or '2 or more'} "
        f"stages a process; try --parallel.virtual_stages {wanted or 2}",
    )
    require(
        model.layers >= layout.stages,
        f"model.layers {model.layers} cannot fill {layout.stages} pipeline stages ({layout.pp} processes x "
        f"{layout.virtual_stages}); try --parallel.pp {max(1, model.layers // layout.virtual_stages)}",
    )
    rounds = layout.micro_batches
    least = {"1f1b": layout.pp, "dualpipev": layout.stages}.get(name, 1)
    require(
        rounds >= least,
        f"parallel.micro_batches {rounds} are too few: schedule {name} of {layout.stages} stages takes {least} or "
        f"more; try --parallel.micro_batches {least}",
    )
    groups = max(1, rounds // layout.pp)
    require(
        layout.virtual_stages == 1 or rounds % groups == 0,
        f"parallel.micro_batches {rounds} do not divide into rounds of {layout.pp}, as schedule {name} takes them; "
        f"try --parallel.micro_batches {-(-rounds // layout.pp) * layout.pp}",
    )
    require(
        layout.zero < 3 or name not in SPLIT_BACKWARD,
        f"parallel.zero 3 frees parameters that schedule {name} still needs for the second half of its backward pass "
        "(torch leaves gradients out, or computes wrong ones); try --parallel.zero 2, or --parallel.schedule 1f1b",
    )
