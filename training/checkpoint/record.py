"""Checkpoint record: record.json, which describes a checkpoint and verifies that it is intact."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import msgspec

from gristmill.config import INT64
from gristmill.errors import UsageError
from gristmill.io.token_shards import TokenizerRecord
from gristmill.storage.local import sha256_file
from training.checkpoint.checkpoint_group import CheckpointGroup
from training.checkpoint.run_file import OWN_CODE
from training.data.mix import Count, MixPlace
from training.model.model_config import ModelConfig
from training.own_code import describe_change

RECORD = "record.json"
VERSION = 2
_NOT_COMPARED = {"preset", "dropout", "init_std"}  # fields that do not change what the parameters compute
_OF_BALANCE = {"balance", "balance_loss", "balance_rate", "router_z_loss"}  # nor these, without biases to keep


class CheckpointRecord(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Contents of record.json.

    `step`: batches read. `batch_sizes`: their sizes in sequences, each with its first step, from 0; none in checkpoints
    of earlier releases, whose run.json has the one size. `updates`: optimizer steps taken; fewer than `step` where
    steps were skipped. `layout`: the parallel layout, for information only. `stability`: state of loss scaling and of
    the bad-step policy, finite numbers by name. `unigram_loss` in nats/token. `files`: SHA-256 of each file by name.
    `checksum`: SHA-256 of the other fields, see `checksum_of`; empty in checkpoints of earlier releases.
    `hugging_face`: what an imported model's config.json and generation_config.json say and training does not use, such
    as ids of tokens, for its export. `data`: how far the data sets were read; unknown in earlier releases. `skipped`:
    sequences that --data.skip left out before a step, from 0. `mask_documents`, `eod_mask_loss`: as in [data]; unknown
    in earlier releases, whose run.json has them, and of imported models. `start`: of the process that wrote it, when,
    where and with what it was started, see `describe_start`.
    """

    step: Count
    updates: Count
    processes: Count
    layout: dict[str, Any]
    stability: dict[str, float]
    unigram_loss: float
    model: dict[str, Any]
    tokenizer: TokenizerRecord
    files: dict[str, str] = {}
    hugging_face: dict[str, dict[str, Any]] = {}
    batch_sizes: list[tuple[Count, Annotated[int, msgspec.Meta(gt=0, le=INT64)]]] = []
    data: MixPlace = MixPlace()
    skipped: list[tuple[Count, Count]] = []
    mask_documents: bool | None = None
    eod_mask_loss: bool | None = None
    start: dict[str, Any] = {}
    version: int = VERSION
    checksum: str = ""


def encode_record(record: CheckpointRecord) -> bytes:
    """Return the contents of record.json, with their checksum."""
    fields = msgspec.to_builtins(record)
    return msgspec.json.format(msgspec.json.encode({**fields, "checksum": checksum_of(fields)}), indent=2) + b"\n"


def checksum_of(fields: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a record's fields but `checksum`, as JSON without spaces and with sorted keys."""
    others = {name: value for name, value in fields.items() if name != "checksum"}
    return hashlib.sha256(msgspec.json.encode(others, order="sorted")).hexdigest()


def verify_checkpoint(path: Path, group: CheckpointGroup) -> tuple[CheckpointRecord | None, str]:
    """Verify the SHA-256 of all files, a part on each rank; return the record, or None and the damage found."""
    record, fault = group.main_only(lambda: read_record(path))
    if record is None:
        return None, fault
    names = sorted(record.files)[group.world.rank :: group.world.size]
    everyone = group.gather(lambda: [name for name in names if not _matches(path / name, record.files[name])])
    faults = sorted(name for part in everyone for name in part)
    return (None, f"{faults[0]} is missing or damaged") if faults else (record, "")


def read_record(path: Path) -> tuple[CheckpointRecord | None, str]:
    """Return the record of the checkpoint `path`, or None and why it cannot be used."""
    try:
        fields = msgspec.json.decode((path / RECORD).read_bytes())
        if fields["version"] != VERSION:
            return None, f"{RECORD} has version {fields['version']!r}, and this release reads version {VERSION}"
        record = msgspec.convert(fields, CheckpointRecord)
        if record.checksum not in ("", checksum_of(fields)):
            return None, f"{RECORD} is damaged: its fields do not match its checksum"
    except FileNotFoundError:
        return None, f"{RECORD} is missing"
    except (OSError, ValueError, TypeError, LookupError, RecursionError, msgspec.MsgspecError) as error:
        return None, f"{RECORD} is damaged: {error}"
    if "hidden" in record.model:  # as the first checkpoints name it
        record.model["ffn_width"] = record.model.pop("hidden")
    return record, ""


def _matches(path: Path, digest: str) -> bool:
    try:
        return sha256_file(path) == digest
    except OSError:
        return False


def describe_changed_code(record: CheckpointRecord) -> str:
    """Say which files of the user's have changed since a checkpoint was written; nothing where none has."""
    return describe_change(record.start.get(OWN_CODE, {}))


def require_same_model(
    record: CheckpointRecord, model: ModelConfig, tokenizer: TokenizerRecord, option: str = "init_from"
) -> None:
    """Raise UsageError if the parameters of a checkpoint, given as `option`, would compute something else in `model`.

    Compares what does not change shapes, such as the rotary base, the norms' epsilon and the tokenizer. An imported
    checkpoint, and imported tokens, may not know their tokenizer (empty SHA-256): it is not compared then.
    """
    # the context length decides nothing but the shape of learned position embeddings
    free = _NOT_COMPARED if model.positions == "learned" else _NOT_COMPARED | {"context"}
    now = asdict(model)
    theirs = asdict(ModelConfig.from_record(record.model))
    free = free | _OF_BALANCE if theirs["balance"] != "bias" or model.balance == "bias" else free
    differing = [
        f"model.{key} {theirs[key]!r} there and {now[key]!r} here"
        for key in now
        if key not in free and theirs[key] != now[key]
    ]
    is_known = bool(record.tokenizer.sha256 and tokenizer.sha256)
    if is_known and record.tokenizer.sha256 != tokenizer.sha256:
        differing.append(f"tokenizer {record.tokenizer.sha256[:12]} there and {tokenizer.sha256[:12]} here")
    if differing:
        raise UsageError(
            f"{option} is a checkpoint of another model: {'; '.join(differing)}. Give its model's options, and "
            "tokens of its tokenizer"
        )
