"""Stage: encode chats into token shards, with masks of what the assistant says, by a model's own template."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import msgspec
import numpy as np
from tyro.conf import Positional

from gristmill.batches import numbered
from gristmill.command import command
from gristmill.counts import MALFORMED, READ, TEXT_ADVICE, WRITTEN, Counts, check_max_failed
from gristmill.engine.execution.worker_deaths import note_no_place
from gristmill.engine.options import RunOptions, parse_size
from gristmill.engine.run import StageRun, open_stage
from gristmill.engine.slices import SliceGroup, cut_raw_corpus, leaves_out_damaged, note_reading, read_slices
from gristmill.engine.staleness.outputs import reject_unknown_files
from gristmill.engine.task import Result, Stage, Task
from gristmill.errors import InputError, TooManyMalformed, UsageError
from gristmill.io.corpus import list_corpus
from gristmill.io.documents import CorpusFile, Document, Reading, paths_of, stem
from gristmill.io.token_masks import MASK, MASKS, MaskRecord, write_mask, write_masks
from gristmill.io.token_shards import (
    SHARD_SUFFIXES,
    ShardRecord,
    SourceRecord,
    TokenShardWriter,
    shard_files,
    token_dtype,
    with_suffix,
    write_sources,
)
from gristmill.io.writers import Rejects
from gristmill.storage.files import file_info, is_folder
from gristmill.storage.local import concatenate, sha256_file
from gristmill.text import utf8_size
from gristmill.wording import count_of
from preprocessing.document_pass import list_failed
from preprocessing.tokenizer.chat_encoding import encode_chat
from preprocessing.tokenizer.chat_template import ChatError, ChatTemplate, TemplateSource
from preprocessing.tokenizer.loading import load_encoder
from preprocessing.tokenizer.safe_encoder import FailedDocument, SafeEncoder, read_with_slices
from preprocessing.tokenizer.shard_files import (
    ShardReport,
    add_to,
    find_usable_tokenizer,
    manifest_task,
    read_facts,
    remove_unrecorded_shards,
    shard_prefix,
    shard_tasks,
    stage_of,
    write_shard,
)

STAGE = Stage("tokenize_chats", version=3, libraries=("sentencepiece", "Jinja2", "pyarrow"))
_SUFFIXES = (*SHARD_SUFFIXES, MASK)


@dataclass(frozen=True)
class ChatRule:
    """How chats are encoded: the template, the field with the messages, the id that ends each chat, or -1."""

    template: TemplateSource
    column: str
    end: int


class ChatReport(msgspec.Struct):
    """Counts of one part or shard; `rewritten` counts messages of the assistant that are no targets."""

    shard: ShardReport
    mask: MaskRecord
    rewritten: int


class EncodedChats(ChatReport):
    """Result of a task: what it encoded, and the chats on which the tokenizer failed."""

    failed: list[FailedDocument] = msgspec.field(default_factory=list)

    @property
    def report(self) -> ChatReport:
        """Return the report alone."""
        return ChatReport(self.shard, self.mask, self.rewritten)


def tokenize_chats(
    chats: Positional[Path],
    out_dir: Positional[Path],
    tokenizer: Path,
    options: RunOptions = RunOptions(),
    *,
    template: Path | None = None,
    messages: str = "messages",
    eos: str = "model",
    shard_size: str = "512MiB",
    max_failed: float = 0.0,
) -> Counts:
    """Encode chats into token shards whose masks say what the assistant says: the targets of fine-tuning.

    A record has a list of messages, {"role": "user", "content": "…"}, and may have `tools`. The text is that of the
    model's own chat template, or of --template; the assistant's messages are the targets, up to the token that ends
    each. Each chat is a document, which ends with the end-of-document token, if the template has not written it. A
    record that is no chat, that the template refuses, or in which the assistant says nothing counts as malformed.

    A chat on which the tokenizer fails is left out within `max_failed`, and listed in OUT_DIR.removed.parquet.

    gristmill tokenize-chats chats.jsonl OUT/chats --tokenizer hf_folder

    gristmill train --data.train OUT/chats --data.packing best-fit --data.mask_documents true --init_from …

    Args:
        chats: A .jsonl or .parquet file, or a folder of them.
        out_dir: The folder of token shards to write, for --data.train.
        tokenizer: A tokenizer.json or SentencePiece model, the folder of a model or run that has one, or a repository
            ORG/NAME of the Hub.
        options: Workers, memory, and when to stop; they change no output.
        template: Jinja file with another chat template than the tokenizer's, which is copied to the output.
        messages: Field with the list of messages.
        eos: Token that ends each document: none, model, or a token of the vocabulary.
        shard_size: Maximum size of a shard's .bin, if it is of several slices of the input.
        max_failed: Fraction of the chats on which the tokenizer may fail, such as 0.001. If it is more than 0, a chat
            on which a worker process dies counts as one, and with 0 that ends the stage.

    Returns:
        Chats read and written, and chats left out by reason, per source.
    """
    check_max_failed(max_failed)
    target = parse_size(shard_size, "--shard_size")
    path = find_usable_tokenizer(tokenizer, [out_dir])
    source = TemplateSource.find(path, template)
    ChatTemplate.of(source)
    files = list_chats(chats, messages)
    reads: dict[Path, list[Path]] | list[Path] = [chats]
    if is_folder(chats):
        reads = {chats: paths_of(files)}
    with open_stage(stage_of(STAGE, path), out_dir, options, reads=reads, publishes=[out_dir]) as run:
        remove_unrecorded_shards(run, out_dir, _SUFFIXES)
        reject_unknown_files(out_dir, (), _SUFFIXES, run.ledger)
        facts = read_facts(run, path, "none", eos)
        rule = ChatRule(source, messages, facts.end)
        encoded = read_slices(
            run, "encode", cut_raw_corpus(run, files),
            lambda groups: _part_tasks(run, groups, path, rule, sets_aside=max_failed > 0),
        )  # fmt: skip
        chats_of_parts = encoded.values(EncodedChats)
        failed = list[FailedDocument]()
        for part in chats_of_parts:
            failed += part.failed
        encoded.counts.check_failed(STAGE.name, max_failed, list_failed(run, failed, out_dir), "the tokenizer")
        parts = encoded.paths_of_tasks()
        sizes = encoded.sizes()
        reports = [part.report for part in chats_of_parts]
        to_join = shard_tasks(parts, sizes, reports, target, out_dir, write_chat_shard, _SUFFIXES)
        joined = run.step("join", to_join)
        reports = joined.values(ChatReport)
        shards = list[ShardReport]()
        masks = dict[str, MaskRecord]()
        for report in reports:
            shards.append(report.shard)
            masks[report.shard.shard.name] = report.mask
        run.step("manifest", [manifest_task(shards, path, facts, out_dir, template=template)])
        written = out_dir / MASKS
        run.step("masks", [Task("masks", write_mask_records, {"records": masks, "masks": written}, (written,))])
        if not encoded.counts.total(READ).documents:
            raise InputError(f"{chats} has no chats; expected records with a list of {messages}")
        try:
            counts = run.finish(encoded.counts)
        except TooManyMalformed as error:
            own_advice = str(error).replace(TEXT_ADVICE, "Give --messages NAME if the messages are")
            raise TooManyMalformed(own_advice) from error
    if not options.quiet:
        _print_notes(reports)
    return counts


def list_chats(chats: Path, column: str = "messages") -> list[CorpusFile]:
    """Return the files of chats, each with the roles of its messages as its text. UsageError if there is none."""
    if is_folder(chats):
        files = list_corpus(chats)
    else:
        info = file_info(chats)
        if info is None:
            raise UsageError(f"{chats}: expected a file or a folder of chats, but there is none")
        files = [CorpusFile(chats, f"{stem(chats.name)}/{chats.name}", info.size)]  # its source is named after it
    reading = Reading(message="{role}\n")
    return [CorpusFile(file.path, file.name, file.size, column, reading) for file in files]


def _part_tasks(
    run: StageRun, groups: Sequence[SliceGroup], tokenizer: Path, rule: ChatRule, sets_aside: bool
) -> Iterator[Task]:
    """Yield a task for each group of slices; its outputs are a part: a temporary shard with its mask."""
    for group in groups:
        prefix = run.work / "parts" / group[0].label
        outputs = shard_files(prefix, _SUFFIXES)
        arguments = {"tokenizer": tokenizer, "rule": rule, "tokens": outputs[0]}
        yield Task.on_slices(group, encode_slices, arguments, outputs, sets_aside=sets_aside)


@cache
def _compiled(source: TemplateSource) -> ChatTemplate:
    return ChatTemplate.of(source)


@leaves_out_damaged
def encode_slices(group: SliceGroup, tokenizer: Path, rule: ChatRule, tokens: Path) -> Result:
    """Task: write the chats of slices as a part: `tokens` (.bin), .idx, .sources, .mask; the value: EncodedChats."""
    model, encoder = load_encoder(tokenizer)
    template = _compiled(rule.template)
    counts = Counts({}, [])
    safe = SafeEncoder(encoder, -1, rule.end, counts)
    prefix = shard_prefix(tokens)
    report = ShardReport(ShardRecord(prefix.name, 0, 0, 0, ""), {})
    rewritten = 0
    mask = bytearray()
    sources: list[str] = []
    rejects = Rejects(tokens)
    with TokenShardWriter(prefix, token_dtype(model.vocab_size)) as shard:
        for read in read_with_slices(group, counts, rejects):
            document = read.document
            roles = utf8_size(document.text)
            try:
                chat = template.apply(document.value(rule.column), document.value("tools"))
                size = utf8_size(chat.text)
                encoded = safe.encode_alone(read, partial(encode_chat, model, chat.text, chat.spans, rule.end))
                note_reading(read.part)
                if isinstance(encoded, str):
                    counts.add(document.source, READ, size - roles, documents=0)
                    counts.add(document.source, encoded, size)
                    continue
                ids, is_target = encoded
                if not any(is_target):
                    raise ChatError("the assistant has no token")
            except ChatError as error:
                _leave_out(document, str(error), roles, counts, rejects)
                continue
            counts.add(document.source, READ, size - roles, documents=0)  # in place of the roles alone
            counts.add(document.source, WRITTEN, size)
            shard.add(ids)
            mask += bytes(is_target)
            sources.append(document.source)
            rewritten += chat.rewritten
            for record in (report.shard, report.sources.setdefault(document.source, SourceRecord())):
                add_to(record, 1, len(ids), size)
    report.shard.sha256 = shard.sha256
    report.shard.idx_sha256 = shard.idx_sha256
    report.shard.sources = list(dict.fromkeys(sources))
    number_of = numbered(report.shard.sources)
    numbers = np.array([number_of[source] for source in sources], np.uint32)
    report.shard.sources_sha256 = write_sources(prefix, numbers, report.shard.sources)
    written = write_mask(prefix, np.frombuffer(mask, np.bool_))
    note_no_place()
    return Result(counts, EncodedChats(report, written, rewritten, safe.failed))


def _leave_out(document: Document, reason: str, size: int, counts: Counts, rejects: Rejects) -> None:
    """Count a record that is no chat to learn from as malformed."""
    key = document.key
    counts.add(document.source, f"{MALFORMED}: {reason}", size)
    counts.add_example(f"{key.file} line {key.row + 1}: {reason}")
    rejects.add(key.file, key.row + 1, reason, document.fields)


def write_chat_shard(
    parts: list[tuple[Path, ...]], reports: list[ChatReport], rejects: list[Path], tokens: Path
) -> Result:
    """Task: join parts into the shard `tokens` (.bin), .idx, .sources, .mask; the value is its ChatReport."""
    joined = write_shard(parts, [report.shard for report in reports], rejects, tokens)
    mask = with_suffix(shard_prefix(tokens), MASK)
    concatenate((part[len(SHARD_SUFFIXES)] for part in parts), mask)
    record = MaskRecord(sha256_file(mask), sum(report.mask.targets for report in reports))
    return Result(joined.counts, ChatReport(joined.value, record, sum(report.rewritten for report in reports)))


def write_mask_records(records: dict[str, MaskRecord], masks: Path) -> None:
    """Task: write masks.json."""
    write_masks(masks.parent, records)


def _print_notes(reports: Sequence[ChatReport]) -> None:
    """Print how many tokens are targets, and how many messages of the assistant are none."""
    tokens = sum(report.shard.shard.tokens for report in reports)
    targets = sum(report.mask.targets for report in reports)
    rewritten = sum(report.rewritten for report in reports)
    if tokens:
        print(
            f"note: of {count_of(tokens, 'token')} {targets:,} ({targets / tokens:.1%}) are the assistant's",
            file=sys.stderr,
        )
    if rewritten:
        print(
            f"note: {count_of(rewritten, 'message')} of the assistant are no targets, as the template writes them "
            "otherwise once others follow",
            file=sys.stderr,
        )


if __name__ == "__main__":
    command(tokenize_chats)
