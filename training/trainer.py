"""The parts of a run, and what is done with them: step, report, evaluate, save."""

import dataclasses
import gc
import json
import math
import statistics
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch

from gristmill.io.files import atomic_write_bytes
from training.checkpoint.checkpoint import CheckpointManager, CheckpointRecord, load_model
from training.checkpoint.record import require_same_model
from training.checkpoint.shard_storage import model_state
from training.config import TrainConfig
from training.data.batches import Batches, BatchSplit
from training.data.prefetch import PrefetchLoader
from training.data.sequences import TokenSequences, require_same_tokenizer
from training.distributed.hang_detection import lost_contact
from training.distributed.mesh import build_world
from training.model.decoder import Decoder, flops_per_token
from training.optim.optimizer import build_optimizer, learning_rate
from training.optim.stability import Stability
from training.parallel.gradients import scale_gradients, squared_norm
from training.parallel.parallel_model import ParallelModel
from training.reporting.evaluate import bits_per_byte, evaluate, unigram_loss
from training.reporting.metrics import METRICS, Reporter, memory_bytes, peak_tflops, read_metrics
from training.reporting.sample import Sampler


@dataclass(frozen=True)
class Summary:
    """How a run ended; `summary.json`. Losses in nats a token."""

    steps: int
    train_loss: float
    holdout_loss: float
    bits_per_byte: float
    unigram_loss: float
    tokens_per_second: float
    parameters: int
    processes: int
    checkpoint: str


@dataclass(frozen=True)
class StepMetrics:
    """Values logged per step: mean loss in nats/token, gradient 2-norm, why it was skipped (empty: it was not)."""

    number: int
    rate: float
    loss: float
    norm: float
    fault: str


class Trainer:
    """A run's parts, and what is done with them. `done` counts the steps taken."""

    def __init__(self, config: TrainConfig, device: torch.device) -> None:
        self.config = config
        data = config.data
        self.data = TokenSequences(data.train, data.seq_len)
        self.holdout = TokenSequences(data.holdout, data.seq_len)
        require_same_tokenizer(self.data, self.holdout)
        self.tokenizer = self.data.manifest.tokenizer
        self.model_config = config.model.resolve(self.tokenizer.vocab_size, data.seq_len)
        self.identity = config.identity(self.model_config, self.data.manifest, self.holdout.manifest)
        self.layout = config.parallel.resolve(torch.distributed.get_world_size(), self.model_config, data.seq_len)
        self.split = BatchSplit.of(data, self.layout)
        self.world = world = build_world(self.layout, device, config.timeout)
        self.batches = Batches(self.data, self.split, world.dp_rank, config.seed)
        self.loader = PrefetchLoader(self.batches, device)
        sampled = config.eval.sample_tokens > 0
        self.sampler = Sampler(data.train, self.data.manifest, config.eval, config.seed) if sampled else None
        memory = dataclasses.replace(config.memory, folder=config.memory.folder or config.out_dir / "offload")
        memory.check(self.layout.zero)
        self.model = ParallelModel(
            self.model_config, self.layout, world, config.seed, config.precision, memory, config.compile
        )
        updated = self.model.files.updated if self.model.files is not None else None
        self.optimizer = build_optimizer(self.model.params, config.optim, memory, world.rank, after_update=updated)
        self.stability = Stability(config.stability, config.precision)
        self.reporter = Reporter(config.out_dir, world.is_main, config.metrics.tensorboard)
        self.checkpoints = CheckpointManager(
            config.out_dir / "checkpoints", config.checkpoint.keep, world, self.reporter.say
        )
        self.tokens_per_step = data.batch_size * data.seq_len
        self.eval_sequences = min(config.eval.sequences or len(self.holdout), len(self.holdout))
        with torch.device("meta"):
            whole = Decoder(self.model_config)
        self.parameters = sum(p.numel() for p in whole.parameters())
        self.flops_per_token = flops_per_token(whole, data.seq_len)
        self.done, self.pending = 0, list[StepMetrics]()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _k: type[BaseException] | None, error: BaseException | None, _t: TracebackType | None) -> None:
        """Let go of files; a checkpoint that is being written is finished first, if all are there to finish it."""
        try:
            if not lost_contact(error):
                self.checkpoints.wait()
        finally:
            gc.unfreeze()
            self.loader.close()
            self.optimizer.close()
            self.model.close()
            self.reporter.close()

    def resume(self) -> None:
        """Load the latest checkpoint, or measure what a new run is to be compared with; then say what runs."""
        record = self.checkpoints.load(self._state())
        if record is not None:
            self.done, self.unigram = record.step, record.unigram_loss
            self.optimizer.updates, self.stability.state = record.updates, record.stability
            self.optimizer.loaded()
        else:
            if self.config.init_from is not None:
                state = model_state(self.model.params)
                found = load_model(self.config.init_from, state, self.world, self.reporter.say)
                require_same_model(found, self.model_config, self.tokenizer)
            self.unigram = unigram_loss(self.data, self.holdout, self.eval_sequences, self.world)
        self.model.loaded()
        self.model.all_gather_params()
        self.reporter.start(self.done)
        self._say_header(record)
        gc.freeze()  # what is here by now stays: to look through it again and again takes 3 % of a small model's time
        self.since = time.perf_counter()

    def step(self, step: int, stop: int = 0) -> bool:
        """One update of the parameters, or none where `stability` says so; every rank decides alike.

        Returns whether any rank was told to `stop`.
        """
        rate = learning_rate(step - 1, self.config.optim)
        batch = self.loader.batch(step - 1)
        scale = self.stability.scale / self.tokens_per_step
        loss, norm, stops = self._measure(self.model.forward_backward(batch, scale), stop)
        accepted = self.stability.accepts(step, loss, norm)
        if accepted:
            clip = self.config.optim.clip
            shorten = min(1.0, clip / (norm + 1e-6)) if clip else 1.0
            scale_gradients(self.model.params, shorten / self._loss_scale)
            self.optimizer.step(rate)
            self.model.all_gather_params()
        self.optimizer.zero_grad()
        self.done = step
        self.pending.append(StepMetrics(step, rate, loss, norm, self.stability.fault))
        return stops

    def _measure(self, loss: torch.Tensor, stop: int) -> tuple[float, float, bool]:
        """The mean loss, the 2-norm of the gradient, whether to stop: of all processes, in one collective."""
        self._loss_scale = self.stability.scale  # of these gradients
        squares = squared_norm(self.model.params, self.world.device)
        parts = torch.stack([loss.double(), squares, torch.full_like(squares, stop)])
        total, square, stops = self.world.all_reduce(parts).tolist()
        return total / self.tokens_per_step, math.sqrt(square) / self._loss_scale, stops > 0

    def report(self) -> None:
        """Record the steps since the last report, and print the last of them."""
        speed = self._speed((time.perf_counter() - self.since) / len(self.pending))
        for step in self.pending:
            told = {"loss": step.loss, "grad_norm": step.norm}
            finite = {key: value if math.isfinite(value) else None for key, value in told.items()}
            skipped = {"skipped": True} if step.fault else {}
            self.reporter.record("step", step.number, lr=step.rate, **finite, **speed, **skipped)
            if step.fault:
                self.reporter.say(f"skipped step {step.number}: {step.fault}")
        self._say_step(self.pending[-1], speed)
        self.pending.clear()
        self.since = time.perf_counter()

    def evaluate(self, step: int) -> None:
        """Measure the holdout and draw some text; every rank calls it."""
        loss = evaluate(self.model, self.holdout, self.eval_sequences, self.split.micro_batch_size)
        bits = bits_per_byte(loss, self.holdout.manifest)
        text = self.sampler.text(self.model) if self.sampler else ""
        self.reporter.record("eval", step, loss=loss, bits_per_byte=bits, text=text)
        self.reporter.say(
            f"holdout after step {step}: loss {loss:.4f} (unigram {self.unigram:.4f}), {bits:.4f} bits per byte"
        )
        if text:
            self.reporter.say(f"    {text!r}")
        self.since = time.perf_counter()

    def save(self, step: int) -> None:
        """Write a checkpoint, or begin to; every rank calls it."""
        record = CheckpointRecord(
            step=step,
            updates=self.optimizer.updates,
            processes=self.world.size,
            layout=dataclasses.asdict(self.layout),
            stability=self.stability.state,
            unigram_loss=self.unigram,
            model=dataclasses.asdict(self.model_config),
            tokenizer=self.tokenizer,
        )
        self.model.check()
        kept_on_disk = "disk" in (self.config.memory.optimizer, self.config.memory.parameters)  # a copy would not fit
        async_save = self.config.checkpoint.async_save and not kept_on_disk
        write = self.checkpoints.save_async if async_save else self.checkpoints.save
        write(record, self._state())
        self.since = time.perf_counter()

    def say_stopped(self, step: int) -> None:
        """After the checkpoint is whole."""
        self.checkpoints.wait()
        self.reporter.say(f"stopped after step {step}; the same command goes on from there")

    def finish(self) -> Summary:
        """Write summary.json from what was recorded, and say where everything is."""
        self.checkpoints.wait()
        out_dir = self.config.out_dir
        summary = self.world.main_only(self._summarize)
        self.reporter.say(f"done: holdout loss {summary.holdout_loss:.4f}, unigram {summary.unigram_loss:.4f}")
        self.reporter.say(f"    checkpoint  {summary.checkpoint}\n    metrics     {out_dir / METRICS}")
        self.reporter.say(f"    curve       python -m training.reporting.plot {out_dir}")
        return summary

    def _state(self) -> Any:
        return model_state(self.model.params, self.optimizer.moments())

    def _summarize(self) -> Summary:
        records = list(read_metrics(self.reporter.path))
        steps = [record for record in records if record["kind"] == "step"]
        measured = [record for record in records if record["kind"] == "eval"][-1]
        summary = Summary(
            steps=self.done,
            train_loss=steps[-1]["loss"],
            holdout_loss=measured["loss"],
            bits_per_byte=measured["bits_per_byte"],
            unigram_loss=self.unigram,
            tokens_per_second=statistics.median(record["tokens_per_second"] for record in steps),
            parameters=self.parameters,
            processes=self.world.size,
            checkpoint=str(self.checkpoints.path(self.done)),
        )
        text = json.dumps(dataclasses.asdict(summary), indent=2)
        atomic_write_bytes(self.config.out_dir / "summary.json", text.encode() + b"\n")
        return summary

    def _speed(self, seconds: float) -> dict[str, Any]:
        """Seconds a step, tokens a second of all ranks, model FLOPs utilisation (None: peak unknown), bytes."""
        rate = self.tokens_per_step / seconds
        peak = self.config.metrics.peak_tflops or peak_tflops(self.world.device, self.config.precision)
        flops = self.flops_per_token * rate
        return {
            "step_seconds": seconds,
            "tokens_per_second": rate,
            "mfu": flops / (peak * 1e12 * self.world.size) if peak else None,
            "memory_bytes": memory_bytes(self.world.device),
        }

    def _say_step(self, step: StepMetrics, speed: dict[str, Any]) -> None:
        width = len(str(self.config.optim.steps))
        mfu = "n/a" if speed["mfu"] is None else f"{speed['mfu']:.1%}"
        scale = f"  scale {self.stability.scale:g}" if self.stability.scales else ""
        self.reporter.say(
            f"step {step.number:{width}}/{self.config.optim.steps}  loss {step.loss:.4f}  lr {step.rate:.2e}  "
            f"grad {step.norm:.2f}{scale}  {speed['step_seconds'] * 1000:.0f} ms  "
            f"{speed['tokens_per_second']:,.0f} tokens/s  MFU {mfu}  {speed['memory_bytes'] / 2**30:.2f} GiB"
        )

    def _say_header(self, record: CheckpointRecord | None) -> None:
        model, split, say = self.model_config, self.split, self.reporter.say
        threads = f" x {torch.get_num_threads()} threads" if self.world.device.type == "cpu" else ""
        say(
            f"{model.preset}: {self.parameters:,} parameters, {model.layers} layers of width {model.width}, "
            f"vocabulary {model.vocab_size}\n"
            f"{self.world.size} processes ({self.world.device.type}{threads}, {self.config.precision}): "
            f"{self.layout.describe()}; a step is {self.tokens_per_step:,} tokens: {split.dp_size} replicas x "
            f"{split.grad_accum_steps} micro-batches x {split.micro_batch_size} sequences x {self.data.length}\n"
            f"train {self.data.tokens:,} tokens, {self.batches.steps_per_epoch} steps an epoch; "
            f"holdout {self.eval_sequences} sequences, unigram loss {self.unigram:.4f}"
        )
        for remark in self.config.memory.remarks(self.world.device.type):
            say(remark)
        if record is not None:
            say(f"going on from {self.checkpoints.path(record.step)}")
        self.reporter.record(
            "run",
            self.done,
            parameters=self.parameters,
            processes=self.world.size,
            tokens_per_step=self.tokens_per_step,
            unigram_loss=self.unigram,
        )
