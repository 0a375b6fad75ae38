"""Evaluate a checkpoint on token shards and on text files: `gristmill evaluate CHECKPOINT TOKENS`, or with torchrun."""

import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import torch
import torch.distributed as dist
from tyro.conf import Positional

from gristmill.config import INT64, Range, check_ranges
from gristmill.errors import InputError, UsageError, require
from gristmill.io.token_manifest import TokenizerRecord
from gristmill.storage.files import reject_remote
from gristmill.storage.local import atomic_write_bytes
from training.checkpoint.checkpoint import open_checkpoint
from training.checkpoint.checkpoint_group import CheckpointGroup
from training.checkpoint.run_folder import RUN, read_run
from training.checkpoint.shard_storage import model_state, read_shards, weight_keys
from training.config import Precision
from training.data.sequences import TokenSequences
from training.data.text import TextSequences, find_tokenizer, is_tokenizer, load_tokenizer
from training.distributed.command_line import exit_on_user_error, read_options
from training.distributed.hang_detection import report_failures
from training.distributed.process_group import init_distributed, main_only
from training.distributed.stall_watch import StallWatch, gpu_busy
from training.model.decoder import meta_decoder
from training.model.model_config import ModelConfig
from training.parallel.layout import ParallelConfig
from training.parallel.mesh import build_world
from training.parallel.parallel_model import ParallelModel
from training.parallel.parallelize import parallelize
from training.reporting.holdouts import HoldoutLosses, Holdouts
from training.reporting.metrics_file import finite
from training.reporting.reporting_config import EvalConfig

_SECONDS_TO_WAIT = 60.0  # of a rank for another
_SECTION = re.compile(r"\b(eval|data)\.(?=(lengths|weights|sequences|seq_len|mask_documents)\b)")
_MOST_NATS = 709.0  # of which a float holds the exponential


@dataclass(frozen=True)
class EvaluateConfig:
    """What to evaluate, and on how many processes."""

    RANGES: ClassVar[dict[str, Range]] = {
        **dict.fromkeys(("seq_len", "sequences", "stride"), Range(0, INT64)),
        "micro_batch_size": Range(1, INT64),
    }

    checkpoint: Positional[Path]
    """A checkpoint (OUT/checkpoints/step-…), or the latest of a folder of them or a run's --out_dir."""
    tokens: Positional[tuple[Path, ...]] = ()
    """Folders of token shards, made with the checkpoint's tokenizer."""
    text: tuple[Path, ...] = ()
    """Text files in UTF-8, encoded with the checkpoint's tokenizer."""
    tokenizer: Path | None = None
    """The checkpoint's tokenizer, for --text; by default that of TOKENS, or of the run's folder."""
    seq_len: int = 0
    """Tokens per sequence, whose first has no context; 0: the model's context."""
    stride: int = 0
    """Of --text: tokens from the start of a sequence to that of the next one. With fewer than seq_len sequences
    overlap, and every token but the first seq_len ones is predicted from seq_len - stride tokens or more; the time
    grows as seq_len / stride. 0: seq_len, no overlap."""
    micro_batch_size: int = 8
    """Sequences computed together on each replica; parallel.micro_batches divides steps of training."""
    sequences: int = 0
    """Sequences of each folder to evaluate, from the first; 0: all."""
    weights: dict[str, float] = field(default_factory=dict)
    """Weights of sources in the losses; the others do not count. None: every token counts the same."""
    lengths: tuple[int, ...] = ()
    """Lengths of documents, in tokens, that divide them into ranges; losses of each range are reported."""
    ema: bool = False
    """Evaluate the average of the weights, of a run with optim.ema_decay, instead of the weights."""
    mask_documents: bool = False
    """Documents do not see each other, as in training with data.mask_documents."""
    out: Path | None = None
    """JSON file to write the losses to."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    precision: Precision = "fp32"
    """As in training."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: a GPU per rank if there are any, else the CPU."""

    def check(self) -> None:
        """Raise UsageError for a value out of range, or nothing to evaluate."""
        check_ranges(self)
        reject_remote(*filter(None, [self.out]))
        check_ranges(self.parallel, "parallel.")
        self.eval.check()
        require(
            not self.parallel.micro_batches,
            f"parallel.micro_batches is {self.parallel.micro_batches}, which divides a training step; try "
            f"--micro_batch_size {self.micro_batch_size}, the sequences that are computed together",
        )
        for name in ("local_steps", "reduce_bf16", "compression"):
            value = getattr(self.parallel, name)
            require(
                value in (0, "none"),
                f"parallel.{name} is {value}, which has an effect on training alone; leave --parallel.{name} out",
            )
        require(bool(self.tokens or self.text), "nothing to evaluate on: give folders of token shards, or --text FILE")
        require(
            bool(self.text) or not self.stride,
            f"stride is {self.stride}, and there is no --text: only sequences of a text overlap; try --stride 0",
        )
        require(
            bool(self.text) or self.tokenizer is None,
            f"tokenizer is {self.tokenizer}, and there is no --text: TOKENS are encoded; leave --tokenizer out",
        )
        for name in ("weights", "lengths", "sequences", "mask_documents"):
            require(
                bool(self.tokens or not getattr(self, name)),
                f"{name} is given, and there are no TOKENS: a text is one document, of no source, and read to its end; "
                f"leave --{name} out",
            )

    @property
    def eval(self) -> EvalConfig:
        """The options of evaluation as a training run has them."""
        return EvalConfig(sequences=self.sequences, weights=self.weights, lengths=self.lengths)


@contextmanager
def _own_option_names() -> Iterator[None]:
    """In errors that name training's options, name this command's: they have no section."""
    try:
        yield
    except UsageError as error:
        raise UsageError(_SECTION.sub("", str(error))) from error


@_own_option_names()
def evaluate_checkpoint(config: EvaluateConfig) -> dict[str, HoldoutLosses]:
    """Return the losses of a checkpoint on each folder and text file, by its path; every rank calls it.

    Raises UsageError for options that do not fit the checkpoint or each other, InputError for damaged data.
    """
    config.check()
    with init_distributed(config.device, _SECONDS_TO_WAIT) as device:
        model, tokenizer, folder = _load(config, device)
        length = config.seq_len or model.config.context
        main_only(lambda: _note_mask(config, folder.parent / RUN))
        tokens = {str(path): TokenSequences(path, length) for path in config.tokens}
        for data in tokens.values():
            _require_tokenizer(data, tokenizer)
            _require_vocabulary(str(data.folder), data.manifest.tokenizer.vocab_size, model.config.vocab_size)
        found = Holdouts(tokens, config.eval, config.micro_batch_size, config.mask_documents).evaluate(model)
        if config.text:
            require(
                config.stride <= length,
                f"stride is {config.stride}, and a sequence has {length} tokens: those between would be left out; try "
                f"--stride {length // 2}",
            )
            path = _tokenizer_path(config, tokenizer, folder)
            _require_vocabulary(str(path), load_tokenizer(path).vocab_size(), model.config.vocab_size)
            texts = {str(file): TextSequences(file, length, path, tokenizer, config.stride) for file in config.text}
            found |= Holdouts(texts, EvalConfig(), config.micro_batch_size).evaluate(model)
        model.close()
        main_only(lambda: _write(found, config.out))
        return found


def _load(config: EvaluateConfig, device: torch.device) -> tuple[ParallelModel, TokenizerRecord, Path]:
    """The model of the checkpoint under the layout, its tokenizer, and the folder that the checkpoint is in."""
    processes = dist.get_world_size()
    group = CheckpointGroup.create(build_world(ParallelConfig(dp=processes, zero_group=1), device, _SECONDS_TO_WAIT))
    path, record = open_checkpoint(config.checkpoint, group, lambda line: print(line, file=sys.stderr))
    sizes = ModelConfig.from_record(record.model)
    require(
        config.seq_len <= sizes.context,
        f"seq_len is {config.seq_len}, and the checkpoint's model has a context of {sizes.context} tokens; try "
        f"--seq_len {sizes.context}",
    )
    layout = config.parallel.resolve(processes, sizes, config.seq_len or sizes.context)
    world = build_world(layout, device, _SECONDS_TO_WAIT)
    model = parallelize(meta_decoder(sizes), layout, world, 0, config.precision)
    read_shards(model_state(model.params, key_of=weight_keys(path, config.ema)), path, group.process_group)
    model.after_load()
    model.publish_params()
    return model, record.tokenizer, path.absolute().parent


def _note_mask(config: EvaluateConfig, run_file: Path) -> None:
    """Say that documents see each other here, and did not in the run that wrote the checkpoint."""
    try:
        run = read_run(run_file) or {}
    except (InputError, OSError):  # nothing that is evaluated depends on it
        return
    if config.tokens and not config.mask_documents and run.get("data.mask_documents"):
        print(
            f"{run_file.parent} was trained with data.mask_documents, and documents of a sequence see each other here: "
            "for losses as the run reports them give --mask_documents true",
            file=sys.stderr,
        )


def _require_tokenizer(data: TokenSequences, tokenizer: TokenizerRecord) -> None:
    ours = data.manifest.tokenizer
    if tokenizer.sha256 not in ("", ours.sha256):
        raise UsageError(
            f"{data.folder} was made with tokenizer {ours.path} (sha256 {ours.sha256[:12]}), and the checkpoint was "
            f"trained with another ({tokenizer.sha256[:12]}); run tokenize_corpus with the checkpoint's"
        )


def _require_vocabulary(name: str, vocab_size: int, models: int) -> None:
    """Raise UsageError for a tokenizer with ids that the model lacks; an imported one may name no tokenizer."""
    require(
        vocab_size <= models,
        f"{name} has a vocabulary of {vocab_size}, and the checkpoint's model one of {models}: it is of another "
        "tokenizer; give tokens of the model's own",
    )


def _tokenizer_path(config: EvaluateConfig, tokenizer: TokenizerRecord, checkpoints: Path) -> Path:
    if config.tokenizer is not None:
        require(
            not tokenizer.sha256 or is_tokenizer(config.tokenizer, tokenizer),
            f"{config.tokenizer} is not the checkpoint's tokenizer, which has the SHA-256 {tokenizer.sha256}",
        )
        return config.tokenizer
    if not tokenizer.sha256:
        raise UsageError(
            "--text needs the checkpoint's tokenizer, which an imported model does not name; give its SentencePiece "
            "model by --tokenizer FILE"
        )
    found = find_tokenizer(tokenizer, (*config.tokens, checkpoints.parent, checkpoints))  # import_hf's lies beside it
    if found is None:
        raise UsageError(
            f"--text needs the checkpoint's tokenizer {tokenizer.path} (sha256 {tokenizer.sha256[:12]}), which is not "
            f"in {checkpoints.parent}; give it by --tokenizer FILE"
        )
    return found


def _write(found: dict[str, HoldoutLosses], out: Path | None) -> None:
    """Print the losses, a line for each holdout and each of its parts; write them to `out`."""
    for name, losses in found.items():
        print(f"{name}: {losses.whole}, perplexity {_perplexity(losses):.4g} ({losses.whole.tokens:,} tokens)")
        print("\n".join(losses.lines()), end="\n" if losses.lines() else "")
    if out is not None:
        values = {name: _values(losses) for name, losses in found.items()}
        atomic_write_bytes(out, json.dumps(values, indent=2).encode() + b"\n")


def _values(losses: HoldoutLosses) -> dict[str, Any]:
    return {**losses.values(), "tokens": losses.whole.tokens, "perplexity": finite(_perplexity(losses))}


def _perplexity(losses: HoldoutLosses) -> float:
    return math.exp(losses.whole.loss) if losses.whole.loss < _MOST_NATS else math.inf


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, evaluate and print. On a user error every process exits with its code."""
    with exit_on_user_error():
        config = read_options(EvaluateConfig, argv, prog="evaluate")
        with (
            init_distributed(config.device, _SECONDS_TO_WAIT) as device,
            report_failures(StallWatch(_SECONDS_TO_WAIT, lambda: gpu_busy(device))),
        ):
            evaluate_checkpoint(config)


if __name__ == "__main__":
    main()
