"""What a checkpoint says of itself, `record.json`; whether it is whole, and of the model that is wanted."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from gristmill.errors import UsageError
from gristmill.io.files import sha256_file
from gristmill.io.token_shards import TokenizerRecord
from training.checkpoint.checkpoint_group import CheckpointGroup
from training.checkpoint.shard_storage import METADATA
from training.model.model_config import ModelConfig

RECORD = "record.json"
VERSION = 2
_FREE = {"preset", "dropout", "init_std"}  # fields in which a run may differ from the one it begins from


class CheckpointRecord(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What a checkpoint says of itself.

    `step`: how many batches were read. `updates`: how many of them changed the parameters; fewer where
    steps were skipped. `layout`: how the run was spread, for a reader; loading does not depend on it.
    `stability`: the state of loss scaling and of the policy for bad steps, finite numbers by name.
    """

    step: int
    updates: int
    processes: int
    layout: dict[str, Any]
    stability: dict[str, float]
    unigram_loss: float
    model: dict[str, Any]
    tokenizer: TokenizerRecord
    files: dict[str, str] = {}
    version: int = VERSION


def check(path: Path, group: CheckpointGroup) -> tuple[CheckpointRecord | None, str]:
    """The record of a checkpoint whose files are what it says, or None and why; each process reads a part of them."""
    record, fault = group.main_only(lambda: _read_record(path))
    if record is None:
        return None, fault
    names = sorted(record.files)[group.world.rank :: group.world.size]
    everyone = group.gather(lambda: [name for name in names if not _matches(path / name, record.files[name])])
    faults = sorted(name for part in everyone for name in part)
    return (None, f"{faults[0]} is missing or damaged") if faults else (record, "")


def _read_record(path: Path) -> tuple[CheckpointRecord | None, str]:
    try:
        found = msgspec.json.decode((path / RECORD).read_bytes())
        if isinstance(found, dict) and found.get("version") != VERSION:
            return None, f"it is of version {found.get('version')}, and this is version {VERSION}"
        record = msgspec.convert(found, CheckpointRecord)
        record.model = {ModelConfig.RENAMED.get(key, key): value for key, value in record.model.items()}
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        return None, f"{RECORD}: {error}"
    return (record, "") if METADATA in record.files else (None, f"{RECORD} names no {METADATA}")


def _matches(path: Path, digest: str) -> bool:
    try:
        return sha256_file(path) == digest
    except OSError:
        return False


def require_same_model(record: CheckpointRecord, model: ModelConfig, tokenizer: TokenizerRecord) -> None:
    """Raise UsageError unless a checkpoint's parameters mean in `model`, resolved, what they meant where they are from.

    Their shapes do not show it: the base of rotary positions, the norms' epsilon, and which text a token is.
    A tokenizer is compared where the checkpoint knows its own.
    """
    # how far positions reach is in the parameters where they are learned, and nowhere else
    free = _FREE if model.positions == "learned" else _FREE | {"context"}
    now, theirs = asdict(model), record.model
    differing = [
        f"model.{key} {theirs[key]!r} there and {now[key]!r} here"
        for key in now
        if key in theirs and key not in free and theirs[key] != now[key]
    ]
    if record.tokenizer.sha256 not in ("", tokenizer.sha256):
        differing.append(f"tokenizer {record.tokenizer.sha256[:12]} there and {tokenizer.sha256[:12]} here")
    if differing:
        raise UsageError(
            f"the checkpoint to begin from is of another model: {'; '.join(differing)}. Give its model's options, and "
            "tokens of its tokenizer"
        )
