"""Stage: a checkpoint as a Hugging Face model, which transformers and all that reads its files can load."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
import torch.distributed as dist
from tyro.conf import Positional

from gristmill.engine.stage import parse_size
from gristmill.errors import OutputError, UsageError, writing
from gristmill.io.files import atomic_write_bytes, flush_to_disk, partial_path, sha256_file
from gristmill.io.token_shards import TokenizerRecord
from training.checkpoint.checkpoint import CheckpointRecord, open_checkpoint
from training.checkpoint.checkpoint_group import single_process_group
from training.checkpoint.shard_storage import read_shards, stored_dtypes
from training.hugging_face.tensor_names import (
    CONFIG,
    INDEX,
    TOKENIZER,
    WEIGHTS,
    Theirs,
    form_of,
    their_tensors,
    to_config,
)
from training.model.model_config import ModelConfig
from training.sharding.shard_spec import ShardSpec


def export_hf(
    checkpoint: Positional[Path], out_dir: Positional[Path], tokens: Path | None = None, shard_size: str = "5GB"
) -> str:
    """Write a trained model as config.json, generation_config.json and model.safetensors.

    Llama and GPT-2 have such a form (LlamaForCausalLM, GPT2LMHeadModel); mixtures of their parts have none.
    The memory needed is that of one file of weights.

    Args:
        checkpoint: OUT/checkpoints/step-…, or a folder of checkpoints or a run's --out_dir: its latest.
        out_dir: Where to write; a new or empty folder.
        tokens: The folder of token shards that the model was trained on: its tokenizer.model is copied.
        shard_size: The weights are split over files of this size at most (one tensor may be larger).

    Returns:
        What was written.
    """
    limit = parse_size(shard_size)
    require_empty(out_dir)
    partial = partial_path(out_dir)
    with single_process_group() as group, writing(out_dir):
        path, record = open_checkpoint(checkpoint, group, lambda text: print(text, file=sys.stderr))
        model = model_config(record)
        form = form_of(model)
        tokenizer = _find_tokenizer(tokens, record.tokenizer) if tokens else None
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        dtype = stored_dtypes(path)["model.embed.tokens.weight"]
        tensors = their_tensors(form, model)
        _write_weights(tensors, dtype, limit, path, partial, group.process_group)
        _write_json(partial / CONFIG, to_config(form, model, record.tokenizer.end_of_document, dtype))
        _write_json(partial / "generation_config.json", _generation(record.tokenizer.end_of_document))
        if tokenizer is not None:
            shutil.copyfile(tokenizer, partial / TOKENIZER)
        flush_to_disk(partial)
        partial.replace(out_dir)
    return f"{form} model of step {record.step:,}, {len(tensors)} tensors, in {out_dir}"


def require_empty(out_dir: Path) -> None:
    """Raise UsageError where a folder holds something already."""
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise UsageError(f"{out_dir} is there already; give a new or empty folder")


def model_config(record: CheckpointRecord) -> ModelConfig:
    """The model that a checkpoint is of. UsageError where its configuration has fields unknown to this version."""
    try:
        return ModelConfig(**record.model)
    except TypeError as error:
        raise UsageError(f"the checkpoint's model was configured by another version ({error})") from error


def _find_tokenizer(tokens: Path, record: TokenizerRecord) -> Path:
    path = tokens / record.path
    if not path.is_file() or sha256_file(path) != record.sha256:
        raise UsageError(
            f"{path} is missing or is not the tokenizer that the model was trained with; leave out --tokens"
        )
    return path


def _write_weights(
    tensors: list[Theirs], dtype: torch.dtype, limit: int, source: Path, folder: Path, group: dist.ProcessGroup
) -> None:
    """Fill one file after the other from the checkpoint `source`; an index where there are several."""
    shards = list(_split(tensors, dtype.itemsize, limit))
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        filled = {theirs.name: torch.empty(theirs.shape, dtype=dtype) for theirs in shard}
        views = [view for theirs in shard for view in theirs.views(filled[theirs.name]).items()]
        state = {f"model.{ours}": [(view, ShardSpec.whole(tuple(view.shape)))] for ours, view in views}
        read_shards(state, source, group)
        try:
            safetensors.torch.save_file(filled, folder / name, metadata={"format": "pt"})
        except safetensors.SafetensorError as error:
            raise OutputError(f"cannot write {folder / name} ({error}): make room, or choose another folder") from error
        flush_to_disk(folder / name)
        places |= dict.fromkeys(filled, name)
    if len(shards) > 1:
        size = sum(torch.Size(theirs.shape).numel() for theirs in tensors) * dtype.itemsize
        _write_json(folder / INDEX, {"metadata": {"total_size": size}, "weight_map": places})


def _split(tensors: list[Theirs], itemsize: int, limit: int) -> Iterator[list[Theirs]]:
    """Neighbours together, as many as fit."""
    shard: list[Theirs] = []
    size = 0
    for theirs in tensors:
        more = torch.Size(theirs.shape).numel() * itemsize
        if shard and size + more > limit:
            yield shard
            shard, size = [], 0
        shard.append(theirs)
        size += more
    yield shard


def _generation(end: int) -> dict[str, Any]:
    """A text begins after the end of another, as in training; what is past its end is filled with the same."""
    return {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    atomic_write_bytes(path, json.dumps(value, indent=2).encode() + b"\n")
