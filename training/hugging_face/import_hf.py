"""Stage: import a Hugging Face model as a checkpoint of step 0, to train from."""

import json
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from torch import Tensor
from tyro.conf import Positional

from gristmill.errors import InputError, UsageError, wrap_write_errors
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
from gristmill.io.tokenizer_file import open_tokenizer, read_json, require_all_tokens
from gristmill.io.vocabulary import read_vocabulary
from gristmill.storage.local import atomic_write, sha256_file
from gristmill.wording import count_of
from training.checkpoint.checkpoint import CheckpointManager, CheckpointRecord
from training.checkpoint.checkpoint_group import single_process_group
from training.checkpoint.shard_plans import State
from training.data.text import before_document
from training.hugging_face.export_hf import (
    GENERATION_FILE,
    INDEX_FILE,
    WEIGHTS_FILE,
    require_empty,
)
from training.hugging_face.family import ModelFamily
from training.hugging_face.hf_config import CONFIG_FILE, TOKEN_IDS, read_hf_config
from training.hugging_face.hf_tensors import HFTensor, hf_tensors, pieces_by_parameter
from training.hugging_face.hub_model import local_folder
from training.hugging_face.tokenizer_json import PLAIN_FIELDS, tokenizer_config, tokenizer_json
from training.model.model_config import ModelConfig

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # others are codes of quantized weights


def import_hf(hf_folder: Positional[Path], out_dir: Positional[Path]) -> str:
    """Import config.json and model.safetensors as a checkpoint to train from.

    Train with --init_from OUT, on tokens of the model's own tokenizer, which is copied to OUT for
    tokenize_corpus: tokenizer.json if there is one, else tokenizer.model, with the files that belong to it. The
    checkpoint holds parameters only; the optimizer starts from zero.

    Args:
        hf_folder: Folder written by save_pretrained or gristmill export_hf, or downloaded; or hf://ORG/NAME[@REVISION],
            which is fetched into the Hub's cache (needs gristmill[hub]).
        out_dir: New or empty folder to write to.

    Returns:
        Two lines: what was written, and the training options that describe the model; before them one for what of it
        has no effect, or is left out.
    """
    require_empty(out_dir)
    hf_folder = local_folder(hf_folder)
    notes: list[str] = []
    with ExitStack() as files, single_process_group() as group:
        family, model, config, state = open_hf_model(hf_folder, files, notes.append)
        tokenizer = _copy_tokenizer(hf_folder, out_dir, model, config, notes.append)
        record = CheckpointRecord(
            step=0,
            updates=0,
            processes=1,
            layout={},
            stability={},
            unigram_loss=0.0,
            model=model.record(),
            tokenizer=tokenizer,
            hugging_face=carried_fields(hf_folder, config),
        )
        path = CheckpointManager(out_dir, 1, group.world, print).save(record, state)
    how = f"train it with --init_from {out_dir}"
    count = sum(view.numel() for pieces in state.values() for view, _ in pieces)
    what = f"{family.model_type} model, {count:,} parameters in {len(state)} tensors, in {path}"
    return "\n".join([*notes, what, how])


class HFModel(NamedTuple):
    """A Hugging Face model in our terms."""

    family: ModelFamily
    model: ModelConfig
    config: dict[str, Any]
    """Of config.json."""
    state: State
    """Our parameters, as views of the files' tensors: they are read where they are copied."""


def open_hf_model(folder: Path, files: ExitStack, say: Callable[[str], object]) -> HFModel:
    """Open the model in `folder`; `files` closes its files, and `say` takes a line for what has no effect here.

    Raises UsageError for a model that we lack, InputError for a damaged one.
    """
    config = _read_json(folder / CONFIG_FILE)
    try:
        family, model = read_hf_config(config, say)
    except (UsageError, InputError) as error:
        raise type(error)(f"{folder / CONFIG_FILE}: {error}") from error
    tensors = _open_tensors(folder, family, model.layers, files, say)
    model = _with_its_head(family, model, tensors, say)
    return HFModel(family, model, config, _checkpoint_state(family, model, tensors))


def _checkpoint_state(family: ModelFamily, model: ModelConfig, tensors: dict[str, tuple[Any, str]]) -> State:
    """Map our parameters to views of the files' tensors. Raises InputError unless the files hold exactly this model."""
    needed = {tensor.name: tensor for tensor in hf_tensors(family, model)}
    copies = {family.head} if model.tied else set()  # of the embedding: see _with_its_head
    missing = sorted(needed.keys() - tensors.keys())
    more = sorted(tensors.keys() - needed.keys() - copies)
    if missing or more:
        fault = f"no {missing[0]}" if missing else f"{more[0]}, which this model does not have"
        raise InputError(f"the files hold {fault} ({len(missing)} missing, {len(more)} too many); see {CONFIG_FILE}")
    given: list[tuple[HFTensor, Tensor]] = []
    for name, expected in needed.items():
        file, stored = tensors[name]
        tensor: Tensor = file.get_tensor(stored)  # memory-mapped, not read
        if tuple(tensor.shape) != expected.shape:
            raise InputError(f"{name} has shape {tuple(tensor.shape)}, {CONFIG_FILE} makes it {expected.shape}")
        if tensor.dtype not in _DTYPES:
            raise UsageError(
                f"{name} holds {tensor.dtype}; expected float weights: convert a quantized model back first"
            )
        given.append((expected, tensor))
    return {f"model.{ours}": pieces for ours, pieces in pieces_by_parameter(given).items()}


def _with_its_head(
    family: ModelFamily, model: ModelConfig, tensors: dict[str, tuple[Any, str]], say: Callable[[str], object]
) -> ModelConfig:
    """Return the model with an output matrix of its own, where the files hold one that is not the embedding."""
    if not model.tied or family.head not in tensors:
        return model
    table = hf_tensors(family, model)
    embedding = next(tensor.name for tensor in table if tensor.parameters == ("embed.tokens.weight",))
    head, tokens = (tensors[name][0].get_tensor(tensors[name][1]) for name in (family.head, embedding))
    if head.shape == tokens.shape and torch.equal(head, tokens):
        return model
    say(f"its {family.head} is not its embedding, though tie_word_embeddings is true: the model has both here")
    return replace(model, tied=False)


def _open_tensors(
    folder: Path, family: ModelFamily, layers: int, files: ExitStack, say: Callable[[str], object]
) -> dict[str, tuple[Any, str]]:
    """Map each tensor's full name to the open file that holds it and its name in that file.

    With an index, the file is the one that it names. Raises InputError where a file is damaged, or holds one twice.
    """
    tensors: dict[str, tuple[Any, str]] = {}
    computed: list[str] = []
    elsewhere: list[str] = []
    file_of = _read_index(folder)
    absent = {*file_of}  # tensors that the index names and its files do not hold
    for name in sorted({*file_of.values()}) or [WEIGHTS_FILE]:
        file = _open_file(folder / name, files)
        for key in file.keys():  # noqa: SIM118
            full_name = key if key.startswith((family.body, family.head)) else family.body + key
            if file_of.get(key, name) != name:
                elsewhere.append(f"{key} of {name}")
                continue
            absent.discard(key)
            if key.endswith(family.buffers):
                computed.append(key)
            elif full_name in tensors:
                raise InputError(f"{folder} holds {full_name} twice, as {tensors[full_name][1]} and {key}; remove one")
            else:
                tensors[full_name] = (file, key)
    further = sorted(key for key in tensors if family.beyond and key.startswith(family.beyond.format(layers)))
    for names, why in (
        (computed, "computed anew"),
        (elsewhere, f"that {INDEX_FILE} places in another file"),
        (sorted(absent), f"that {INDEX_FILE} names and its files do not hold"),
        (further, "of a layer that predicts a further token"),
    ):
        if names:
            say(f"left out: {count_of(len(names), 'tensor')} {why}, such as {names[0]}")
    return {key: held for key, held in tensors.items() if key not in further}


def _open_file(path: Path, files: ExitStack) -> Any:
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file; expected weights as safetensors")
    try:
        return files.enter_context(safetensors.safe_open(path, "pt"))
    except (safetensors.SafetensorError, OSError) as error:
        raise InputError(f"{path} is damaged ({error}); fetch or write it again") from error


def _read_index(folder: Path) -> dict[str, str]:
    """Return the file of each tensor, as the index says; nothing where there is none, and one file holds all."""
    path = folder / INDEX_FILE
    if not path.is_file():
        return {}
    weight_map = _read_json(path).get("weight_map")
    is_map = isinstance(weight_map, dict) and all(isinstance(name, str) for name in weight_map.values())
    if not weight_map or not is_map:
        raise InputError(f"{path} is damaged: its weight_map names no files; fetch or write it again")
    return dict(weight_map)


def carried_fields(folder: Path, config: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what an export says again, and training does not use: ids of tokens, and how text is generated."""
    ids = {name: config[name] for name in TOKEN_IDS if name in config}
    path = folder / GENERATION_FILE
    generation = _read_json(path) if path.is_file() else {}
    return {"config": ids, "generation_config": generation} if ids or generation else {}


def _copy_tokenizer(
    folder: Path, out_dir: Path, model: ModelConfig, config: dict[str, Any], say: Callable[[str], object]
) -> TokenizerRecord:
    """Copy the tokenizer, and what belongs to it, to `out_dir`; of other kinds than ours only say that it is left out.

    Raises UsageError for a SentencePiece model without the tokens that the files next to it add.
    """
    ends = config.get("eos_token_id")
    end = ends[0] if isinstance(ends, list) and ends else ends
    end = end if type(end) is int and 0 <= end < model.vocab_size else -1  # unknown
    sources = [path for name in (JSON, MODEL) if (path := folder / name).is_file()]
    if not sources:
        if (folder / "vocab.json").is_file():
            say(
                "its vocab.json is left out: load its tokenizer by transformers' AutoTokenizer, save it with "
                f"save_pretrained, and encode texts with the {JSON} that this writes"
            )
        return TokenizerRecord("", "", model.vocab_size, end)
    original = _original_of_export(folder, end)
    if original is not None:
        source = original
        template = folder / CHAT_TEMPLATE
        kept = [source, template] if template.is_file() else [source]
        copies = {path: out_dir / path.name for path in kept}
    else:
        source = sources[0]
        require_all_tokens(open_tokenizer(source), source, companions_of(source))
        copies = copies_in(out_dir, source)
    for path, copy in copies.items():
        with wrap_write_errors(out_dir), atomic_write(copy) as temporary:
            shutil.copyfile(path, temporary)
    return TokenizerRecord(source.name, sha256_file(source), model.vocab_size, end)


def _original_of_export(folder: Path, end: int) -> Path | None:
    """Return the tokenizer that export_hf made tokenizer.json of, if its other files say nothing else; else None."""
    if not (folder / JSON).is_file():
        return None
    companions = {path.name for path in companions_of(folder / JSON)} - {CHAT_TEMPLATE}
    if companions == {CONFIG, MODEL} and _is_made_of_pieces(folder, end):
        return folder / MODEL
    if companions == {CONFIG} and _is_made_of_ranks(folder):
        return folder / RANKS
    return None


def _is_made_of_pieces(folder: Path, end: int) -> bool:
    """Return whether tokenizer.json and its config are what export_hf writes of tokenizer.model."""
    config = read_config([folder / CONFIG])
    try:
        open_tokenizer(folder / MODEL)
        vocabulary = read_vocabulary((folder / MODEL).read_bytes())
        first = config.get("bos_token")
        begin = vocabulary.pieces.index(first) if first in vocabulary.pieces else -1
        record = TokenizerRecord("", "", len(vocabulary.pieces), end, -1 if begin == end else begin)
        beginnings = [before_document(record, masked) for masked in (False, True)]
        written = [json.loads(json.dumps(tokenizer_json(vocabulary, end, before))) for before in beginnings]
    except UsageError:
        return False  # of a model that no export writes
    context = config.get("model_max_length", 0)
    chats = not config.get("split_special_tokens", True)
    expected = tokenizer_config(vocabulary, end, begin, context, chats)
    return _read_json(folder / JSON) in written and config == expected


def _is_made_of_ranks(folder: Path) -> bool:
    """Return whether tokenizer.json and its config are what export_hf writes of a rank file."""
    config = read_config([folder / CONFIG])
    text = (folder / JSON).read_text(encoding="utf-8")
    try:
        written = read_json(folder / RANKS, (folder / RANKS).read_bytes())
    except (OSError, UsageError):
        return False  # there is none, or it is damaged
    return text == written and config.keys() <= PLAIN_FIELDS


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file; expected the folder of a Hugging Face model")
    try:
        fields = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is damaged ({error}); fetch or write it again") from error
    if not isinstance(fields, dict):
        raise InputError(f"{path} is damaged: it holds no fields; fetch or write it again")
    return fields
