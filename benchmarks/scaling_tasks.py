"""An executor that runs no task: it counts the requests of each, and makes its outputs and its record up."""

import pickle
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.scaling_store import CountingStore
from dedup.candidates.exact_copies import digest_slices
from dedup.candidates.input_shards import ShardSummary, summarize_shards
from dedup.candidates.pair_files import parse_pairs
from dedup.candidates.signature_shards import SUFFIX, ShardHeader
from dedup.from_facts.exact_copies import digest_facts
from dedup.from_facts.signatures import write_signed
from dedup.generate_connected_components import write_components
from dedup.minhash.signatures import Sketch
from dedup.removal.clusters import MemberPlan, sort_members
from dedup.to_hash import split_skipped
from gristmill.counts import READ, WRITTEN, Counts
from gristmill.engine.execution.call import Call
from gristmill.engine.execution.staging import remote_ranges as ranges_read_by
from gristmill.engine.execution.task_run import TaskRun
from gristmill.engine.facts import load_index
from gristmill.engine.staleness.records import DoneRecord, OutputRecord
from gristmill.engine.task import Task
from gristmill.io.facts import SUFFIX as FACTS_SUFFIX
from gristmill.io.facts import FactsFile, WrittenSlice
from gristmill.io.token_shards import ShardRecord, SourceRecord
from preprocessing.document_pass import GroupNotes, SliceNote, process_slices
from preprocessing.encode import MAX_PART_BYTES
from preprocessing.mixing.band_epochs import write_epoch_numbers
from preprocessing.mixing.decisions import decide_groups, sort_digests, write_holdout_numbers
from preprocessing.mixing.drops import split_drops
from preprocessing.mixing.mix import mix_group, write_manifest, write_weight_numbers
from preprocessing.mixing.mix_manifest import write_mix_manifest
from preprocessing.mixing.sampling import choose_bin, find_kth
from preprocessing.mixing.split import split_part
from preprocessing.mixing.token_rows import EncodedGroup, encode_group, write_token_shard
from preprocessing.steps.text_digest import DIGEST
from preprocessing.tokenize_corpus import encode_slices
from preprocessing.tokenizer.shard_files import ShardReport, TokenizerFacts, read_tokenizer, write_shard

SLICE_BYTES, DOCUMENTS = 60_000_000, 10_000  # of each slice
SIGNATURE_BYTES = 520  # of a document
_HELD_OUT = 17  # documents of a slice
_TOKEN_BYTES = SLICE_BYTES // 2
_CLUSTERED = 100  # documents of a file that are in clusters
_SOME_BYTES = 1 << 20  # of an output whose size decides nothing
_BLOCK = 256  # calls timed together
_SHA256 = "0123456789abcdef" * 4


def _shard_report(arguments: dict[str, Any]) -> ShardReport:
    records = len(arguments.get("group", arguments.get("reports", ())))
    shard = ShardRecord(arguments["tokens"].stem, DOCUMENTS * records, SLICE_BYTES // 4, SLICE_BYTES, _SHA256, _SHA256)
    return ShardReport(shard, {"s0": SourceRecord(DOCUMENTS * records, 1, 1)})


def _part_reports(arguments: dict[str, Any]) -> list[ShardReport]:
    return [_shard_report({"tokens": arguments[name], "group": (None,)}) for name in ("train", "holdout")]


def _written(file: str) -> WrittenSlice:
    return WrittenSlice(file, 0, DOCUMENTS, DOCUMENTS)


def _notes(arguments: dict[str, Any]) -> GroupNotes:
    slices = [SliceNote(DOCUMENTS, _written(name)) for name in arguments["names"]]
    return GroupNotes(slices, dict.fromkeys(arguments["sums"], 0))


def _summaries(arguments: dict[str, Any]) -> list[ShardSummary]:
    files = (str(path).partition("/minhash/")[2].removesuffix(f"+0{SUFFIX}") for path in arguments["shards"].paths)
    return [ShardSummary(ShardHeader.of(file, Sketch()), DOCUMENTS, 0, DOCUMENTS) for file in files]


@dataclass
class TaskModel:
    """What tasks return to a planner, for a corpus whose files have these names."""

    names: Sequence[str]

    def value(self, task: Task) -> Any:
        """The value of a task's record."""
        made: dict[Callable[..., Any], Callable[[dict[str, Any]], Any]] = {
            digest_slices: lambda arguments: [0] * len(arguments["group"]),
            split_skipped: lambda arguments: _CLUSTERED * len(arguments["groups"]),
            write_components: lambda _: [],
            parse_pairs: lambda _: dict.fromkeys(self.names, DOCUMENTS),
            summarize_shards: _summaries,
            sort_members: lambda _: self._members(),
            split_drops: lambda _: (0, 0, False),
            write_weight_numbers: lambda given: tuple(n * len(given["group"]) for n in (DOCUMENTS, SLICE_BYTES)),
            mix_group: lambda arguments: sum(part.size for part in arguments["group"]),
            choose_bin: lambda _: (0, 0),
            find_kth: lambda _: 1,
            read_tokenizer: lambda _: TokenizerFacts("", 32_000, -1, 2, "sentencepiece", ""),
            encode_slices: _shard_report,
            write_shard: _shard_report,
            process_slices: _notes,
            load_index: lambda _: self._facts_files(),
            write_epoch_numbers: lambda _: (DOCUMENTS, SLICE_BYTES),
            write_holdout_numbers: lambda _: DOCUMENTS,
            decide_groups: lambda given: [(SLICE_BYTES, SLICE_BYTES // 600)] * len(given["groups"]),
            encode_group: lambda _: EncodedGroup(_TOKEN_BYTES),
            write_token_shard: _part_reports,
        }
        make = made.get(task.function)
        return make(task.arguments) if make else None

    def content(self, task: Task, path: Path) -> int | bytes:
        """The content of an output, or its size."""
        if task.function in (write_manifest, write_mix_manifest):
            return msgspec.json.encode(task.arguments["manifest"])
        if task.function is sort_digests:
            return len(task.arguments["files"].paths) * _HELD_OUT * DIGEST.itemsize
        if task.function is digest_facts:
            return 24 * DOCUMENTS * len(task.arguments["facts"].paths)
        if task.function is digest_slices:
            return 24 * DOCUMENTS * len(task.arguments["group"])
        if task.function is write_token_shard:
            return len(task.arguments["shares"]) * MAX_PART_BYTES if path == task.arguments["train"] else _SOME_BYTES
        if task.function is process_slices and path in task.arguments["outputs"]:
            return SLICE_BYTES
        sizes = {encode_slices: _TOKEN_BYTES, write_signed: SIGNATURE_BYTES * DOCUMENTS, split_part: SLICE_BYTES}
        return sizes.get(task.function, _SOME_BYTES)

    def _facts_files(self) -> list[FactsFile]:
        return [FactsFile(f"{name}+0{FACTS_SUFFIX}", DOCUMENTS, [_written(name)]) for name in self.names]

    def _members(self) -> MemberPlan:
        starts = list(range(0, _CLUSTERED * len(self.names) + 1, _CLUSTERED))
        parts = list(range(0, starts[-1] // 2, max(4096, starts[-1] // 2 // 128)))
        return MemberPlan(sorted(self.names), starts, parts)


def counts_of(task: Task) -> Counts:
    """The counts of a task that keeps every document."""
    counts = Counts({}, [])
    group = task.arguments.get("group", ())
    sources = [getattr(part, "part", part).source for part in group] if isinstance(group, tuple | list) else []
    if task.function is decide_groups:
        sources = [one.source for one in task.arguments["groups"]]
    for source in sources:
        for reason in (READ, WRITTEN):
            counts.add(source, reason, SLICE_BYTES, DOCUMENTS)
    return counts


@dataclass
class ModelExecutor:
    """Takes the place of an executor; the driver's calls and the records go through pickle as they do to workers.

    Attributes:
        retried: Tasks that were tried again: none.
        tasks, requests: Number of tasks, and of the requests that they would send: see staging.py and run_task.

        pickled: Bytes of the calls.
        seconds: Processor time that this class took, which is not the driver's.
    """

    store: CountingStore
    model: TaskModel
    retried: int = 0
    tasks: int = 0
    requests: int = 0
    pickled: int = 0
    seconds: float = 0.0

    def run(self, calls: Sequence[Call]) -> Iterator[tuple[int, Any]]:
        """Yield (index, record) of each call."""
        for first in range(0, len(calls), _BLOCK):
            block = calls[first : first + _BLOCK]
            self.pickled += sum(len(pickle.dumps(call)) for call in block)
            started = time.process_time()  # once a block, as it is slow on some systems
            found = [pickle.dumps(self._finish(call.task_run, **call.arguments)) for call in block]
            self.seconds += time.process_time() - started
            yield from ((first + i, pickle.loads(record)) for i, record in enumerate(found))

    def _finish(self, this: TaskRun, identity: dict[str, str], ledger: Any) -> DoneRecord:
        task = this.task
        self.tasks += 1
        self.requests += sum(1 for _ in ranges_read_by(task.arguments, set(task.outputs))) + len(task.outputs) + 1
        outputs = list[OutputRecord]()
        for path in task.outputs:
            content = self.model.content(task, path)
            size = content if isinstance(content, int) else len(content)
            outputs.append(OutputRecord(ledger.relative(path), size, 0, _SHA256, self.store.add(path, content)))
        value = msgspec.to_builtins(self.model.value(task))
        record = DoneRecord(this.step, task.name, identity, outputs, counts_of(task), value)
        before = self.store.requests.copy()
        ledger.write(record)  # counted above, as the task's
        self.store.requests = before
        return record
