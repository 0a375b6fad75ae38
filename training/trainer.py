"""Trainer: the parts of a training run, in the order of use: load, start, step, report, evaluate, save, finish."""

import time
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from gristmill.errors import require
from gristmill.paths import spell_urls
from gristmill.processes import kept_objects
from gristmill.wording import count_of
from training.checkpoint.branch import BranchSource
from training.checkpoint.checkpoint import CheckpointManager, find_record, load_model
from training.checkpoint.data_state import DataState
from training.checkpoint.record import CheckpointRecord, describe_changed_code, require_same_model
from training.checkpoint.run_file import CHECKPOINTS
from training.checkpoint.run_folder import COUNTED_FROM, RUN, read_run
from training.checkpoint.shard_plans import State
from training.checkpoint.shard_storage import model_state, read_shards
from training.data.batches import PrefetchLoader
from training.data.text import copy_tokenizer
from training.distributed.hang_detection import is_peer_failure
from training.distributed.launchers import describe_short_stop
from training.distributed.process_group import main_only
from training.distributed.stop_signals import StopSignals
from training.features import build_plugins
from training.model.decoder import active_parameters, flops_per_token, meta_decoder
from training.optim.build_optimizer import build_optimizer
from training.optim.optim_config import describe_late_decay
from training.optim.stability import Stability
from training.own_code import hashes_of
from training.parallel.free_memory import require_memory
from training.parallel.mesh import build_world
from training.parallel.parallelize import parallelize
from training.reporting.holdouts import Holdouts, unigram_loss
from training.reporting.metrics import Reporter, StepMetrics
from training.reporting.metrics_file import METRICS, Summary, write_summary
from training.reporting.run_clock import RunClock
from training.reporting.run_start import describe_start, summarize_start
from training.reporting.sample import Sampler
from training.reporting.seen_tokens import SeenTokens
from training.reporting.throughput import ThroughputMeter, peak_flops
from training.run_plan import RunPlan
from training.tasks.during_training import TaskEvaluation, score_lines
from training.train_step import TrainStep

_LONG_STEP_SECONDS = 5.0


class StepUnfinishedError(Exception):
    """A signal to stop came between two micro-batches of a step."""


class Trainer:
    """The parts of a training run. Every rank calls every method; `steps_done` counts the steps taken.

    A context manager: at the end it waits for a checkpoint that is being written and closes all files.
    """

    def __init__(self, plan: RunPlan, device: torch.device) -> None:
        """Build all parts. Raises UsageError for a batch without data, or a tokenizer that has changed."""
        self.plan = plan
        self.config = plan.config
        config = plan.config
        data = plan.config.data
        self.model_config = plan.model
        self.tokens_per_step = plan.tokens_per_step
        self.world = world = build_world(plan.layout, device, config.seconds_to_wait)
        clock = RunClock(world.size)

        self.batches = plan.batches(world)
        self.loader = PrefetchLoader(self.batches, device)

        decoder = meta_decoder(plan.model)
        names = [name for name, _ in decoder.named_parameters()]
        self.parameters = sum(p.numel() for p in decoder.parameters())
        self.active = active_parameters(decoder)
        self.flops_per_token = flops_per_token(decoder, data.seq_len)
        self.model = model = parallelize(
            decoder, plan.layout, world, config.seed, config.precision, plan.memory, config.compile, data.seq_len,
            partial(require_memory, world, plan.layout, config.precision, plan.memory, plan.moments),
        )  # fmt: skip
        model.add_z_loss(config.optim.z_loss)

        self.optimizer = build_optimizer(
            model.params, config.optim, plan.memory, world.rank,
            after_update=model.after_update, holders=model.matrix_holders,
        )  # fmt: skip
        self.stability = Stability(config.stability, config.precision)

        self.reporter = Reporter(config.out_dir, world.is_main, config.metrics, clock)
        peak = peak_flops(device, config.precision, config.metrics.peak_tflops, world.size)
        self.meter = ThroughputMeter(self.flops_per_token, peak, device)
        self.holdouts = Holdouts(plan.named_holdouts, config.eval, plan.split.micro_batch_size, data.mask_documents)
        first = plan.train.first
        self.sampler = Sampler(first.local, first.manifest, config.eval, config.seed, data.mask_documents)
        self.tasks = TaskEvaluation(config.eval, first, plan.split.micro_batch_size, data.mask_documents)
        self.seen = SeenTokens(self.batches, plan.train, config.metrics.sources)

        folder = config.out_dir / CHECKPOINTS
        self.checkpoints = CheckpointManager(
            folder, config.checkpoint.keep, world, self.reporter.say, config.checkpoint.keep_every, plan.remote
        )  # fmt: skip
        self.plugins = build_plugins(plan, model, self.optimizer, self.checkpoints, names, self.reporter.say)
        self.train_step = TrainStep(model, self.optimizer, config.optim, self.stability, self.plugins)
        self.steps_done = 0
        self.saved = 0  # step of the last checkpoint
        self.unfinished = 0  # step that a signal left unfinished
        self._step_seconds = 0.0  # of the last step, on average of the ranks
        if plan.layout.compression == "none":  # a part of a step would change what it remembers
            model.before_micro_batch = self._stop_within_step
        self._warned = False
        self._kept = ExitStack()
        self.unreported = list[StepMetrics]()
        self.hugging_face: dict[str, dict[str, Any]] = {}  # of an imported model: see CheckpointRecord
        self.is_recorded = False  # by a plug-in that writes the steps of config.record
        self.stop_signals = StopSignals()  # those of the loop that calls `step`

    def load(self) -> None:
        """Load the latest checkpoint; without one, start from `branch_from`, `init_from` or initial weights.

        Raises UsageError or InputError for a checkpoint or data that this run cannot start from.
        """
        record = None
        source = None
        self.origin = ""
        self.interventions: list[dict[str, Any]] = []
        read = DataState()
        if (latest := self.checkpoints.latest()) is not None:
            path, record = latest
            read_shards(self._state(record), path, self.checkpoints.group.process_group)
            self._continue(record, path)
            stored = main_only(lambda: read_run(self.config.out_dir / RUN)) or {}
            self.seen.since = stored.get(COUNTED_FROM, 0)
            self.saved = record.step
            read = DataState.of_checkpoint(record, stored, self.plan.identity)
            self.unigram_loss = record.unigram_loss
            resumed_from = spell_urls(str(self.checkpoints.final_path(record.step)))
            ignored = "".join(f"; {option} is for a new run" for option in self.config.began_from)
            self.origin = f"resuming from {resumed_from}{ignored}"
        elif self.config.branch_from is not None:
            source = self._branch(self.config.branch_from)
            record = source.record
            read = DataState.of_branch(source, self.plan.identity)
        elif self.config.init_from is not None:
            self._load_weights(self.config.init_from)
        step = record.step if record else 0
        self.changed_code = describe_changed_code(record) if record else ""
        require(
            record is not None or not self.config.optim.warmup_from,
            f"optim.warmup_from is {self.config.optim.warmup_from}, and this run begins at step 0; try "
            "--optim.warmup_from 0, or --branch_from the checkpoint of that step",
        )
        skipped = read.restore(self.batches, self.config.data, self.config.data.skip if source is not None else 0)
        if source is not None:
            self._intervene(source, skipped)
        if record is None or record.step < self.config.optim.steps:  # a resumed run may evaluate other sequences
            count = self.holdouts.counts[""]
            self.unigram_loss = unigram_loss(self.plan.train, self.plan.holdout, count, self.world)
        self.steps_done = self.plugins.after_load(step, record, self.stop_signals)
        dp = self.plan.layout.dp
        own_code = hashes_of(self.config.own_names.values())
        self.start_record = describe_start(
            self.config.data, self.world.size, self.world.device, dp, self.steps_done, own_code
        )  # fmt: skip
        self.model.after_load()
        self.model.all_gather_params()

    def _continue(self, record: CheckpointRecord, path: Path) -> None:
        """Continue after the step of a checkpoint whose tensors were loaded, from `path`."""
        self.hugging_face = record.hugging_face
        self.steps_done = record.step
        self.optimizer.updates = record.updates
        self.stability.state = record.stability
        self.plugins.read(path, self.checkpoints.group.process_group)

    def _branch(self, checkpoint: Path) -> BranchSource:
        source = BranchSource.open(checkpoint, self.checkpoints.group, self.reporter.say)
        source.check(self.config.optim, self.plan.local_steps, self.config.allow_lr_jump)
        require_same_model(source.record, self.plan.model, self.plan.tokenizer, "branch_from")
        read_shards(self._state(source.record), source.path, self.checkpoints.group.process_group)
        self._continue(source.record, source.path)
        self.seen.since = source.seen_since(self.plan.identity)
        self.origin = f"branching from {source.describe(self.plan.identity)}"
        return source

    def _intervene(self, source: BranchSource, skipped: int) -> None:
        """Note how a new branch changes its learning rate, and how many sequences it leaves out."""
        changes = source.changes(self.config.optim, skipped, self.config.data.skip_documents)
        self.interventions = [*source.interventions, *changes]
        for change in changes:
            if rates := change.get("learning_rate"):
                before = "an unknown one" if rates[0] is None else f"{rates[0]:.2e}"
                self.origin += f"; the learning rate jumps from {before} to {rates[1]:.2e}"
            if documents := change.get("skipped_documents"):
                self.origin += f"; nothing is learnt from {count_of(len(documents), 'document')}"
        if skipped:
            self.seen.since = source.record.step
            self.origin += f"; {count_of(skipped, 'sequence')} left out, tokens seen are counted from there on"

    def _load_weights(self, checkpoint: Path) -> None:
        record = find_record(checkpoint)
        if record is not None:  # before its tensors are read, whose shapes say less than the options do
            require_same_model(record, self.plan.model, self.plan.tokenizer)
        has_biases = record is not None and record.model.get("balance") == "bias"  # else they begin at zero
        state = model_state(self.model.params, buffers=self.model.buffers if has_biases else {})
        source = load_model(checkpoint, state, self.checkpoints.group, self.reporter.say)
        self.hugging_face = source.hugging_face

    def start(self) -> None:
        """Open the files of metrics, print the header and start the clock, after `load`."""
        main_only(lambda: self.reporter.start(self.steps_done, asdict(self.config)))
        main_only(lambda: copy_tokenizer(self.plan.train.parts, self.config.out_dir))
        self._print_header()
        said = describe_late_decay(self.config.optim), self.origin, self.changed_code, *self.plugins.notes
        for line in filter(None, said):
            self.reporter.say(line)
        self._kept.enter_context(kept_objects())  # scanning them at every collection costs a small model 3 %
        self.meter.restart()

    def step(self, step: int) -> bool:
        """Train on batch `step` (from 1); all ranks skip the update if loss or gradients are bad.

        True if any rank was asked to stop; a signal before a long step, or between micro-batches, leaves the step
        `unfinished`.
        Raises UsageError if `stability` ends the run, InputError for bad shards, OutputError where the last checkpoint
        could not be written.
        """
        try:
            return self._step(step)
        except StepUnfinishedError:
            self.optimizer.zero_grad()
            self.unfinished = step
            return True

    def _step(self, step: int) -> bool:
        if self._step_seconds >= _LONG_STEP_SECONDS:  # the last one, as all ranks know
            self._stop_within_step()
        started = time.perf_counter()
        with self.plugins.step(step):
            with self.plugins.phase("data"):
                batch = self.loader.batch(step - 1)
                targets = self.batches.target_counts(step - 1)
            lr, sums = self.train_step.take(step, batch, targets, self._stops, started)
            self._step_seconds = sums.seconds
            if sums.stop:
                self.checkpoints.wait()  # raises on all ranks what one of them has noticed
            self.steps_done = self.plugins.after_step(step)
        scale = self.stability.scale if self.stability.scales_loss else None
        skipped = self.stability.fault
        self.unreported.append(StepMetrics(step, lr, sums.loss, sums.grad_norm, scale, skipped, sums.z_loss))
        return sums.stop or self.plugins.is_stopping

    def _stops(self) -> bool:
        """Return whether this rank has a signal to stop, or could not write the last checkpoint."""
        return self.stop_signals.received > 0 or self.checkpoints.has_failed

    def _stop_within_step(self) -> None:
        """Raise StepUnfinishedError on all ranks if one of them has a signal to stop; collective.

        A GPU is waited for, or all micro-batches would be in its queue before the first is done: only in long steps.
        """
        if self.world.device.type == "cuda":
            if self._step_seconds < _LONG_STEP_SECONDS:
                return
            torch.cuda.current_stream().synchronize()
        if self.world.all_reduce_max(self.stop_signals.received):
            raise StepUnfinishedError

    def _describe_short_stop(self, step_seconds: float) -> str:
        """Say that a launcher does not wait long enough for a step, or where it can stop within one, a micro-batch."""
        parts = self.plan.layout.micro_batches
        if parts == 1 or self.model.pipeline is not None or self.plan.layout.compression != "none":
            return describe_short_stop("a step", step_seconds)
        return describe_short_stop("a micro-batch", step_seconds / parts)

    @property
    def skipped(self) -> bool:
        """Return whether the last step's update was skipped."""
        return bool(self.stability.fault)

    def report(self) -> None:
        """Record the steps since the last report and print the last one."""
        first = self.unreported[0].step - 1
        last = self.unreported[-1].step
        read = self.batches.schedule.read(last) - self.batches.schedule.read(first)
        tokens = read * self.config.data.seq_len // self.config.replicas.count
        speed = self.meter.measure(len(self.unreported), tokens)
        self.reporter.log_steps(self.unreported, self.config.optim.steps, speed, self.plugins.log_records())
        self.unreported.clear()
        if not self._warned and (warning := self._describe_short_stop(speed.step_seconds)):
            self._warned = True
            self.reporter.say(warning)
        self.meter.restart()

    def evaluate(self, step: int) -> None:
        """Measure the losses of the holdouts and sample some text, after `step` steps."""
        with self.plugins.evaluated_weights():
            losses = self.holdouts.evaluate(self.model)
            scores = self.tasks.evaluate(self.model)
            text = self.sampler.sample(self.model)
        self.reporter.log_eval(step, losses, self.unigram_loss, text, scores)
        for line in score_lines(step, scores):
            self.reporter.say(line)
        self.reporter.log_seen(step, self.seen)
        self.meter.restart()

    def save(self, step: int) -> None:
        """Save a checkpoint; with `checkpoint.async_save`, return once it is copied to CPU memory."""
        self.plugins.before_save()
        record = CheckpointRecord(
            step=step,
            updates=self.optimizer.updates,
            processes=self.world.size,
            layout=self.plan.layout.record() | self.plugins.record(),
            stability=self.stability.state,
            unigram_loss=self.unigram_loss,
            model=self.plan.model.record(),
            tokenizer=self.plan.tokenizer,
            hugging_face=self.hugging_face,
            batch_sizes=self.batches.schedule.until(step),
            data=self.batches.progress(step),
            skipped=self.batches.skipped,
            mask_documents=self.config.data.mask_documents,
            eod_mask_loss=self.config.data.eod_mask_loss,
            start=self.start_record,
        )
        self.saved = step
        in_thread = self.config.checkpoint.async_save and not self.config.memory.on_disk  # too large to copy to memory
        (self.checkpoints.save_async if in_thread else self.checkpoints.save)(record, self._state())
        self.meter.restart()

    def _state(self, stored: CheckpointRecord | None = None) -> State:
        """Return what a checkpoint holds: to save it or, of the record `stored`, to fill it from one."""
        has_biases = stored is None or stored.model.get("balance") == "bias"
        buffers = self.model.buffers if has_biases else {}
        state = model_state(self.model.params, self.optimizer.moments(), buffers=buffers)
        return self.plugins.state(state, stored)

    def finish(self) -> Summary:
        """Wait for the last checkpoint, write summary.json and print where the results are."""
        self.checkpoints.wait()
        out_dir = self.config.out_dir
        checkpoint = self.checkpoints.final_path(self.steps_done)
        figures = self.steps_done, self.unigram_loss, self.parameters, self.world.size, checkpoint
        summary = main_only(lambda: write_summary(out_dir, *figures))
        remote = self.plan.remote
        if remote is not None:
            main_only(remote.write_files)
        folder = spell_urls(str(remote.remote)) if remote is not None else out_dir
        curve = "" if remote is not None else f"\n    curve       gristmill plot {out_dir}"
        self.reporter.say(
            f"done: holdout loss {summary.holdout_loss:.4f}, unigram {summary.unigram_loss:.4f}\n"
            f"    checkpoint  {summary.checkpoint}\n"
            f"    metrics     {folder}/{METRICS}{curve}"
        )
        return summary

    def finish_early(self, step: int) -> None:
        """Say that the run has stopped, after the checkpoint of `step`."""
        left = f", with step {self.unfinished} left unfinished" if self.unfinished else ""
        self.reporter.say(f"stopped after step {step}{left}; run the same command to resume")

    def save_unsaved(self) -> None:
        """Report and save the steps since the last checkpoint, if there are any, and wait for that."""
        if self.unreported:
            self.report()
        if self.steps_done > self.saved:
            self.save(self.steps_done)
        self.checkpoints.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _k: type[BaseException] | None, error: BaseException | None, _t: TracebackType | None) -> None:
        try:
            if not is_peer_failure(error):  # a rank that is gone cannot finish its part of a checkpoint
                self.checkpoints.wait()
                self.model.finish_all_gather()
        finally:
            self._kept.close()
            self.plugins.close()
            self.loader.close()
            self.optimizer.close()
            self.model.close()
            self.reporter.close()

    def _print_header(self) -> None:
        """Print and record the sizes of model, layout, batch and data."""
        plan = self.plan
        world = self.world
        batches = self.batches
        self.reporter.say(summarize_start(self.start_record))
        self.reporter.say(
            f"{plan.header(self.parameters, self.active, world.size, world.device.type)}\n"
            f"train {plan.train.describe(batches.steps_per_epoch)}; "
            f"holdout {count_of(self.holdouts.counts[''], 'sequence')}, unigram loss {self.unigram_loss:.4f}"
        )
        first, last = (batches.schedule.read(step) for step in (self.seen.since, self.config.optim.steps))
        read = plan.train.lines(batches.data, batches.mix, first, last)
        for line in filter(None, [batches.schedule.describe(), *read, *plan.notes(world.device.type, self.steps_done)]):
            self.reporter.say(line)
        sizes = {"parameters": self.parameters, "processes": world.size, "tokens_per_step": self.tokens_per_step}
        divided = {"device": world.device.type, "layout": plan.layout.record(), "recompute": plan.memory.recompute}
        kept = {"moments": plan.memory.optimizer, "parameters_on": plan.memory.parameters}
        self.reporter.record("run", self.steps_done, **sizes, unigram_loss=self.unigram_loss, **divided, **kept)
