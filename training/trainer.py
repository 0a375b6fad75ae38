"""Trainer: the parts of a training run, in the order of use: load, start, step, report, evaluate, save, finish."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from training.checkpoint.branch import BranchSource
from training.checkpoint.checkpoint import CheckpointManager, load_model
from training.checkpoint.compression_state import compression_state, load_compression_state
from training.checkpoint.record import CheckpointRecord, require_same_model
from training.checkpoint.run_folder import CHECKPOINTS, COUNTED_FROM, RUN, read_run
from training.checkpoint.shard_plans import State
from training.checkpoint.shard_storage import model_state, read_shards
from training.data.prefetch import PrefetchLoader
from training.data.shard_verifier import ShardVerifier
from training.data.text import copy_tokenizer
from training.distributed.hang_detection import is_peer_failure
from training.distributed.process_group import main_only
from training.distributed.stop_signals import StopSignals
from training.experimental.local_steps.build_replicas import build_replicas
from training.experimental.local_steps.step_sums import StepSums
from training.model.decoder import flops_per_token, meta_decoder
from training.optim.build_optimizer import build_optimizer
from training.optim.schedule import describe_late_decay, learning_rate
from training.optim.stability import Stability
from training.optim.weight_average import AveragingOptimizer
from training.parallel.gradients import scale_gradients, squared_grad_norm
from training.parallel.mesh import build_world
from training.parallel.parallelize import parallelize
from training.profiling.profiler import Profiler
from training.reporting.evaluate import unigram_loss
from training.reporting.holdouts import Holdouts
from training.reporting.metrics import Reporter, StepMetrics
from training.reporting.metrics_file import METRICS
from training.reporting.sample import Sampler
from training.reporting.seen_tokens import SeenTokens
from training.reporting.summary import Summary, write_summary
from training.reporting.throughput import ThroughputMeter, peak_flops
from training.run_plan import RunPlan
from training.sharding.axis import JointAxis


class Trainer:
    """The parts of a training run. Every rank calls every method; `steps_done` counts the steps taken.

    A context manager: at the end it waits for a checkpoint that is being written and closes all files.
    """

    def __init__(self, plan: RunPlan, device: torch.device) -> None:
        """Build all parts. Raises UsageError for a batch without data, or a tokenizer that has changed."""
        self.plan, self.config, config, data = plan, plan.config, plan.config, plan.config.data
        self.train_data, self.holdout = plan.train, plan.holdout
        self.model_config, self.layout, self.split = plan.model, plan.layout, plan.split
        self.tokens_per_step = plan.tokens_per_step
        first = self.train_data.first
        self.tokenizer = first.manifest.tokenizer

        self.world = world = build_world(self.layout, device, config.seconds_to_wait)
        self.batches = plan.batches(world.dp_rank)
        self.loader = PrefetchLoader(self.batches, device)

        decoder = meta_decoder(self.model_config)
        self.parameters = sum(p.numel() for p in decoder.parameters())
        self.flops_per_token = flops_per_token(decoder, data.seq_len)
        self.model = parallelize(
            decoder, self.layout, world, config.seed, config.precision, plan.memory, config.compile, data.seq_len
        )
        if config.optim.z_loss:
            self.model.add_z_loss(config.optim.z_loss)
        updated = self.model.files.after_update if self.model.files is not None else None
        holders = self.model.matrix_holders() if config.optim.name == "muon" else JointAxis()
        self.optimizer = build_optimizer(
            self.model.params, config.optim, plan.memory, world.rank, after_update=updated, holders=holders
        )
        of_run = self.layout, config.replicas, config.optim, self.model, self.optimizer
        self.replicas = build_replicas(*of_run, plan.identity)
        self.stability = Stability(config.stability, config.precision)

        peak = peak_flops(device, config.precision, config.metrics.peak_tflops, world.size)
        self.meter = ThroughputMeter(self.tokens_per_step, self.flops_per_token, peak, device)
        self.reporter = Reporter(config.out_dir, world.is_main, config.metrics)
        self.holdouts = Holdouts(plan.named_holdouts, config.eval, self.split.micro_batch_size, data.mask_documents)
        self.profiler = Profiler(config.profile, self.model, [*dict(decoder.named_parameters())], config.out_dir)
        self.seen = SeenTokens(self.batches, self.train_data, config.metrics.sources, config.replicas.count)
        sampled = config.eval.sample_tokens > 0
        self.sampler = Sampler(first.folder, first.manifest, config.eval, config.seed) if sampled else None
        self.checkpoints = CheckpointManager(
            config.out_dir / CHECKPOINTS, config.checkpoint.keep, world, self.reporter.say
        )
        self.steps_done, self.unreported = 0, list[StepMetrics]()
        self.stop_signals = StopSignals()  # those of the loop that calls `step`
        verified = (*self.train_data.parts, *plan.named_holdouts.values()) if data.verify == "checksum" else ()
        self.verifier = ShardVerifier(verified, world.rank, world.size)

    def load(self) -> None:
        """Load the latest checkpoint; without one, start from `branch_from`, `init_from` or initial weights.

        Raises UsageError or InputError for a checkpoint or data that this run cannot start from.
        """
        record = None
        if (found := self.checkpoints.latest()) is not None:
            at, record = found
            read_shards(self.replicas.state(record), at, self.checkpoints.group.process_group)
            self._continue(record, at)
            self.seen.since = main_only(lambda: (read_run(self.config.out_dir / RUN) or {}).get(COUNTED_FROM, 0))
            self.unigram_loss = record.unigram_loss
            self.origin = f"resuming from {at}" + "".join(f"; {o} is for a new run" for o in self.config.began_from)
        else:
            self.origin = ""
            if self.config.branch_from is not None:
                record = self._branch(self.config.branch_from)
            elif self.config.init_from is not None:
                self._load_weights(self.config.init_from)
        if record is None or record.step < self.config.optim.steps:  # a resumed run may evaluate other sequences
            self.unigram_loss = unigram_loss(self.train_data, self.holdout, self.holdouts.counts[""], self.world)
        self.steps_done = self.replicas.after_load(record, self.stop_signals)
        self.model.after_load()
        self.model.publish_params()

    def _continue(self, record: CheckpointRecord, path: Path) -> None:
        """Go on after the step of a checkpoint whose tensors were loaded, from `path`."""
        self.steps_done, self.optimizer.updates, self.stability.state = record.step, record.updates, record.stability
        self.optimizer.after_load()
        load_compression_state(self.model, path, self.checkpoints.group.process_group)

    def _branch(self, checkpoint: Path) -> CheckpointRecord:
        source = BranchSource.open(checkpoint, self.checkpoints.group, self.reporter.say)
        source.check(self.config.optim)
        require_same_model(source.record, self.model_config, self.tokenizer, "branch_from")
        source.load(self.replicas.state(source.record), self.checkpoints.group)
        self._continue(source.record, source.path)
        self.seen.since = source.seen_since(self.plan.identity)
        self.origin = f"branching from {source.describe(self.plan.identity)}"
        return source.record

    def _load_weights(self, checkpoint: Path) -> None:
        source = load_model(checkpoint, model_state(self.model.params), self.checkpoints.group, self.reporter.say)
        require_same_model(source, self.model_config, self.tokenizer)

    def start(self) -> None:
        """Open the files of metrics, print the header and start the clock, after `load`."""
        self.reporter.start(self.steps_done)
        main_only(lambda: copy_tokenizer(self.train_data.first, self.config.out_dir))
        self._print_header()
        for line in filter(None, (describe_late_decay(self.config.optim), self.origin, self.replicas.note)):
            self.reporter.say(line)
        gc.freeze()  # all objects alive now stay alive: scanning them at every collection costs a small model 3 %
        self.meter.restart()

    def step(self, step: int, stop_signal: int = 0) -> bool:
        """Train on batch `step` (from 1); all ranks skip the update if loss or gradients are bad.

        True if any rank has a `stop_signal`. Raises UsageError if `stability` ends the run, InputError for bad shards.
        """
        self.verifier.done()
        lr, loss_scale = learning_rate(step - 1, self.config.optim), self.stability.scale
        targets = self.replicas.own_targets(self.batches, step - 1)
        with self.profiler.phase("data"):
            batch = self.loader.batch(step - 1)
        with self.profiler.phase("backward"):
            local_loss = self.model.forward_backward(batch, loss_scale / targets)
        sums = StepSums.of(
            self.world, self.replicas, self.replicas.summed_targets(self.batches, step - 1), loss_scale, local_loss,
            squared_grad_norm(self.model.params, self.world.device), stop_signal,
            self.model.take_z_loss() if self.config.optim.z_loss else None,
        )  # fmt: skip
        if self.stability.accepts(step, sums.loss, sums.grad_norm):
            max_norm = self.config.optim.max_grad_norm
            clip_factor = min(1.0, max_norm / (sums.own_norm + 1e-6)) if max_norm else 1.0
            with self.profiler.update(loss_scale):
                scale_gradients(self.model.params, clip_factor / loss_scale)
                self.optimizer.step(lr)
                self.model.keep_errors()
                self.model.start_publishing()
        self.optimizer.zero_grad()
        self.steps_done = self.replicas.after_step(step)
        new_scale = self.stability.scale if self.stability.scales_loss else None
        self.unreported.append(
            StepMetrics(step, lr, sums.loss, sums.grad_norm, new_scale, self.stability.fault, sums.z_loss)
        )
        return sums.stop or self.replicas.has_left

    @property
    def skipped(self) -> bool:
        """True if the last step's update was skipped."""
        return bool(self.stability.fault)

    def report(self) -> None:
        """Record the steps since the last report and print the last one."""
        speed = self.meter.measure(len(self.unreported))
        self.reporter.log_steps(self.unreported, self.config.optim.steps, speed, self.profiler.take())
        self.unreported.clear()
        self.meter.restart()

    def evaluate(self, step: int) -> None:
        """Measure the losses of the holdouts and sample some text, after `step` steps."""
        with self._weights_to_evaluate():
            losses = self.holdouts.evaluate(self.model)
            text = self.sampler.sample(self.model, self.config.data.mask_documents) if self.sampler else ""
        self.reporter.log_eval(step, losses, self.unigram_loss, text)
        if self.world.is_main and (seen := self.seen.after(step)):
            self.reporter.log_seen(step, seen)
        self.meter.restart()

    @contextmanager
    def _weights_to_evaluate(self) -> Iterator[None]:
        """Context in which the model has the weights that all replicas share, or their average for `eval.ema`."""
        if not self.config.eval.ema:
            with self.replicas.shared_weights():
                yield
            return
        assert isinstance(self.optimizer, AveragingOptimizer)
        self.model.finish_publishing()
        with self.optimizer.averaged_weights():
            self.model.publish_params()
            yield
        self.model.publish_params()

    def save(self, step: int) -> None:
        """Save a checkpoint; with `checkpoint.async_save`, return once it is copied to CPU memory.

        Waits until all token shards are verified: no checkpoint depends on a damaged one. Raises InputError for one.
        """
        self.verifier.finish(self.checkpoints.group.gather, self.reporter.say)
        record = CheckpointRecord(
            step=step,
            updates=self.optimizer.updates,
            processes=self.world.size,
            layout=self.layout.record() | self.replicas.record(),
            stability=self.stability.state,
            unigram_loss=self.unigram_loss,
            model=self.model_config.record(),
            tokenizer=self.tokenizer,
        )
        self.model.verify_params()
        on_disk = "disk" in (self.config.memory.optimizer, self.config.memory.parameters)  # too large to copy to memory
        in_thread = self.config.checkpoint.async_save and not on_disk
        (self.checkpoints.save_async if in_thread else self.checkpoints.save)(record, self._state())
        self.meter.restart()

    def finish(self) -> Summary:
        """Wait for the last checkpoint, write summary.json and print where the results are."""
        self.checkpoints.wait()
        out_dir, checkpoint = self.config.out_dir, self.checkpoints.path(self.steps_done)
        found = self.steps_done, self.unigram_loss, self.parameters, self.world.size, checkpoint
        summary = main_only(lambda: write_summary(out_dir, *found))
        self.reporter.say(
            f"done: holdout loss {summary.holdout_loss:.4f}, unigram {summary.unigram_loss:.4f}\n"
            f"    checkpoint  {summary.checkpoint}\n"
            f"    metrics     {out_dir / METRICS}\n"
            f"    curve       gristmill plot {out_dir}"
        )
        return summary

    def finish_early(self, step: int) -> None:
        """Wait for the checkpoint of `step`, after a stop signal."""
        self.checkpoints.wait()
        self.reporter.say(f"stopped after step {step}; run the same command to resume")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _k: type[BaseException] | None, error: BaseException | None, _t: TracebackType | None) -> None:
        try:
            if not is_peer_failure(error):  # a rank that is gone cannot finish its part of a checkpoint
                self.checkpoints.wait()
                self.model.finish_publishing()
        finally:
            gc.unfreeze()
            self.profiler.close()
            self.loader.close()
            self.verifier.close()
            self.optimizer.close()
            self.replicas.close()
            self.model.close()
            self.reporter.close()

    def _state(self) -> State:
        return self.replicas.state() | compression_state(self.model)

    def _print_header(self) -> None:
        """Print and record the sizes of model, layout, batch and data."""
        world, split = self.world, self.split
        self.reporter.say(
            f"{self.plan.header(self.parameters, world.size, world.device.type)}\n"
            f"train {self.train_data.describe(self.batches.steps_per_epoch)}; "
            f"holdout {self.holdouts.counts['']} sequences, unigram loss {self.unigram_loss:.4f}"
        )
        first, last = (step * split.batch_size for step in (self.seen.since, self.config.optim.steps))
        read = self.train_data.lines(self.batches.data, self.batches.mix, first, last)
        for line in [*read, *self.plan.notes(world.device.type, self.steps_done)]:
            self.reporter.say(line)
        sizes = {"parameters": self.parameters, "processes": world.size, "tokens_per_step": self.tokens_per_step}
        self.reporter.record("run", self.steps_done, **sizes, unigram_loss=self.unigram_loss)
