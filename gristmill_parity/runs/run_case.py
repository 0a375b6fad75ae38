"""RunCase: a run of the trainer itself, which is stopped and resumes; and the runs of the certificate."""

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from gristmill.errors import UsageError
from gristmill_parity.cases import SEQ_LEN, Case, Preset, name_of_layout, small_model
from gristmill_parity.feature_cases import HEADS, INIT_STD
from gristmill_parity.worker import ADAMW
from training.experimental.parallel_config import ParallelConfig
from training.optim.optim_config import OptimConfig

STOP_BEFORE_STEP = 4
SAVE_EVERY = 2
EVALUATE_EVERY = 3
_ENOUGH_LAYERS = 9  # for every pipeline
EVALUATED = 11  # sequences of the holdout, which no number of replicas divides


@dataclass(frozen=True)
class RunCase(Case):
    """A run by `train_as_planned`: steps, evaluations and checkpoints, a stop, and a resume under another layout.

    After a crash it resumes from an earlier checkpoint, and repeats a step; after a signal from one of that moment.
    """

    resumed: ParallelConfig = field(default_factory=ParallelConfig)
    stop: Literal["crash", "signal"] = "crash"
    batch_ramp: tuple[str, ...] = ()
    weights: tuple[float, ...] = ()
    """Of two data sets; empty: there is one."""
    fp16_scale: float = 1024.0

    @classmethod
    def of_layouts(cls, preset: Preset, before: ParallelConfig, after: ParallelConfig, **options: Any) -> "RunCase":
        """Return a run that begins under one layout and resumes under another."""
        options = {"steps": 6, "optimizer": "adamw", "reference": "plain decoder", **options}
        model = small_model(preset, _ENOUGH_LAYERS, HEADS, sparse=options.get("sparse", ""))
        layout = before.resolve(before.processes, model, SEQ_LEN)
        resumed = after.resolve(after.processes, model, SEQ_LEN)
        case = cls.of(preset, layout, resumed=resumed, heads=HEADS, init_std=INIT_STD, **options)
        assert isinstance(case, RunCase)
        return replace(case, layers=max(case.layers, cls.of(preset, resumed).layers))

    @property
    def processes(self) -> int:
        return max(self.layout.processes, self.resumed.processes)

    @property
    def sends_tensors(self) -> bool:
        """Return True: the trainer refuses ranks that share a GPU."""
        return True

    @property
    def counts_traffic(self) -> bool:
        return False

    @property
    def of_reference(self) -> "RunCase":
        reference = super().of_reference
        assert isinstance(reference, RunCase)
        return replace(reference, resumed=reference.layout, stop="crash")

    @property
    def optim(self) -> OptimConfig:
        """Return options with a warm-up and a decay, and gradients that are clipped but for SGD."""
        max_grad_norm = 0.0 if self.optimizer == "sgd" else ADAMW.max_grad_norm
        return replace(
            ADAMW,
            name=self.optimizer,
            steps=self.steps,
            warmup_steps=2,
            schedule="cosine",
            min_lr=ADAMW.lr / 10,
            max_grad_norm=max_grad_norm,
        )

    @property
    def seq_len(self) -> int:
        return SEQ_LEN

    @property
    def evaluations(self) -> list[int]:
        """Return the steps after which the run is evaluated, the last one too."""
        every = range(EVALUATE_EVERY, self.steps + 1, EVALUATE_EVERY)
        return sorted({*every, self.steps})

    def __str__(self) -> str:
        layouts = [name_of_layout(self.layout), self.stop, name_of_layout(self.resumed)]
        options = [word for word in self.options if not word.endswith(" steps")]
        return " ".join(["trainer", self.preset, *layouts, *options])


def trainer_runs(full: bool, device: Literal["cpu", "cuda"] = "cpu") -> tuple[list[RunCase], list[str]]:
    """Return runs under several layouts, with every kind of data order; in `full` with every state of checkpoints.

    Also a line for each that this version of torch refuses.
    """
    one = ParallelConfig(dp=1)
    two = ParallelConfig(dp=2)
    tp = ParallelConfig(dp=1, tp=2)
    pp = ParallelConfig(dp=1, pp=2, schedule="1f1b")
    documents = {"documents": True, "dropout": 0.0}
    rows: list[tuple[Preset, ParallelConfig, ParallelConfig, dict[str, Any]]] = [
        ("gpt2", one, one, {}),
        ("llama", replace(two, zero=2, micro_batches=2), tp, documents),
        ("gpt2", replace(two, zero=1), one, {"weights": (3.0, 1.0), "stop": "signal"}),
        ("gpt2", replace(two, zero=3), pp, {"precision": "fp16", "optimizer": "sgd"}),
        ("gpt2", replace(tp, sequence_parallel=True), replace(two, zero=1), {
            "batch_ramp": ("4:200",), "optimizer": "sgd", "stop": "signal",
        }),
    ]  # fmt: skip
    if full:
        rows += [
            ("gpt2", replace(two, zero=1, tp=2, pp=2), replace(two, dp=4, zero=3), documents),
            ("gpt2", replace(two, dp=4, zero=2, zero_group=2), replace(two, cp=2), {"batch_ramp": ("4:200",)}),
            ("gpt2", replace(two, zero=3), replace(tp, micro_batches=2), {"offload": "disk", "stop": "signal"}),
            ("gpt2", replace(pp, schedule="zbv"), two, {"precision": "bf16", "optimizer": "sgd"}),
            ("llama", tp, replace(two, zero=1), {"z_loss": 0.01, "weights": (1.0, 2.0)}),
            ("llama", replace(two, ep=2), replace(two, dp=4, ep=2, zero=1), {"sparse": "bias"}),
            ("llama", replace(two, zero=1), tp, {"sparse": "switch", "stop": "signal"}),
            ("gpt2", replace(two, compression="int8"), replace(two, compression="int8"), {}),
            ("gpt2", replace(two, compression="powersgd"), replace(two, compression="powersgd"), {"stop": "signal"}),
            ("gpt2", replace(two, local_steps=2), replace(two, local_steps=2), {"stop": "signal"}),
            ("gpt2", replace(two, local_steps=3), replace(two, local_steps=3), {}),
        ]
        if device == "cpu":  # a GPU orthogonalises in bf16
            rows.append(("llama", replace(two, zero=1), tp, {"optimizer": "muon"}))
    runs = []
    refused = []
    for preset, before, after, options in rows:
        try:
            runs.append(RunCase.of_layouts(preset, before, after, device=device, **options))
        except UsageError as error:
            refused.append(str(error))
    return runs, refused
