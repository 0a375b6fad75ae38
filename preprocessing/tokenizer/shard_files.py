"""Shards of tokens from parts: the tokenizer's facts, joining parts into shards, and the manifest of a folder."""

import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from gristmill.counts import Counts
from gristmill.engine.run import StageRun
from gristmill.engine.task import Result, Stage, Task
from gristmill.errors import UsageError
from gristmill.io.files import is_unfinished, rejects_path
from gristmill.io.token_shards import (
    MANIFEST,
    SHARD_SUFFIXES,
    Manifest,
    ShardRecord,
    SourceRecord,
    TokenizerRecord,
    shard_files,
    token_dtype,
)
from gristmill.io.tokenizer_companions import CHAT_TEMPLATE, COMPANIONS, companions_of, copies_in, read_config
from gristmill.io.tokenizer_file import (
    Kind,
    find_tokenizer_file,
    require_all_tokens,
    require_tokenizers,
    special_id,
)
from gristmill.storage.files import remove_files
from gristmill.storage.local import atomic_write, atomic_write_bytes, concatenate, sha256_file
from gristmill.wording import count_of
from preprocessing.tokenizer.loading import JsonEncoder, load_encoder
from preprocessing.tokenizer.shard_joining import blend, join_parts, plan_token_shards, shard_name, shards_in

DATA_PATH = "data_path.txt"


class TokenizerFacts(msgspec.Struct):
    """Facts of a tokenizer that a stage needs; `fallback` is the reason that a slower library encodes, if any.

    `begin` and `end` are the ids that begin and end each document, or -1. Without byte pieces, a character that is in
    no piece of a SentencePiece model becomes the unknown id.
    """

    sha256: str
    vocab_size: int
    begin: int
    end: int
    kind: Kind
    fallback: str
    has_bytes: bool = True


class ShardReport(msgspec.Struct):
    """Counts of one part or shard, for the manifest; `differed` says where gigatoken and tokenizers did not agree."""

    shard: ShardRecord
    sources: dict[str, SourceRecord]
    lossy_documents: int = 0  # with U+2581, which SentencePiece decodes as a space, so that a text is not restored
    differed: str = ""


def find_usable_tokenizer(tokenizer: Path, folders: Sequence[Path]) -> Path:
    """Return the file of a tokenizer that can be copied to each of the folders. Raises UsageError if it cannot."""
    tokenizer = find_tokenizer_file(tokenizer)
    for folder in folders:
        copy = folder / tokenizer.name
        if copy.resolve() == tokenizer.resolve():
            raise UsageError(f"{tokenizer} lies in the output folder, and would be overwritten: give another --out_dir")
    if tokenizer.suffix in SHARD_SUFFIXES or tokenizer.name in (MANIFEST, DATA_PATH, *COMPANIONS):
        raise UsageError(
            f"{tokenizer} is named as an output of the folder that it is copied to: name it tokenizer.model, or "
            "tokenizer.json"
        )
    return tokenizer


def stage_of(stage: Stage, tokenizer: Path) -> Stage:
    """Return a stage that encodes, with the library that decides the ids of this tokenizer among its versions."""
    if tokenizer.suffix == ".model":
        return stage
    require_tokenizers(str(tokenizer))
    names = list(stage.libraries)
    if "sentencepiece" in names:
        names[names.index("sentencepiece")] = "tokenizers"
    return replace(stage, libraries=tuple(names))


def read_facts(run: StageRun, tokenizer: Path, bos: str, eos: str) -> TokenizerFacts:
    """Run the step that loads the tokenizer; print a note if it is slow to encode with, or may lose characters."""
    quiet = run.options.quiet
    companions = companions_of(tokenizer)
    arguments = {"tokenizer": tokenizer, "companions": companions, "bos": bos, "eos": eos}
    if tokenizer.suffix == ".model":
        from gristmill.kernels import note_compilation  # here, as they import numba
        from preprocessing.tokenizer.bpe import encode_texts

        note_compilation(encode_texts, seconds=5, quiet=quiet)
    read = run.step("tokenizer", [Task("tokenizer", read_tokenizer, arguments)])
    facts = read.values(TokenizerFacts)[0]
    if facts.fallback and not quiet:
        library = "SentencePiece" if facts.kind == "sentencepiece" else "tokenizers"
        print(f"note: {library} itself encodes the texts, which is slower: {facts.fallback}", file=sys.stderr)
    if not facts.has_bytes and not quiet:
        print(
            f"note: {tokenizer} has no byte pieces: characters that are in none of its pieces become its unknown id, "
            "and are lost. Models of train_tokenizer lose none",
            file=sys.stderr,
        )
    return facts


def read_tokenizer(tokenizer: Path, companions: list[Path], bos: str, eos: str) -> Result:
    """Task: load a tokenizer; the value is its TokenizerFacts. UsageError if it cannot be used."""
    model, encoder = load_encoder(tokenizer)
    require_all_tokens(model, tokenizer, companions)
    named = read_config(companions)
    begin = special_id(model, tokenizer, named, "bos", bos)
    end = special_id(model, tokenizer, named, "eos", eos)
    has_bytes = isinstance(encoder, JsonEncoder) or encoder.has_bytes
    sha256 = sha256_file(tokenizer)
    size = model.vocab_size
    return Result(Counts({}, []), TokenizerFacts(sha256, size, begin, end, model.kind, encoder.fallback, has_bytes))


def shard_tasks(
    parts: Sequence[tuple[Path, ...]],
    sizes: Sequence[int],
    reports: Sequence[Any],
    target: int,
    out_dir: Path,
    join: Callable[..., Result] | None = None,
    suffixes: Sequence[str] = SHARD_SUFFIXES,
) -> Iterator[Task]:
    """Yield a task for each shard: it joins parts of at most `target` bytes, and the files of their malformed records.

    Args:
        parts: The files of each part: a file for each of `suffixes`, and files of malformed records.
        sizes: Bytes of each part's .bin.
        reports: The report of each part.
        target: Most bytes of a shard's .bin, if it is of several parts.
        out_dir: Folder of the shards.
        join: The task that joins parts, called as write_shard is, which is the default.
        suffixes: Of a shard's files, the .bin first.
    """
    files = len(suffixes)
    for number, group in enumerate(plan_token_shards(sizes, target)):
        prefix = out_dir / shard_name(number)
        outputs = shard_files(prefix, suffixes)
        parts_of_shard = list[tuple[Path, ...]]()
        rejects = list[Path]()
        reports_of_shard = list[Any]()
        size = 0
        for part in group:
            parts_of_shard.append(parts[part][:files])
            rejects += parts[part][files:]
            reports_of_shard.append(reports[part])
            size += sizes[part]
        arguments = {
            "parts": parts_of_shard, "reports": reports_of_shard, "rejects": rejects, "tokens": outputs[0],
        }  # fmt: skip
        yield Task(prefix.name, join or write_shard, arguments, outputs, size)


def manifest_task(
    reports: Sequence[ShardReport],
    tokenizer: Path,
    facts: TokenizerFacts,
    out_dir: Path,
    name: str = "manifest",
    template: Path | None = None,
) -> Task:
    """Return the task that writes the manifest of a folder, and copies the tokenizer to it.

    A chat `template` is copied in place of the tokenizer's own.
    """
    manifest = out_dir / MANIFEST
    data_path = out_dir / DATA_PATH
    copies = copies_in(out_dir, tokenizer)
    if template is not None:
        own = tokenizer.parent / CHAT_TEMPLATE
        copies = {original: copy for original, copy in copies.items() if original != own}
        copies[template] = out_dir / CHAT_TEMPLATE
    arguments = {"reports": list(reports), "facts": facts, "copies": list(copies.items()),
                 "manifest": manifest, "data_path": data_path}  # fmt: skip
    return Task(name, write_manifest, arguments, (manifest, data_path, *copies.values()))


def note_engines_that_differed(reports: Sequence[str]) -> None:
    """Print a note if gigatoken and tokenizers did not agree: `reports` say where, or are empty."""
    differed = [report for report in reports if report]
    if differed:
        print(
            f"note: tokenizers encoded parts of {count_of(len(differed), 'shard')}, as gigatoken gave {differed[0]}; "
            "the ids are those of tokenizers",
            file=sys.stderr,
        )


def shard_prefix(tokens: Path) -> Path:
    """Return the path of a shard without the suffix .bin."""
    return tokens.with_name(tokens.name.removesuffix(".bin"))


def write_shard(parts: list[tuple[Path, ...]], reports: list[ShardReport], rejects: list[Path], tokens: Path) -> Result:
    """Task: join parts into the shard `tokens` (.bin), .idx, .sources; the value is its ShardReport."""
    prefixes = [shard_prefix(part[0]) for part in parts]
    joined = ShardReport(join_parts(prefixes, [report.shard for report in reports], shard_prefix(tokens)), {})
    for report in reports:
        merge_reports(joined, report)
    rejects_path(tokens).unlink(missing_ok=True)
    if rejects:
        concatenate(rejects, rejects_path(tokens))
    return Result(Counts({}, []), joined)


def merge_reports(total: ShardReport | Manifest, part: ShardReport) -> None:
    """Add the counts of a part to the counts of a shard, or of all shards."""
    total.lossy_documents += part.lossy_documents
    if isinstance(total, ShardReport):
        total.differed = total.differed or part.differed
    for source, more in part.sources.items():
        add_to(total.sources.setdefault(source, SourceRecord()), more.documents, more.tokens, more.bytes)


def write_manifest(
    reports: list[ShardReport], facts: TokenizerFacts, copies: list[tuple[Path, Path]], manifest: Path, data_path: Path
) -> None:
    """Task: write manifest.json and data_path.txt from the reports of all shards, in order; copy the tokenizer."""
    for original, copy in copies:
        with atomic_write(copy) as temporary:
            shutil.copyfile(original, temporary)
    record = TokenizerRecord(copies[0][1].name, facts.sha256, facts.vocab_size, facts.end, facts.begin)
    joined = Manifest(record, token_dtype(record.vocab_size).name, [report.shard for report in reports], {})
    for report in reports:
        merge_reports(joined, report)
    joined.sources = dict(sorted(joined.sources.items()))
    atomic_write_bytes(data_path, blend(joined).encode())
    joined.save(manifest.parent)


def add_to(record: ShardRecord | SourceRecord, documents: int, tokens: int, size: int) -> None:
    """Add documents to a record."""
    record.documents += documents
    record.tokens += tokens
    record.bytes += size


def remove_unrecorded_shards(run: StageRun, out_dir: Path, suffixes: Sequence[str] = SHARD_SUFFIXES) -> None:
    """Remove shards that a run which was killed wrote, and did not record; they are written again."""
    if is_unfinished(out_dir, run.name):
        recorded = set(map(Path, run.ledger.outputs()))
        remove_files(set(shards_in(out_dir, suffixes)) - recorded)
