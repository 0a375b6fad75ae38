"""Command: chats in token shards as text, with what is a target of training marked."""

import random
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Group, RenderableType
from rich.text import Text
from tyro.conf import Positional

from gristmill.errors import UsageError, require
from gristmill.io.token_masks import TokenMasks, runs_of
from gristmill.io.token_shards import open_shards
from gristmill.io.tokenizer_file import AnyTokenizer, JsonTokenizer, open_tokenizer
from gristmill.storage.files import reject_remote
from gristmill.wording import count_of

_TOKENS = 2000  # of a chat that are shown


def preview_chats(tokens: Positional[Path], chats: int = 3, seed: int = 1) -> Group:
    """Show chats of a folder of token shards: what the model is trained to say is between ⟦ and ⟧, and green.

    Args:
        tokens: Folder that gristmill tokenize-chats wrote.
        chats: Number of chats, drawn at random.
        seed: Another seed draws other chats.
    """
    require(chats > 0, f"--chats {chats}: expected 1 or more")
    reject_remote(tokens)
    manifest, shards = open_shards(tokens)
    masks = TokenMasks.load(tokens, manifest)
    if masks is None:
        raise UsageError(f"{tokens} has no masks: every token is a target; make chats with gristmill tokenize-chats")
    model = open_tokenizer(tokens / manifest.tokenizer.path)
    chosen = sorted(random.Random(seed).sample(range(manifest.documents), min(chats, manifest.documents)))
    shown: list[RenderableType] = []
    first = 0
    begin = 0
    for record, shard in zip(manifest.shards, shards, strict=True):
        in_shard = [number - first for number in chosen if first <= number < first + len(shard)]
        for number in in_shard:
            start = begin + int(shard.offsets[number]) // shard.tokens.dtype.itemsize
            ids = shard[number].tolist()
            mask = masks.between(start, start + len(ids))
            share = f"{mask.sum():,} of {count_of(len(ids), 'token')} are targets"
            shown.append(Text(f"{record.name}@{number}: {share}", "bold"))
            shown.append(_mark_targets(model, ids[:_TOKENS], mask[:_TOKENS]))
        first += len(shard)
        begin += record.tokens
    return Group(*shown)


def _mark_targets(model: AnyTokenizer, ids: list[int], mask: NDArray[np.bool_]) -> Text:
    """Return the text of ids, with the targets of a mask between ⟦ and ⟧."""
    text = Text()
    shown = 0
    for start, stop in runs_of(mask, 0):
        text.append(_decode(model, ids[shown:start]), "dim")
        text.append(f"⟦{_decode(model, ids[start:stop])}⟧", "green")
        shown = stop
    text.append(_decode(model, ids[shown:]), "dim")
    return text


def _decode(model: AnyTokenizer, ids: list[int]) -> str:
    """Return the text of ids, special tokens included."""
    if isinstance(model, JsonTokenizer):
        text: str = model.model.decode(ids, skip_special_tokens=False)
        return text
    processor = model.model
    parts = list[str]()
    for is_control, run in groupby(ids, processor.is_control):
        pieces = list(run)
        if is_control:
            parts += map(processor.id_to_piece, pieces)
        else:
            parts.append(model.decode(pieces))
    return "".join(parts)
