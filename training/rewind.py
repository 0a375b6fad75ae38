"""Rewind: the sequences that a step of a training run read, and the documents in them, from the run's records.

The order of sequences is a function of the seed, the step and what the records of a run hold: sizes of batches and how
far data sets were read. The batches here are the trainer's, restored as the trainer restores them.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from gristmill.errors import InputError, UsageError
from gristmill.io.token_shards import MANIFEST, Manifest
from gristmill.storage.files import is_file
from gristmill.wording import message_of
from training.checkpoint.branch import BranchSource
from training.checkpoint.checkpoint import find_checkpoint
from training.checkpoint.data_state import DataState
from training.checkpoint.record import CheckpointRecord, read_record
from training.checkpoint.remote_run import local_records
from training.checkpoint.run_file import INTERVENTIONS, STARTS
from training.checkpoint.run_folder import RUN, read_run
from training.data.batch_schedule import BatchSplit
from training.data.batches import Batches
from training.data.data_config import PACKING_VERSION, DataConfig, OrderKind
from training.data.mix import TokenMix
from training.data.sequences import DataSet, TokenSequences
from training.data.target_groups import TargetGroups
from training.reporting.metrics_file import METRICS, read_metrics


class _Recorded(
    msgspec.Struct,
    rename={"train": "data.train", "seq_len": "data.seq_len", "batch_size": "data.batch_size", "order": "data.order"},
):
    """What a run.json must have for its steps to be known, and of which kinds."""

    train: str | list[str]
    seq_len: Annotated[int, msgspec.Meta(gt=0)]
    batch_size: Annotated[int, msgspec.Meta(gt=0)]
    order: OrderKind
    seed: int
    starts: list[dict[str, Any]] = []
    interventions: list[dict[str, Any]] = []
    began_from: dict[str, str] = {}


class DocumentPart(NamedTuple):
    """Consecutive tokens of a sequence that are of one document."""

    folder: Path
    """Folder of the token shards."""
    shard: str
    in_shard: int
    """Number of the document in its shard, from 0."""
    in_folder: int
    """Number of the document in the folder, from 0."""
    source: str
    """Empty if the shards do not say it."""
    first: int
    """Where in the sequence its first token is, from 0."""
    tokens: int
    before: int
    """Tokens of the document that come before."""
    length: int
    """Tokens of the whole document, end-of-document included."""


class ReadSequence(NamedTuple):
    """A sequence of a step; `rank` is None where the records do not say how many ranks there were."""

    number: int
    """Its number in the step, from 0."""
    rank: int | None
    """The data-parallel rank that read it."""
    in_set: int
    """Its number in its data set."""
    folder: Path
    """The folder of its data set."""
    parts: list[DocumentPart]
    """The documents in it, in order."""


@dataclass(frozen=True)
class StepSummary:
    """What one step read: predicted tokens by source, and the lengths in tokens of the documents in its sequences.

    `documents` are their numbers in each folder of token shards.
    """

    tokens: dict[str, int]
    lengths: NDArray[np.int64]
    documents: dict[Path, list[int]]


class Rewind:
    """The steps of a training run. Writes nothing, but for a packing plan of the run that is missing."""

    def __init__(self, run: Path, folders: Sequence[Path] = (), checkpoint: Path | None = None) -> None:
        """`run` is its --out_dir; `folders` hold its tokens now, where they are not where the run read them.

        `checkpoint`: read the run as it was then; by default, as it is now. Raises UsageError where the folder is of
        no training run or the tokens are not there, InputError where its records are damaged.
        """
        run = local_records(run)
        self.run = run
        self._given = folders
        self._is_asked_for = checkpoint is None
        self.stored = _read_options(run)
        self._checkpoint = find_checkpoint(run) if checkpoint is None else checkpoint
        self._record = self._read_checkpoint()
        self.data = self._data_config()
        self.batches = self._open_batches()
        self._groups = [TargetGroups(part) for part in self.batches.data.sets]

    @property
    def last_step(self) -> int:
        """Return the last step of the run, if it gets that far."""
        steps: int = self.stored["steps"]
        return steps

    @cached_property
    def losses(self) -> dict[int, float | None]:
        """Return the loss of each step that is recorded in the metrics; None of one that was not finite."""
        records = read_metrics(self.run / METRICS)
        return {record["step"]: record.get("loss") for record in records if record["kind"] == "step"}

    @property
    def steps_done(self) -> int:
        """Return the last step that the run is known to have taken."""
        saved = self._record.step if self._record else 0
        return max(saved, *self.losses, 0)

    def ranks(self, step: int) -> int | None:
        """Return how many data-parallel ranks read a step (from 1); None if that was not recorded."""
        starts = [start for start in self.stored.get(STARTS, []) if "dp" in start]
        before = [start for start in starts if start["steps_done"] < step]
        if before:
            dp: int = before[-1]["dp"]
            return dp
        if starts and self._branch_path is not None and find_checkpoint(self._branch_path).is_dir():
            return self._source.ranks(step)
        is_earlier = not starts and self._record is not None
        return self._record.layout.get("dp") if is_earlier and self._record else None

    def sequences(self, step: int) -> Iterator[ReadSequence]:
        """Yield the sequences that all ranks of the run read in a step (from 1), in the order of the data.

        Raises UsageError for a step that the run does not have.
        """
        owner = self.owner(step)
        ranks = self.ranks(step)
        runs = owner.stored.get("replicas.count", 1)
        first = owner.stored.get("replicas.number", 0)
        indices = owner.batches.global_indices(step - 1, 1, first, runs)
        for row, index in enumerate(indices.tolist()):
            rank = None if ranks is None else row % ranks
            yield owner._describe(row * runs + first, rank, index)

    def summarize(self, step: int) -> StepSummary:
        """Return what a step (from 1) read. Raises UsageError for one that the run does not have."""
        owner = self.owner(step)
        runs = owner.stored.get("replicas.count", 1)
        indices = owner.batches.global_indices(step - 1, 1, owner.stored.get("replicas.number", 0), runs)
        tokens: dict[str, int] = {}
        lengths = []
        documents = dict[Path, list[int]]()
        for number, _, rows in owner.batches.data.by_set(indices):
            groups = owner._groups[number]
            names = groups.sources or ["unknown source"]
            for name, count in zip(names, groups.counts(rows).tolist(), strict=True):
                label = f"{groups.data.folder}: {name}" if len(owner._groups) > 1 else name
                tokens[label] = tokens.get(label, 0) + count
            data = owner.batches.data.sets[number]
            for row in rows.tolist():
                for start, stop in data.token_spans(row):
                    spans = data.documents.between(start, stop)
                    is_read = spans.overlap(start, stop) > 0
                    lengths.append(spans.length[is_read])
                    documents.setdefault(data.folder, []).extend(spans.number[is_read].tolist())
        return StepSummary(tokens, np.concatenate(lengths), documents)

    def owner(self, step: int) -> "Rewind":
        """Return the run whose records say what a step (from 1) read: this one, or one that it is a branch of."""
        if not 1 <= step <= self.last_step:
            raise UsageError(f"step {step:,}: expected a step from 1 to {self.last_step:,}, the last one of {self.run}")
        return self if step > self.batches.first_step else self._source.owner(step)

    def _describe(self, number: int, rank: int | None, index: int) -> ReadSequence:
        ((of_set, _, rows),) = self.batches.data.by_set([index])
        data = self.batches.data.sets[of_set]
        row = int(rows[0])
        parts = list[DocumentPart]()
        filled = 0
        for start, stop in data.token_spans(row):
            parts += self._parts(data, self._groups[of_set], start, stop, filled)
            filled += stop - start
        return ReadSequence(number, rank, row, data.folder, parts)

    def _parts(self, data: DataSet, groups: TargetGroups, start: int, stop: int, filled: int) -> Iterator[DocumentPart]:
        """Yield the documents of the tokens start … stop of a data set, which begin at `filled` in a sequence."""
        spans = data.documents.between(start, stop)
        overlaps = spans.overlap(start, stop)
        for number in np.flatnonzero(overlaps > 0).tolist():
            in_folder = int(spans.number[number])
            shard = int(np.searchsorted(data.documents.documents, in_folder, side="right")) - 1
            begin = max(start, int(spans.start[number]))
            source = ""
            if groups.sources:
                source = groups.sources[int(groups.source_numbers(spans.number[number : number + 1])[0])]
            yield DocumentPart(
                folder=data.folder,
                shard=data.manifest.shards[shard].name,
                in_shard=in_folder - int(data.documents.documents[shard]),
                in_folder=in_folder,
                source=source,
                first=filled + begin - start,
                tokens=int(overlaps[number]),
                before=begin - int(spans.start[number]),
                length=int(spans.length[number]),
            )

    def _read_checkpoint(self) -> CheckpointRecord | None:
        """Return the record of the checkpoint that says what was read; None without one. Raises InputError."""
        if self._checkpoint == self.run:
            return None
        record, fault = read_record(self._checkpoint)
        if record is None:
            raise InputError(
                f"{self._checkpoint} does not say what the run has read ({fault}); restore it from a copy, or name "
                f"another one in {self._checkpoint.parent}/latest"
            )
        return record

    def _data_config(self) -> DataConfig:
        """Return the data options of the run, as its last start had them."""
        stored = self.stored
        options = {
            name: stored[f"data.{name}"]
            for name in ("seq_len", "batch_size", "order", "mask_documents", "eod_mask_loss", "packing")
            if f"data.{name}" in stored
        }
        ramp = tuple(stored.get("data.batch_ramp", ()))
        skipped = tuple(stored.get("data.skip_documents", ()))
        return DataConfig(tuple(self._find_tokens()), Path(), batch_ramp=ramp, skip_documents=skipped, **options)

    def _find_tokens(self) -> Iterator[Path]:
        """Yield the folders of the run's token shards, which are known by their checksums."""
        trained_on = self.stored["data.train"]
        fingerprints = [trained_on] if isinstance(trained_on, str) else trained_on
        starts = self.stored.get(STARTS) or [self._record.start if self._record else {}]
        recorded = [Path(folder) for folder in starts[-1].get("data", {}).get("train", [])]
        folder_of = {}
        for folder in [*recorded, *self._given]:
            if folder in self._given or is_file(folder / MANIFEST):
                fingerprint = Manifest.load(folder).fingerprint
                folder_of[fingerprint] = folder
                is_foreign = folder in self._given and fingerprint not in fingerprints
                # the run that a branch left may have read other tokens
                if is_foreign and self._branch_path is None and self._is_asked_for:
                    raise UsageError(
                        f"--tokens {folder}: expected the token shards that {self.run} was trained on, got others; try "
                        "another folder, or leave it out"
                    )
        for number, fingerprint in enumerate(fingerprints):
            if fingerprint not in folder_of:
                expected = recorded[number] if number < len(recorded) else f"shards of fingerprint {fingerprint}"
                looked_in = ", ".join(map(str, self._given or recorded))
                raise UsageError(
                    f"the tokens that {self.run} was trained on ({expected}) are not in {looked_in or 'any folder'}: "
                    "expected a folder with the same shards; try --tokens FOLDER, where they are now"
                )
            yield folder_of[fingerprint]

    def _open_batches(self) -> Batches:
        """Return the batches of all ranks together, which go on from the last checkpoint."""
        stored = self.stored
        data = self.data
        if "parallel.parts" in stored:
            raise UsageError(
                f"{self.run} was trained by a server and workers, whose steps have gradients of parts of several "
                "batches; expected a run of gristmill train"
            )
        version = stored.get("data.packing_version", PACKING_VERSION)
        if version != PACKING_VERSION:
            raise UsageError(
                f"{self.run} read rows of best-fit packing in its version {version}, and this release has version "
                f"{PACKING_VERSION}; try the release that began the run"
            )
        size = data.seq_len, data.ignores_firsts
        parts = [TokenSequences(folder, *size, skipped=data.skip_documents) for folder in data.train_folders]
        mix = TokenMix.of(parts, self._weights(parts))
        sequences, order = mix.sequences(stored["seed"], self.run if data.is_packed else None)
        batches = Batches(sequences, BatchSplit(1, 1, data.batch_size), 0, stored["seed"], data.order, order)
        self._state().restore(batches, data)
        return batches

    def _weights(self, parts: Sequence[TokenSequences]) -> Sequence[float]:
        """Return the weights of the mix as they were given; none: by tokens."""
        if len(parts) == 1:
            return ()
        starts = self.stored.get(STARTS, [{}])
        weights: Sequence[float] = starts[-1].get("weights", ())
        shares = [f"{share:.9g}" for share in TokenMix.of(parts, weights).shares]
        if shares == self.stored["data.weights"]:
            return weights
        return [float(share) for share in self.stored["data.weights"]]  # of an earlier release, which rounded them

    def _state(self) -> DataState:
        if self._record is not None:
            return DataState.of_checkpoint(self._record, self.stored, self.stored)
        if self._branch_path is None:
            return DataState()
        path = find_checkpoint(self._branch_path)
        record, fault = read_record(path)
        if record is None:
            raise InputError(f"{self.run} is a branch from {path}, which cannot be read ({fault}); restore it")
        source = BranchSource.of_record(path, record, _read_options(path.absolute().parents[1]))
        state = DataState.of_branch(source, self.stored)
        changes = self.stored.get(INTERVENTIONS, [])
        left_out = [
            (change["after_step"], change["skipped_sequences"])
            for change in changes
            if change["after_step"] == record.step and "skipped_sequences" in change
        ]
        return DataState(state.step, state.sizes, state.progress, state.is_anew, [*state.skipped, *left_out])

    @property
    def _branch_path(self) -> Path | None:
        """Return the checkpoint that this run is a branch from, as it was given; None if it is none."""
        path = self.stored.get("began_from", {}).get("branch_from")
        return Path(path) if path else None

    @cached_property
    def _source(self) -> "Rewind":
        """Return the run that this one is a branch of, as it was when the branch began."""
        assert self._branch_path is not None, "a run that is no branch knows all its steps"
        checkpoint = find_checkpoint(self._branch_path)
        if not checkpoint.is_dir():
            raise UsageError(
                f"{self.run} is a branch from {self._branch_path}, whose run read the steps until "
                f"{self.batches.first_step:,}, and that is no longer there; expected it where it was"
            )
        return Rewind(checkpoint.absolute().parents[1], self._given, checkpoint)


def _read_options(run: Path) -> dict[str, Any]:
    """Return a training run's run.json. Raises UsageError where there is none, InputError where it is damaged."""
    try:
        content = json.loads((run / RUN).read_bytes())
    except OSError as error:
        raise UsageError(f"{run}: expected the --out_dir of a training run, got no {RUN} in it") from error
    except (ValueError, RecursionError):
        content = {}  # `read_run` says what is wrong
    if isinstance(content, dict) and "corpus" in content:
        raise UsageError(
            f"{run}: expected the --out_dir of a training run, got the --out of a gristmill run, which makes tokens"
        )
    stored = read_run(run / RUN)
    assert stored is not None, f"{run / RUN} was read a moment ago"
    try:
        msgspec.convert(stored, _Recorded)
    except msgspec.ValidationError as error:
        raise InputError(f"{run / RUN} is damaged: {message_of(error)}; restore it from a copy") from error
    return stored
