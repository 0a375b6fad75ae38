"""The parts of a run, and what is done with them: step, report, evaluate, save."""

import dataclasses
import json
import math
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeline.errors import UsageError
from pipeline.files import write_whole
from training.checkpoint import CheckpointRecord, Checkpoints
from training.config import TrainConfig
from training.data import Batches, BatchSplit, TokenSequences
from training.evaluate import bits_per_byte, evaluate, unigram_loss
from training.forward_backward import autocast, forward_backward
from training.identity import identity
from training.initialize import materialize
from training.mesh import World
from training.metrics import METRICS, Reporter, memory_bytes, peak_tflops, read_metrics
from training.model import Decoder, flops_per_token
from training.optim import build_optimizer, clip_gradients, learning_rate, set_learning_rate
from training.parallelize import parallelize
from training.sample import Sampler


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


class Trainer:
    """A run's parts, and what is done with them. `done` counts the steps taken."""

    def __init__(self, config: TrainConfig, world: World) -> None:
        self.config, self.world = config, world
        data = config.data
        self.data = TokenSequences(data.train, data.seq_len)
        self.holdout = TokenSequences(data.holdout, data.seq_len)
        _check_same_tokenizer(self.data, self.holdout)
        self.tokenizer = self.data.manifest.tokenizer
        self.model_config = config.model.resolve(self.tokenizer.vocab_size, data.seq_len)
        self.identity = identity(config, self.model_config, self.data.manifest, self.holdout.manifest)
        self.split = BatchSplit.of(data, world.size)
        self.batches = Batches(self.data, self.split, world.rank, config.seed)
        self.sampler = (
            Sampler(data.train, self.data.manifest, config.eval, config.seed) if config.eval.sample_tokens else None
        )
        with torch.device("meta"):
            model = Decoder(self.model_config)
        self.model = materialize(model, world.device, config.seed)
        self.parallel = parallelize(self.model, world)
        self.optimizer = build_optimizer(self.model, config.optim)
        self.reporter = Reporter(config.out_dir, world.is_main, config.metrics.tensorboard)
        self.checkpoints = Checkpoints(config.out_dir / "checkpoints", config.checkpoint.keep, world, self.reporter.say)
        self.tokens_per_step = data.batch_size * data.seq_len
        self.eval_sequences = min(config.eval.sequences or len(self.holdout), len(self.holdout))
        self.done = 0
        self.pending: list[tuple[int, float, Tensor, Tensor]] = []  # step, learning rate, loss sum, gradient norm

    def resume(self) -> None:
        """Load the latest checkpoint, or measure what a new run is to be compared with; then say what runs."""
        record = self.checkpoints.load(self.model, self.optimizer)
        if record is not None:
            self.done, self.unigram = record.step, record.unigram_loss
        else:
            self.unigram = unigram_loss(self.data, self.holdout, self.eval_sequences, self.world)
        self.reporter.start(self.done)
        self._say_header(record)
        self.since = time.perf_counter()

    def step(self, step: int) -> None:
        """One update of the parameters."""
        if self.model_config.dropout:
            # a function of the step, so that a resumed run drops what the uninterrupted one drops
            torch.manual_seed(hash((self.config.seed, step, self.world.rank)))
        rate = learning_rate(step - 1, self.config.optim)
        set_learning_rate(self.optimizer, rate)
        batch = self.batches.step(step - 1)
        loss = forward_backward(self.parallel, batch, self.tokens_per_step, self.world, self.config.precision)
        norm = clip_gradients(self.model, self.config.optim.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done = step
        self.pending.append((step, rate, loss, norm))

    def report(self) -> None:
        """Record the steps since the last report, and print the last of them; every rank calls it.

        Losses are read back here and not step by step, so that an accelerator is never waited for.
        """
        count = len(self.pending)
        losses = self.world.sum(torch.stack([loss for _, _, loss, _ in self.pending]).double()) / self.tokens_per_step
        norms = torch.stack([norm for *_, norm in self.pending]).tolist()
        seconds = (time.perf_counter() - self.since) / count
        speed = self._speed(seconds)
        for (step, rate, _, _), loss, norm in zip(self.pending, losses.tolist(), norms, strict=True):
            self.reporter.record("step", step, loss=loss, lr=rate, grad_norm=norm, **speed)
            if not math.isfinite(loss):
                raise UsageError(
                    f"the loss is {loss} at step {step}; go on from the last checkpoint with a lower --optim.lr, "
                    "more --optim.warmup_steps, or --precision fp32"
                )
        self._say_step(step, loss, rate, norm, speed)
        self.pending.clear()
        self.since = time.perf_counter()

    def evaluate(self, step: int) -> None:
        """Measure the holdout and draw some text; every rank calls it."""
        with autocast(self.world.device, self.config.precision):
            loss = evaluate(self.model, self.holdout, self.eval_sequences, self.split.micro, self.world)
        bits = bits_per_byte(loss, self.holdout.manifest)
        text = self.sampler.text(self.model) if self.sampler and self.world.is_main else ""
        self.reporter.record("eval", step, loss=loss, bits_per_byte=bits, text=text)
        self.reporter.say(
            f"holdout after step {step}: loss {loss:.4f} (unigram {self.unigram:.4f}), {bits:.4f} bits per byte"
        )
        if text:
            self.reporter.say(f"    {text!r}")
        self.since = time.perf_counter()

    def save(self, step: int) -> None:
        """Write a checkpoint; every rank calls it."""
        record = CheckpointRecord(
            step, self.world.size, self.unigram, dataclasses.asdict(self.model_config), self.tokenizer
        )
        self.checkpoints.save(record, self.model, self.optimizer)
        self.since = time.perf_counter()

    def finish(self) -> Summary:
        """Write summary.json from what was recorded, and say where everything is."""
        out_dir = self.config.out_dir
        summary = self.world.main_only(self._summarize)
        self.reporter.say(f"done: holdout loss {summary.holdout_loss:.4f}, unigram {summary.unigram_loss:.4f}")
        self.reporter.say(f"    checkpoint  {summary.checkpoint}\n    metrics     {out_dir / METRICS}")
        self.reporter.say(f"    curve       python -m training.plot {out_dir}")
        return summary

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
            parameters=self._parameters(),
            processes=self.world.size,
            checkpoint=str(self.checkpoints.path(self.done)),
        )
        text = json.dumps(dataclasses.asdict(summary), indent=2)
        write_whole(self.config.out_dir / "summary.json", text.encode() + b"\n")
        return summary

    def _parameters(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    def _speed(self, seconds: float) -> dict[str, Any]:
        """Seconds a step, tokens a second of all ranks, model FLOPs utilisation (None: peak unknown), bytes."""
        rate = self.tokens_per_step / seconds
        peak = self.config.metrics.peak_tflops or peak_tflops(self.world.device, self.config.precision)
        flops = flops_per_token(self.model, self.config.data.seq_len) * rate
        return {
            "step_seconds": seconds,
            "tokens_per_second": rate,
            "mfu": flops / (peak * 1e12 * self.world.size) if peak else None,
            "memory_bytes": memory_bytes(self.world.device),
        }

    def _say_step(self, step: int, loss: float, rate: float, norm: float, speed: dict[str, Any]) -> None:
        width = len(str(self.config.optim.steps))
        mfu = "n/a" if speed["mfu"] is None else f"{speed['mfu']:.1%}"
        self.reporter.say(
            f"step {step:{width}}/{self.config.optim.steps}  loss {loss:.4f}  lr {rate:.2e}  grad {norm:.2f}  "
            f"{speed['step_seconds'] * 1000:.0f} ms  {speed['tokens_per_second']:,.0f} tokens/s  MFU {mfu}  "
            f"{speed['memory_bytes'] / 2**30:.2f} GiB"
        )

    def _say_header(self, record: CheckpointRecord | None) -> None:
        model, split, say = self.model_config, self.split, self.reporter.say
        threads = f" x {torch.get_num_threads()} threads" if self.world.device.type == "cpu" else ""
        say(
            f"{model.preset}: {self._parameters():,} parameters, {model.layers} layers of width {model.width}, "
            f"vocabulary {model.vocab_size}\n"
            f"{self.world.device.type}{threads}, {self.config.precision}; a step is "
            f"{self.tokens_per_step:,} tokens: {split.ranks} processes x {split.rounds} x {split.micro} sequences x "
            f"{self.config.data.seq_len}\n"
            f"train {self.data.tokens:,} tokens, {self.batches.steps_per_epoch} steps an epoch; "
            f"holdout {self.eval_sequences} sequences, unigram loss {self.unigram:.4f}"
        )
        if record is not None:
            say(f"going on from {self.checkpoints.path(record.step)}")
        self.reporter.record(
            "run",
            self.done,
            parameters=self._parameters(),
            processes=self.world.size,
            tokens_per_step=self.tokens_per_step,
            unigram_loss=self.unigram,
        )


def _check_same_tokenizer(train: TokenSequences, holdout: TokenSequences) -> None:
    ours, theirs = train.manifest.tokenizer, holdout.manifest.tokenizer
    if ours.sha256 != theirs.sha256:
        raise UsageError(
            f"{train.folder} was made with tokenizer {ours.path} (sha256 {ours.sha256[:12]}) and {holdout.folder} with "
            f"{theirs.path} ({theirs.sha256[:12]}); run tokenize_corpus on both with the same tokenizer"
        )
