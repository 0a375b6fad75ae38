"""Evaluation of a checkpoint: its losses on folders of token shards and on text files, under any layout."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gristmill.errors import require
from gristmill.io.token_shards import TokenizerRecord
from gristmill.io.tokenizer_file import open_tokenizer
from gristmill.storage.local import atomic_write_bytes
from gristmill.wording import count_of
from training.checkpoint.checkpoint import open_checkpoint
from training.checkpoint.checkpoint_group import CheckpointGroup
from training.checkpoint.record import CheckpointRecord, describe_changed_code
from training.checkpoint.run_folder import document_options
from training.checkpoint.shard_storage import model_state, read_shards, weight_keys
from training.data.sequences import TokenSequences
from training.data.text import TextSequences, before_document, require_tokenizer
from training.distributed.hang_detection import report_failures
from training.distributed.process_group import init_distributed, main_only
from training.distributed.stall_watch import StallWatch, gpu_busy
from training.evaluate_config import EvaluateConfig, own_option_names
from training.experimental.parallel_config import ParallelConfig
from training.language_model import open_language_model
from training.memory.memory_config import MemoryConfig
from training.model.decoder import meta_decoder
from training.model.model_config import ModelConfig
from training.own_code import allow_files
from training.parallel.free_memory import require_memory
from training.parallel.mesh import build_world
from training.parallel.parallel_model import ParallelModel
from training.parallel.parallelize import parallelize
from training.reporting.holdouts import HoldoutLosses, Holdouts
from training.reporting.metrics_file import finite
from training.reporting.reporting_config import EvalConfig
from training.tasks.harness import require_lm_eval
from training.tasks.run_tasks import Scores, report_lines, run_tasks

_SECONDS_TO_WAIT = 60.0  # of a rank for another


@own_option_names()
def evaluate_checkpoint(config: EvaluateConfig) -> dict[str, HoldoutLosses]:
    """Return the losses of a checkpoint on each folder and text file, by its path; every rank calls it.

    Its scores in tasks are printed and written only. Raises UsageError for options that do not fit the checkpoint or
    each other, InputError for damaged data.
    """
    config.check()
    allow_files(config.code)
    with init_distributed(config.device, _SECONDS_TO_WAIT) as device:
        losses = _evaluate_sequences(config, device) if config.tokens or config.text else {}
        scores = _run_tasks(config, device) if config.tasks else {}
        main_only(lambda: _write(losses, scores, config.out))
        return losses


def _run_tasks(config: EvaluateConfig, device: torch.device) -> Scores:
    """Return the scores of the checkpoint in tasks of lm_eval."""
    require_lm_eval("--tasks")
    model = open_language_model(
        config.checkpoint, device, config.parallel, config.precision, config.ema, config.tokenizer, _SECONDS_TO_WAIT
    )
    return run_tasks(
        model,
        config.tasks,
        config.task_folder,
        config.limit,
        config.fewshot,
        config.micro_batch_size,
        config.items,
    )


def _evaluate_sequences(config: EvaluateConfig, device: torch.device) -> dict[str, HoldoutLosses]:
    """Return the losses of the checkpoint on each folder of tokens and each text file."""
    model, record, checkpoint = _load(config, device)
    tokenizer = record.tokenizer
    folder = checkpoint.parent
    length = config.seq_len or model.config.context
    masked, ignores_firsts = main_only(lambda: _as_trained(config, record, checkpoint))
    tokens = {str(path): TokenSequences(path, length, ignores_firsts) for path in config.tokens}
    for data in tokens.values():
        _require_tokenizer(data, tokenizer)
        _require_vocabulary(str(data.folder), data.manifest.tokenizer.vocab_size, model.config.vocab_size)
    losses = Holdouts(tokens, config.eval, config.micro_batch_size, masked).evaluate(model)
    if config.text:
        require(
            config.stride <= length,
            f"stride is {config.stride}, and a sequence has {length} tokens: those between would be left out; try "
            f"--stride {length // 2}",
        )
        folders = (*config.tokens, folder.parent, folder)  # import-hf's is next to the checkpoint
        path = require_tokenizer(config.tokenizer, tokenizer, folders, "--text")
        _require_vocabulary(str(path), open_tokenizer(path).vocab_size, model.config.vocab_size)
        options = path, before_document(tokenizer, masked), tokenizer, config.stride
        texts = {str(file): TextSequences(file, length, *options) for file in config.text}
        losses |= Holdouts(texts, EvalConfig(), config.micro_batch_size).evaluate(model)
    model.close()
    return losses


def _load(config: EvaluateConfig, device: torch.device) -> tuple[ParallelModel, CheckpointRecord, Path]:
    """Return the model of the checkpoint under the layout, its record, and where it is."""
    processes = dist.get_world_size()
    group = CheckpointGroup.create(build_world(ParallelConfig(dp=processes, zero_group=1), device, _SECONDS_TO_WAIT))
    path, record = open_checkpoint(config.checkpoint, group, lambda line: print(line, file=sys.stderr))
    sizes = ModelConfig.from_record(record.model)
    changed = describe_changed_code(record)
    if changed and dist.get_rank() == 0:
        print(changed, file=sys.stderr)
    require(
        config.seq_len <= sizes.context,
        f"seq_len is {config.seq_len}, and the checkpoint's model has a context of {sizes.context} tokens; try "
        f"--seq_len {sizes.context}",
    )
    layout = config.parallel.resolve(processes, sizes, config.seq_len or sizes.context, is_trained=True)
    world = build_world(layout, device, _SECONDS_TO_WAIT)
    ask = partial(require_memory, world, layout, config.precision, MemoryConfig(), None)
    model = parallelize(meta_decoder(sizes), layout, world, 0, config.precision, before_allocation=ask)
    state = model_state(model.params, key_of=weight_keys(path, config.ema), buffers=model.buffers)
    read_shards(state, path, group.process_group)
    model.after_load()
    model.all_gather_params()
    return model, record, path.absolute()


def _as_trained(config: EvaluateConfig, record: CheckpointRecord, checkpoint: Path) -> tuple[bool, bool]:
    """Return whether documents do not see each other, and whether their first tokens are no targets.

    As given, or as in the training of the checkpoint, which is said.
    """
    masked, eod_mask_loss = document_options(record, checkpoint)
    if config.mask_documents is not None:
        masked = config.mask_documents
    elif masked:
        print("documents do not see each other, as in training", file=sys.stderr)
    if config.tokens and eod_mask_loss and not masked:
        print("first tokens of documents are not counted, as in training", file=sys.stderr)
    return masked, masked or eod_mask_loss


def _require_tokenizer(data: TokenSequences, tokenizer: TokenizerRecord) -> None:
    ours = data.manifest.tokenizer  # imported ones may name none
    require(
        not (tokenizer.sha256 and ours.sha256) or tokenizer.sha256 == ours.sha256,
        f"{data.folder} was made with tokenizer {ours.path} (sha256 {ours.sha256[:12]}), and the checkpoint was "
        f"trained with another ({tokenizer.sha256[:12]}); run tokenize_corpus with the checkpoint's",
    )


def _require_vocabulary(name: str, vocab_size: int, models: int) -> None:
    """Raise UsageError for a tokenizer with ids that the model lacks; an imported one may name no tokenizer."""
    require(
        vocab_size <= models,
        f"{name} has a vocabulary of {vocab_size}, and the checkpoint's model has one of {models}: they are from "
        "different tokenizers; give tokens made with the model's tokenizer",
    )


def _write(losses_of_sets: dict[str, HoldoutLosses], scores: Scores, out: Path | None) -> None:
    """Print the losses, a line for each holdout and each of its parts, and the scores; write them to `out`."""
    for name, losses in losses_of_sets.items():
        print(
            f"{name}: {losses.whole}, perplexity {losses.whole.perplexity:.4g} "
            f"({count_of(losses.whole.tokens, 'token')})"
        )
        print("\n".join(losses.lines()), end="\n" if losses.lines() else "")
    print("\n".join(report_lines(scores)), end="\n" if scores else "")
    if out is not None:
        values: dict[str, Any] = {
            name: {**losses.values(), "tokens": losses.whole.tokens, "perplexity": finite(losses.whole.perplexity)}
            for name, losses in losses_of_sets.items()
        }
        atomic_write_bytes(out, json.dumps(values | scores, indent=2).encode() + b"\n")


def evaluate_and_report_failures(config: EvaluateConfig) -> None:
    """Evaluate as a command does: where a rank fails, dies or hangs, one rank prints why, and every process ends."""
    with (
        init_distributed(config.device, _SECONDS_TO_WAIT) as device,
        report_failures(StallWatch(_SECONDS_TO_WAIT, lambda: gpu_busy(device))),
    ):
        evaluate_checkpoint(config)
