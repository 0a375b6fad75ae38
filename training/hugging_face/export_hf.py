"""Stage: export a checkpoint as a Hugging Face model, which transformers can load."""

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import torch
import torch.distributed as dist
from tyro.conf import Positional

from gristmill.budget import free_memory
from gristmill.engine.options import parse_size
from gristmill.errors import OutputError, UsageError, require, wrap_write_errors
from gristmill.io.token_shards import TokenizerRecord
from gristmill.io.tokenizer_companions import (
    CHAT_TEMPLATE,
    CONFIG,
    JSON,
    MODEL,
    RANKS,
    companions_of,
    copies_in,
    read_config,
)
from gristmill.io.tokenizer_file import is_ranks, open_tokenizer, read_json
from gristmill.io.vocabulary import read_vocabulary
from gristmill.storage.files import reject_remote
from gristmill.storage.local import atomic_write_bytes, flush_to_disk, partial_path
from training.checkpoint.checkpoint import open_checkpoint
from training.checkpoint.checkpoint_group import single_process_group
from training.checkpoint.run_folder import document_options
from training.checkpoint.shard_storage import read_shards, stored_tensors, weight_keys
from training.data.text import before_document, find_tokenizer
from training.hugging_face.family import ModelFamily
from training.hugging_face.hf_config import CONFIG_FILE, find_family, ids_of_tokens, write_hf_config
from training.hugging_face.hf_tensors import HFTensor, hf_tensors, pieces_by_parameter
from training.hugging_face.tokenizer_json import plain_tokenizer_config, tokenizer_config, tokenizer_json
from training.model.model_config import ModelConfig

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
GENERATION_FILE = "generation_config.json"
ExportDtype = Literal["stored", "fp32", "bf16", "fp16"]
_READS_JSON = "PreTrainedTokenizerFast"  # a class of transformers that reads nothing else
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export_hf(
    checkpoint: Positional[Path],
    out_dir: Positional[Path],
    tokens: Path | None = None,
    shard_size: str = "5GB",
    dtype: ExportDtype = "stored",
    ema: bool = False,
) -> str:
    """Export a trained model as config.json, generation_config.json and model.safetensors.

    The model must have the parts of one of transformers' architectures (docs/guides/models.md), not a mixture of
    several. Needs memory for one file of weights, which is reserved first.

    Args:
        checkpoint: A checkpoint (OUT/checkpoints/step-…), or a folder of checkpoints or a run's --out_dir, for the
            latest one.
        out_dir: New or empty folder to write to.
        tokens: Folder of token shards with the model's tokenizer; by default the one that the run was trained on. A
            tokenizer.json is copied; a SentencePiece model or tiktoken's rank file is copied and also converted to
            tokenizer.json.
        shard_size: Maximum size of a file of weights; a larger tensor gets a separate file.
        dtype: Type of the weights: stored, as in the checkpoint (fp32, even if trained in bf16), or rounded to another.
        ema: Export the average of the weights instead of the weights, for a run with optim.ema_decay.

    Returns:
        One line: the architecture, step, number of tensors and folder; and how to read the tokenizer if not as usual.
    """
    limit = parse_size(shard_size)
    require_empty(out_dir)
    with single_process_group() as group, wrap_write_errors(out_dir):
        path, record = open_checkpoint(checkpoint, group, lambda text: print(text, file=sys.stderr))
        model = ModelConfig.from_record(record.model)
        family = find_family(model)
        tokenizer = _find_tokenizer(tokens, path, record.tokenizer)
        weights_dtype = DTYPES.get(dtype) or _stored_dtype(path)
        end = record.tokenizer.end_of_document
        begin = record.tokenizer.begin_of_document
        carried = record.hugging_face
        tensors = hf_tensors(family, model)
        with _new_folder(out_dir) as partial:
            _write_weights(tensors, weights_dtype, limit, path, partial, group.process_group, weight_keys(path, ema))
            config = write_hf_config(family, model, end, weights_dtype, begin) | carried.get("config", {})
            _write_json(partial / CONFIG_FILE, config)
            padding = range(record.tokenizer.vocab_size, model.vocab_size)
            generation = carried.get("generation_config")
            if not generation:
                named = {name: ids for name, ids in carried.get("config", {}).items() if ids is not None}
                generation = _generation_config(end, begin) | named
            if padding:
                suppressed = {*(generation.get("suppress_tokens") or []), *padding}
                generation = generation | {"suppress_tokens": sorted(suppressed)}
            _write_json(partial / GENERATION_FILE, generation)
            advice = ""
            if tokenizer is not None:
                try:
                    masked, _ = document_options(record, path)
                    before = before_document(record.tokenizer, masked)
                    advice = _write_tokenizer(tokenizer, record.tokenizer, before, model.context, partial, family)
                except UsageError as error:
                    if tokens is not None:
                        raise
                    advice = f"; without a tokenizer for transformers: {error}"
    return f"{family.model_type} model of step {record.step:,}, {len(tensors)} tensors, in {out_dir}{advice}"


@contextmanager
def _new_folder(out_dir: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `out_dir` at the end; an error removes it, as the disk may be full."""
    partial = partial_path(out_dir)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        flush_to_disk(partial)
        partial.replace(out_dir)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _stored_dtype(checkpoint: Path) -> torch.dtype:
    """Return the narrowest dtype that holds every parameter: an imported checkpoint may mix them."""
    stored = {key: tensor for key, tensor in stored_tensors(checkpoint).items() if key.startswith("model.")}
    dtypes = [tensor.properties.dtype for key, tensor in stored.items() if not key.endswith(".choice_bias")]
    return reduce(torch.promote_types, dtypes)


def require_empty(out_dir: Path) -> None:
    """Raise UsageError unless a folder is new or empty, and of this machine."""
    reject_remote(out_dir)
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise UsageError(f"{out_dir} is not an empty folder; give a new or empty folder")


def _find_tokenizer(tokens: Path | None, checkpoint: Path, record: TokenizerRecord) -> Path | None:
    """Return the tokenizer in `tokens`, or else in the folders of the checkpoint, where import_hf and runs leave it.

    Raises UsageError if it is not in `tokens`.
    """
    if tokens is None:
        return find_tokenizer(record, (checkpoint.parent, checkpoint.parent.parent)) if record.sha256 else None
    path = find_tokenizer(record, (tokens,))
    if path is None:
        raise UsageError(
            f"{tokens / record.path} is missing or is not the tokenizer that the model was trained with; try without "
            "--tokens"
        )
    return path


def _write_tokenizer(
    path: Path, record: TokenizerRecord, before: Sequence[int], context: int, folder: Path, family: ModelFamily
) -> str:
    """Write a tokenizer as transformers reads it; a file of another kind also as it is. Returns advice, if any.

    `before`: ids that begin a text, where the tokenizer's own files do not say it.
    """
    data = path.read_bytes()
    end = record.end_of_document
    begin = record.begin_of_document
    config = read_config(companions_of(path))
    content = read_json(path, data)
    if content is None:
        open_tokenizer(path)  # raises
    target = MODEL if content is None else JSON
    atomic_write_bytes(folder / target, data if content is None else content.encode())
    for companion, copy in copies_in(folder, path).items():
        if companion != path:
            atomic_write_bytes(copy, companion.read_bytes())
    if is_ranks(data):
        atomic_write_bytes(folder / RANKS, data)
    if content is not None:
        if not config:
            _write_json(folder / CONFIG, plain_tokenizer_config(content, end, begin, context))
        return ""
    if config.get("tokenizer_class", _READS_JSON) != _READS_JSON:
        return ""  # it reads the model itself, as where it came from
    vocabulary = read_vocabulary(data)
    _write_json(folder / JSON, tokenizer_json(vocabulary, end, before))
    chats = (folder / CHAT_TEMPLATE).is_file() or "chat_template" in config
    _write_json(folder / CONFIG, tokenizer_config(vocabulary, end, begin, context, chats) | config)
    how = "; read its tokenizer by PreTrainedTokenizerFast: AutoTokenizer takes another for this type of model"
    return how if family.forces_tokenizer else ""


def _write_weights(
    tensors: list[HFTensor],
    dtype: torch.dtype,
    limit: int,
    source: Path,
    folder: Path,
    group: dist.ProcessGroup,
    key_of: Callable[[str], str],
) -> None:
    """Write the weights from the checkpoint `source`, one file at a time; several files get an index."""
    shards = list(_split_files(tensors, dtype, limit))
    needed = max(sum(_size(tensor, dtype) for tensor in shard) for shard in shards)
    free = free_memory()
    require(
        needed <= free,
        f"the largest file of weights needs {needed / 2**30:,.1f} GiB, and this machine has {free / 2**30:,.1f} GiB "
        "free: try a smaller --shard_size, such as 1GB, or --dtype bf16",
    )
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = WEIGHTS_FILE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        filled = {tensor.name: torch.zeros(tensor.shape, dtype=tensor.stored_as(dtype)) for tensor in shard}
        parts = pieces_by_parameter((tensor, filled[tensor.name]) for tensor in shard)
        read_shards({key_of(name): pieces for name, pieces in parts.items()}, source, group)
        try:
            safetensors.torch.save_file(filled, folder / name, metadata={"format": "pt"})
            (folder / name).chmod(folder.stat().st_mode & 0o666)  # as of any file: it makes ones that no other may read
        except safetensors.SafetensorError as error:
            raise OutputError(f"cannot write {folder / name} ({error}): make room, or choose another folder") from error
        flush_to_disk(folder / name)
        places |= dict.fromkeys(filled, name)
    if len(shards) > 1:
        size = sum(_size(tensor, dtype) for tensor in tensors)
        _write_json(folder / INDEX_FILE, {"metadata": {"total_size": size}, "weight_map": places})


def _size(tensor: HFTensor, dtype: torch.dtype) -> int:
    """Return the bytes in files of `dtype`."""
    return torch.Size(tensor.shape).numel() * tensor.stored_as(dtype).itemsize


def _split_files(tensors: list[HFTensor], dtype: torch.dtype, limit: int) -> Iterator[list[HFTensor]]:
    """Group consecutive tensors into files of at most `limit` bytes."""
    shard: list[HFTensor] = []
    size = 0
    for tensor in tensors:
        more = _size(tensor, dtype)
        if shard and size + more > limit:
            yield shard
            shard = []
            size = 0
        shard.append(tensor)
        size += more
    yield shard


def _generation_config(end: int, begin: int) -> dict[str, Any]:
    """Build generation_config.json: the end of a document pads a text, and starts it where nothing else does."""
    ids = ids_of_tokens(end, begin) | {"pad_token_id": end if end >= 0 else None}
    return {name: token for name, token in ids.items() if token is not None}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    atomic_write_bytes(path, json.dumps(value, indent=2).encode() + b"\n")
