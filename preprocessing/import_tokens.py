"""Stage: import tokens that other programs wrote as token shards to train on, without a copy where that can be."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import msgspec
import numpy as np

from gristmill.command import command
from gristmill.counts import Counts
from gristmill.engine.options import RunOptions, parse_size
from gristmill.engine.run import open_stage
from gristmill.engine.staleness.outputs import reject_unknown_files
from gristmill.engine.staleness.records import StepResult
from gristmill.engine.task import Result, Stage, Task
from gristmill.errors import UsageError, require
from gristmill.io.token_shards import (
    MANIFEST,
    SHARD_SUFFIXES,
    Manifest,
    SourceRecord,
    TokenizerRecord,
    holds_ids,
    shard_files,
    token_dtype,
)
from gristmill.io.tokenizer_file import companions_of, open_tokenizer, read_config, special_id
from gristmill.storage.files import reject_remote
from gristmill.storage.local import atomic_write, atomic_write_bytes, sha256_file
from gristmill.wording import count_of
from preprocessing.token_formats.discovery import find_token_files
from preprocessing.token_formats.raw_tokens import DTYPES
from preprocessing.token_formats.shard_import import ImportReport, ImportRule, import_files
from preprocessing.token_formats.token_file import TokenFile
from preprocessing.tokenizer.shard_files import DATA_PATH, add_to, find_usable_tokenizer, remove_unrecorded_shards
from preprocessing.tokenizer.shard_joining import blend, plan_token_shards, shard_name

STAGE = Stage("import_tokens", version=1, libraries=("pyarrow", "zstandard"))
_MAX_VOCABULARY = 1 << 31


class _Vocabulary(msgspec.Struct):
    """A tokenizer as far as it is known: its size, the ids that begin and end a document (-1: none), its SHA-256."""

    size: int
    begin: int
    end: int
    sha256: str = ""


def import_tokens(
    tokens: Path,
    out_dir: Path,
    options: RunOptions = RunOptions(),
    *,
    tokenizer: Path | None = None,
    vocab_size: int = 0,
    bos: str = "none",
    eos: str = "model",
    stream: bool = False,
    column: str = "",
    dtype: str = "",
    copy: bool = False,
    shard_size: str = "512MiB",
) -> Counts:
    """Import tokens that other programs wrote as token shards: nanoGPT, llm.c, Megatron, datasets, Mosaic.

    A .bin whose ids are stored as in a shard is not copied but linked (a hard link, or a symbolic link across file
    systems). All ids are read once, and compared with the vocabulary.

    Args:
        tokens: A file or folder: .bin of nanoGPT or llm.c, .bin and .idx of Megatron, .arrow or .parquet with lists of
            ids, such as tokenised datasets (also hf://datasets/ORG/NAME), or Mosaic's MDS with its index.json. The
            first folder below is the source.
        out_dir: The folder of token shards to write, for --data.train.
        options: Workers, memory, and when to stop; they change no output.
        tokenizer: The tokenizer that made the tokens, as gristmill tokenize takes it; it is copied to OUT.
        vocab_size: Without a tokenizer: the size of the vocabulary, one more than the largest id.
        bos: The token that begins each document: none, model (as the tokenizer names it), or a token of its vocabulary;
            without a tokenizer an id.
        eos: The token that ends each document: none, model, or a token of the vocabulary.
        stream: Treat rows, sequences and samples as pieces of one stream, which --bos and --eos cut into documents. A
            .bin without an index is always read this way.
        column: The column of the ids; by default input_ids, or tokens.
        dtype: How ids are stored where no header says it: by default uint16 in a .bin, int64 in MDS columns of bytes.
        copy: Copy each .bin, so that the original may be removed or changed.
        shard_size: Maximum size of a shard's .bin, if its ids are copied from several files.

    Returns:
        Documents read, written and without a token, per source; their bytes are the bytes of the ids.
    """
    reject_remote(out_dir, option="--out_dir")
    require(dtype in ("", *DTYPES), f"--dtype {dtype}: expected one of {', '.join(DTYPES)}")
    target = parse_size(shard_size, "--shard_size")
    _check_vocabulary(tokenizer, vocab_size)
    file: Path | None = None
    if tokenizer:
        file = find_usable_tokenizer(tokenizer, [out_dir])
    files = find_token_files(tokens, column, dtype)
    with open_stage(STAGE, out_dir, options, reads=[tokens], publishes=[out_dir]) as run:
        remove_unrecorded_shards(run, out_dir)
        reject_unknown_files(out_dir, (), SHARD_SUFFIXES, run.ledger)
        if file:
            arguments = {"tokenizer": file, "companions": companions_of(file), "bos": bos, "eos": eos}
            read = run.step("tokenizer", [Task("tokenizer", read_vocabulary, arguments)])
            vocabulary = read.values(_Vocabulary)[0]
        else:
            begin = _parse_id("bos", bos, vocab_size)
            end = _parse_id("eos", eos, vocab_size)
            vocabulary = _Vocabulary(vocab_size, begin, end)
        stored = _stored_dtype(files, vocabulary.size)
        rule = ImportRule(vocabulary.begin, vocabulary.end, vocabulary.size, stored.name, stream)
        imported = run.step("import", _import_tasks(files, rule, out_dir, target, copy))
        run.step("manifest", [_manifest_task(imported, vocabulary, rule, file, out_dir)])
        counts = run.finish(imported.counts)
    if not options.quiet:
        _print_notes(files, imported.values(ImportReport), rule)
    return counts


def _check_vocabulary(tokenizer: Path | None, vocab_size: int) -> None:
    require(
        (tokenizer is None) != (vocab_size == 0),
        "expected --tokenizer, or --vocab_size where there is none, and not both; GPT-2 has --vocab_size 50257",
    )
    require(
        0 <= vocab_size <= _MAX_VOCABULARY,
        f"--vocab_size {vocab_size}: expected one more than the largest id, and at most {_MAX_VOCABULARY:,}",
    )


def _parse_id(option: str, given: str, vocab_size: int) -> int:
    """Return the id that begins or ends a document, as given without a tokenizer; -1: none. UsageError for no id."""
    if given in ("none", "model"):
        return -1
    if not given.isdecimal() or int(given) >= vocab_size:
        raise UsageError(
            f"--{option} {given}: expected an id below --vocab_size {vocab_size:,}, as there is no --tokenizer; GPT-2 "
            f"has --{option} 50256"
        )
    return int(given)


def read_vocabulary(tokenizer: Path, companions: list[Path], bos: str, eos: str) -> Result:
    """Task: load a tokenizer; the value is its _Vocabulary. UsageError if it cannot be used."""
    model = open_tokenizer(tokenizer)
    named = read_config(companions)
    begin = special_id(model, tokenizer, named, "bos", bos)
    end = special_id(model, tokenizer, named, "eos", eos)
    return Result(Counts({}, []), _Vocabulary(model.vocab_size, begin, end, sha256_file(tokenizer)))


def _stored_dtype(files: Sequence[TokenFile], vocab_size: int) -> np.dtype:
    """Return the dtype of the shards: the one in which the ids are already, or else that of the vocabulary."""
    for dtype in (token_dtype(vocab_size), np.dtype(np.uint16), np.dtype(np.int32)):
        if holds_ids(dtype.name, vocab_size) and all(file.is_usable_as(dtype) for file in files):
            return dtype
    return token_dtype(vocab_size)


def _import_tasks(
    files: Sequence[TokenFile], rule: ImportRule, out_dir: Path, target: int, copy: bool
) -> Iterator[Task]:
    """Yield the task of each shard: of one file that is not copied, or of consecutive ones up to `target` bytes."""
    dtype = np.dtype(rule.dtype)
    is_linked = not copy and all(file.is_usable_as(dtype) for file in files)
    if is_linked:
        plan = [[number] for number in range(len(files))]
    else:
        plan = plan_token_shards([file.size for file in files], target)
    for number, group in enumerate(plan):
        prefix = out_dir / shard_name(number)
        outputs = shard_files(prefix)
        some = [files[member] for member in group]
        arguments = {"files": some, "rule": rule, "is_linked": is_linked, "outputs": outputs}
        yield Task(prefix.name, import_files, arguments, outputs, sum(file.size for file in some))


def _manifest_task(
    imported: StepResult, vocabulary: _Vocabulary, rule: ImportRule, tokenizer: Path | None, out_dir: Path
) -> Task:
    """Return the task that writes the manifest, data_path.txt and a copy of the tokenizer."""
    manifest = out_dir / MANIFEST
    data_path = out_dir / DATA_PATH
    copies = list[tuple[Path, Path]]()  # of the tokenizer's files
    if tokenizer:
        for path in (tokenizer, *companions_of(tokenizer)):
            copies.append((path, out_dir / path.name))
    arguments = {
        "reports": imported.values(ImportReport), "vocabulary": vocabulary, "dtype": rule.dtype, "copies": copies,
        "manifest": manifest, "data_path": data_path,
    }  # fmt: skip
    return Task("manifest", write_manifest, arguments, (manifest, data_path, *(copy for _, copy in copies)))


def write_manifest(
    reports: list[ImportReport],
    vocabulary: _Vocabulary,
    dtype: str,
    copies: list[tuple[Path, Path]],
    manifest: Path,
    data_path: Path,
) -> None:
    """Task: write manifest.json and data_path.txt of all shards, in order; copy the tokenizer.

    An id that begins or ends no document at all is not named as one that does.
    """
    for original, copy in copies:
        with atomic_write(copy) as temporary:
            temporary.write_bytes(original.read_bytes())
    path = ""
    if copies:
        path = copies[0][1].name
    end = -1
    if _ended(reports):
        end = vocabulary.end
    begin = -1
    if _begun(reports):
        begin = vocabulary.begin
    tokenizer = TokenizerRecord(path, vocabulary.sha256, vocabulary.size, end, begin)
    sources: dict[str, SourceRecord] = {}
    for report in reports:
        for source, more in report.sources.items():
            add_to(sources.setdefault(source, SourceRecord()), more.documents, more.tokens, more.bytes)
    shards = [report.shard for report in reports]
    written = Manifest(tokenizer, dtype, shards, dict(sorted(sources.items())))
    atomic_write_bytes(data_path, blend(written).encode())
    written.save(manifest.parent)


def _print_notes(files: Sequence[TokenFile], reports: Sequence[ImportReport], rule: ImportRule) -> None:
    """Print how files were linked, and where documents do not begin or end as was said."""
    documents = sum(report.shard.documents for report in reports)
    linked = sum(report.linked != "" for report in reports)
    symbolic = sum(report.linked == "symbolic" for report in reports)
    if linked:
        how = "hard links"
        if symbolic:
            how = "symbolic links to the originals, which must stay where they are"
        _note(f"{count_of(linked, 'file')} not copied ({how}); do not change the originals, or try --copy")
    is_stream = rule.is_stream or any(file.layout == "raw" for file in files)
    if is_stream and rule.begin < 0 and rule.end < 0:
        _note("each file is one document, as nothing says where documents end; try --eos, such as --eos 50256")
    for option, token, count in (("bos", rule.begin, _begun(reports)), ("eos", rule.end, _ended(reports))):
        if token >= 0 and count < documents:
            verb = "begin" if option == "bos" else "end"
            missing = documents - count
            _note(f"{missing:,} of {count_of(documents, 'document')} do not {verb} with id {token:,} (--{option})")


def _begun(reports: Sequence[ImportReport]) -> int:
    return sum(report.begun for report in reports)


def _ended(reports: Sequence[ImportReport]) -> int:
    return sum(report.ended for report in reports)


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


if __name__ == "__main__":
    command(import_tokens)
