"""LanguageModel: what was trained, ready to write text: a checkpoint, or the folder of a Hugging Face model.

The decoder is sharded as for training, and has nothing that training needs: no gradients, and one copy of the weights.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from gristmill.errors import UsageError, require
from gristmill.io.tokenizer_file import AnyTokenizer, find_tokenizer_file, open_tokenizer
from training.checkpoint.checkpoint import open_checkpoint
from training.checkpoint.checkpoint_group import CheckpointGroup
from training.checkpoint.record import describe_changed_code
from training.checkpoint.run_folder import document_options
from training.checkpoint.shard_plans import box_array, intersect
from training.checkpoint.shard_storage import model_state, read_shards, weight_keys
from training.data.text import begin_text, require_tokenizer
from training.distributed.process_group import main_only
from training.experimental.parallel_config import ParallelConfig
from training.generation.cache import KeyValueCache
from training.generation.ranks import RankedCache
from training.hugging_face.hf_config import CONFIG_FILE
from training.hugging_face.import_hf import carried_fields, open_hf_model
from training.kernels.precision import COMPUTE_DTYPES
from training.memory.memory_config import MemoryConfig
from training.model.decoder import Decoder, meta_decoder
from training.model.model_config import ModelConfig
from training.parallel.context.tokens import TokenOrder
from training.parallel.expert.routing import Routing
from training.parallel.free_memory import require_memory
from training.parallel.mesh import World, build_world
from training.parallel.parallelize import shard_model
from training.parallel.pipeline.pipeline_stages import global_name
from training.parallel.placement_table import placement_table
from training.sharding.shard_spec import ShardSpec
from training.sharding.sharded_parameter import ShardedParameter


@dataclass(frozen=True)
class LanguageModel:
    """A decoder with its cache, and its tokenizer."""

    cache: KeyValueCache | RankedCache
    config: ModelConfig
    world: World
    tokenizer: AnyTokenizer
    tokenizer_file: Path
    begins: Callable[[str], list[int]]
    """The tokens of a text from its beginning: with those that the model has seen before a document."""
    ends: frozenset[int]
    """Tokens that end a document."""
    hidden: Tensor
    """Tokens that are no text, and never drawn: (V,) bool."""

    def agree(self, tokens: Tensor) -> Tensor:
        """Return the tokens that rank 0 drew."""
        return self.cache.agree(tokens) if isinstance(self.cache, RankedCache) else tokens


class _Source(NamedTuple):
    """Where a model comes from, and how its texts begin and end."""

    config: ModelConfig
    tokenizer: Path
    begin: Callable[[Sequence[int]], list[int]] | None
    """Adds the tokens before a text to those of it; None: the tokenizer itself adds them."""
    end: int
    """Token that ends a document; -1: none."""
    hugging_face: dict[str, dict[str, Any]]
    """Fields of config.json and of generation_config.json."""
    fill: Callable[[Sequence[ShardedParameter], Mapping[str, Tensor]], None]
    """Fills the parameters and buffers of a sharded decoder; collective."""


def open_language_model(
    path: Path,
    device: torch.device,
    parallel: ParallelConfig = ParallelConfig(),
    precision: str = "fp32",
    ema: bool = False,
    tokenizer: Path | None = None,
    timeout: float = 60.0,
) -> LanguageModel:
    """Open a checkpoint, or the folder of a Hugging Face model, on all ranks, which all call it.

    Raises UsageError for a folder that is neither, for a layout that does not fit, and without a tokenizer; InputError
    for damaged files.
    """
    plain = ParallelConfig(dp=parallel.dp, tp=parallel.tp, pp=parallel.pp, ep=parallel.ep)
    others = [name for name, value in asdict(parallel).items() if value != getattr(plain, name)]
    require(
        not others,
        f"text and tasks are computed under parallel.dp, tp, pp and ep, and parallel.{''.join(others[:1])} is given; "
        "leave it out",
    )
    processes = dist.get_world_size()
    with ExitStack() as files:
        if (path / CONFIG_FILE).is_file():
            source = _open_hf_folder(path, tokenizer, files)
        else:
            everyone = build_world(ParallelConfig(dp=processes), device, timeout)
            source = _open_checkpoint(path, tokenizer, ema, CheckpointGroup.create(everyone))
        layout = parallel.resolve(processes, source.config, source.config.context, is_trained=True)
        world = build_world(layout, device, timeout)
        decoder = meta_decoder(source.config)
        table = placement_table(decoder, layout)
        shapes = {name: tuple(p.shape) for name, p in decoder.named_parameters()}
        (part,) = shard_model(decoder, layout, world, COMPUTE_DTYPES[precision])
        count = sum(p.numel() for p in part.parameters())
        sharding = "--parallel.tp or --parallel.pp"
        require_memory(world, layout, precision, MemoryConfig(), None, count, count, sharding)
        part.to_empty(device=device)
        part.tie()
        routing = Routing.of([part], world, TokenOrder.of(layout, world))
        params = []
        for own_name, p in part.named_parameters():
            name = global_name(part, own_name)
            params.append(ShardedParameter(name, p, p, table[name].piece(shapes[name], world.axes), True))
        source.fill(params, {} if routing is None else routing.buffers)
    opened = open_tokenizer(source.tokenizer)
    if opened.vocab_size > source.config.vocab_size:
        raise UsageError(
            f"{source.tokenizer} has a vocabulary of {opened.vocab_size}, and the model one of "
            f"{source.config.vocab_size}: it is another model's; give this one's by --tokenizer FILE"
        )
    return LanguageModel(
        cache=_cache_of(part, world),
        config=source.config,
        world=world,
        tokenizer=opened,
        tokenizer_file=source.tokenizer,
        begins=_beginning(opened, source),
        ends=_ends(source),
        hidden=_hidden(source, opened.vocab_size),
    )


def _open_hf_folder(folder: Path, tokenizer: Path | None, files: ExitStack) -> _Source:
    tokenizer_file = main_only(lambda: find_tokenizer_file(tokenizer or folder))
    model = open_hf_model(folder, files, _say_once)

    def fill(params: Sequence[ShardedParameter], buffers: Mapping[str, Tensor]) -> None:
        for key, targets in model_state(params, buffers=buffers).items():
            for target, spec in targets:
                _copy_overlaps(target, spec, model.state[key])

    return _Source(model.model, tokenizer_file, None, -1, carried_fields(folder, model.config), fill)


def _open_checkpoint(path: Path, tokenizer: Path | None, ema: bool, group: CheckpointGroup) -> _Source:
    checkpoint, record = open_checkpoint(path, group, _say_once, ("the folder of a Hugging Face model",))
    checkpoint = checkpoint.absolute()
    run_folder = checkpoint.parent.parent
    folders = (run_folder, checkpoint.parent)  # import-hf's is next to the checkpoint
    tokenizer_file = main_only(lambda: require_tokenizer(tokenizer, record.tokenizer, folders, "text"))
    is_imported = record.step == 0 and record.hugging_face
    masked, _ = main_only(lambda: document_options(record, checkpoint))
    begin = None if is_imported else partial(begin_text, record.tokenizer, masked)

    def fill(params: Sequence[ShardedParameter], buffers: Mapping[str, Tensor]) -> None:
        state = model_state(params, key_of=weight_keys(checkpoint, ema), buffers=buffers)
        read_shards(state, checkpoint, group.process_group)

    model = ModelConfig.from_record(record.model)
    if changed := describe_changed_code(record):
        _say_once(changed)
    return _Source(model, tokenizer_file, begin, record.tokenizer.end_of_document, record.hugging_face, fill)


def _copy_overlaps(target: Tensor, spec: ShardSpec, pieces: Sequence[tuple[Tensor, ShardSpec]]) -> None:
    """Copy to `target`, the shard `spec` of a parameter, what lies in it of the parameter's pieces."""
    boxes = box_array([(piece.offset, piece.size) for _, piece in pieces], len(spec.size))
    for (view, piece), (offset, size) in zip(pieces, intersect((spec.offset, spec.size), boxes).tolist(), strict=True):
        overlap = ShardSpec(spec.global_shape, tuple(offset), tuple(size))
        if overlap.numel:
            target[_within(overlap, spec)] = view[_within(overlap, piece)].to(target.dtype)


def _within(inner: ShardSpec, outer: ShardSpec) -> tuple[slice, ...]:
    """Return the index of one shard in another one that contains it."""
    starts = [own - other for own, other in zip(inner.offset, outer.offset, strict=True)]
    return tuple(slice(start, start + size) for start, size in zip(starts, inner.size, strict=True))


def _beginning(tokenizer: AnyTokenizer, source: _Source) -> Callable[[str], list[int]]:
    """Return what encodes a text from its beginning."""
    begin = source.begin
    if begin is not None:
        return lambda text: begin(tokenizer.encode(text))
    named = [fields.get("bos_token_id") for fields in source.hugging_face.values()]
    first = [token for token in named if type(token) is int and token >= 0][:1]
    return lambda text: tokenizer.encode_with_special_tokens(text) or first


def _ends(source: _Source) -> frozenset[int]:
    """Return the tokens that end a document: the one of training, and the ones that a model came with."""
    ends: list[Any] = [source.end]
    for fields in source.hugging_face.values():
        named = fields.get("eos_token_id")
        ends += named if isinstance(named, list) else [named]
    return frozenset(end for end in ends if type(end) is int and end >= 0)


def _hidden(source: _Source, known: int) -> Tensor:
    """Return the tokens that are no text: all beyond the tokenizer's `known` ones, and the ones a model came with."""
    size = source.config.vocab_size
    hidden = torch.arange(size) >= known
    suppressed = source.hugging_face.get("generation_config", {}).get("suppress_tokens") or []
    hidden[[token for token in suppressed if 0 <= token < size]] = True
    return hidden


def _cache_of(part: Decoder, world: World) -> KeyValueCache | RankedCache:
    cache = KeyValueCache(part)
    return cache if world.size == 1 else RankedCache(cache, world)


def _say_once(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, file=sys.stderr)
