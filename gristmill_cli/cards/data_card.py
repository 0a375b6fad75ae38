"""Commands: write a card of the data next to the tokens, in the Hugging Face Hub's form, and push both to the Hub."""

import glob
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.text import Text
from tyro.conf import Positional

from gristmill.counts import HELD_OUT, INCOMING, NOT_READ, READ, Counts
from gristmill.errors import UsageError, require
from gristmill.io.files import RUN_FILE
from gristmill.io.token_shards import Manifest
from gristmill.paths import ObjectName, object_name, spell_urls
from gristmill.storage.files import is_file, read_file, write_file
from gristmill.storage.hub import hub_library
from gristmill.storage.stores import store_of
from gristmill.wording import count_of, markdown_table
from gristmill_cli.cards.model_push import model_name, push_model, require_checkpoint, sizes_of_files
from gristmill_cli.funnel import TRAIN, Funnel, load_manifests, read_funnel
from gristmill_cli.run_config import read_options
from gristmill_cli.run_records import kept_versions, load_record
from gristmill_cli.stages.pipeline import STAGES, stages_in_run

CARD = "README.md"
_SIZES = ("1K", "10K", "100K", "1M", "10M", "100M", "1B", "10B", "100B", "1T")  # the Hub's categories
_YOURS = b"<!-- What follows is yours: gristmill card keeps it when it writes the card again. -->"
_LEFT_OUT = ("out", "workers", "memory", "explain", "explain_tasks", "scratch", "max_malformed", "max_failed")


def card(run: Positional[Path], name: str = "") -> Text:
    """Write OUT/tokens/README.md: sources, counts, rules, benchmarks, tokenizer and options, as recorded.

    It begins like a dataset card, so the folder can be uploaded to the Hub as it is. The same records give the same
    bytes, and what you write below its last line stays. It has no licences, as records seldom name them and nothing
    here can check them, and only the names of files, not their paths.

    Args:
        run: The --out of a finished `gristmill run`; also s3://bucket/folder.
        name: Title of the card; by default the name of the folder.

    Raises:
        UsageError: the run has not finished.
        InputError: one of its records is damaged.
    """
    require(is_file(run / RUN_FILE), f"{run}: expected the --out of a gristmill run, got no run.json in it")
    funnel = read_funnel(run)
    options = read_options(run)
    manifests = load_manifests(run)
    target = run / "tokens" / CARD
    before = read_file(target) if is_file(target) else b""
    if before and not before.startswith(b"---\npretty_name: "):
        raise UsageError(f"{target} exists, and gristmill card did not write it; move it")
    content = "\n".join(_lines(run, name or run.name, options, funnel, manifests)).encode()
    write_file(target, content + _YOURS + (before.partition(_YOURS)[2] or b"\n"))
    return Text(spell_urls(f"card: {target}"))


def _lines(
    run: Path, name: str, options: dict[str, Any], funnel: Funnel, manifests: dict[str, Manifest]
) -> Iterable[str]:
    """Yield the card, section by section."""
    counts = Counts(funnel.tallies, [])
    yield from _header(name, counts.total(TRAIN).documents)
    yield from _totals(counts, funnel.tokens)
    yield from _sources(counts, funnel.tokens[TRAIN])
    yield from _outcomes(counts)
    if funnel.warnings:
        yield "\n## What looks wrong\n"
        for warning in funnel.warnings:
            yield f"- {warning}"
    for stage in stages_in_run(options):
        record = load_record(run, stage.name)
        yield from stage.card(run, options, record.settings if record else {})
    yield from _tokens(manifests[TRAIN], options["tokenizer"].get("bos", "none"))
    yield from _replaced(run)
    yield from _kept_versions(run)
    yield "## Options\n\n```json"
    shown = dict[str, Any]()
    for key, value in options.items():
        if key not in _LEFT_OUT:
            shown[key] = _without_folders(value)
    yield msgspec.json.format(msgspec.json.encode(shown), indent=2).decode()
    yield "```\n"


def _header(name: str, documents: int) -> Iterable[str]:
    """Yield what the Hub reads of a card, and the title."""
    yield "---"
    yield f"pretty_name: {msgspec.json.encode(name).decode()}"
    yield "task_categories:"
    yield "- text-generation"
    yield "size_categories:"
    yield f"- {_size_category(documents)}"
    yield "tags:"
    yield "- gristmill"
    yield "---"
    yield ""
    yield f"# {name}"


def _size_category(documents: int) -> str:
    """Return the Hub's category of so many documents.

    >>> _size_category(999), _size_category(1000), _size_category(10**15)
    ('n<1K', '1K<n<10K', '100B<n<1T')
    """
    number = 0
    while number < len(_SIZES) - 1 and documents >= 1000 * 10**number:
        number += 1
    if number == 0:
        return f"n<{_SIZES[0]}"
    return f"{_SIZES[number - 1]}<n<{_SIZES[number]}"


def _totals(counts: Counts, tokens: dict[str, dict[str, int]]) -> Iterable[str]:
    """Yield how much there is for training, and how much is held out."""
    documents = count_of(counts.total(TRAIN).documents, "document")
    trained = count_of(sum(tokens[TRAIN].values()), "token")
    yield f"\n{documents} and {trained} for training, "
    yield f"{counts.total(HELD_OUT).documents:,} and {sum(tokens.get(HELD_OUT, {}).values()):,} held out.\n"


def _sources(counts: Counts, tokens: dict[str, int]) -> Iterable[str]:
    """Yield the section on what each source had, and has for training."""
    yield "## Sources\n"
    head = ("source", "documents read", "MB read", "for training", "MB", "tokens", "bytes a token")
    rows = [_source_row(source, counts, tokens) for source in sorted(counts.tallies)]
    yield from markdown_table(head, rows)


def _outcomes(counts: Counts) -> Iterable[str]:
    """Yield the section on how many documents were read, and how many left by which reason."""
    yield "\n## What became of the documents\n"
    added = sum(counts.total(reason).documents for reason in INCOMING if reason != READ)
    were_read = f"{counts.total(READ).documents:,} were read."
    if added:
        were_read += f" The mix adds {added:,}: repeats, and parts of documents that were split."
    yield f"{were_read}\n"
    outgoing = [reason for reason in counts.reasons if reason not in (*INCOMING, NOT_READ)]
    rows = list[tuple[str, str, str]]()
    for reason in sorted(outgoing, key=lambda reason: -counts.total(reason).documents):
        tally = counts.total(reason)
        rows.append((reason, f"{tally.documents:,}", f"{tally.bytes / 1e6:,.1f}"))
    yield from markdown_table(("", "documents", "MB"), rows)


def _tokens(manifest: Manifest, begin: str) -> Iterable[str]:
    """Yield the section on the format of the tokens, and their tokenizer; `begin` is the option --bos."""
    tokenizer = manifest.tokenizer
    yield f"\n## Tokens\n\nMegatron's indexed format, {manifest.dtype}, {tokenizer.vocab_size:,} ids;"
    known = {"none": "no token begins one", "model": "the tokenizer's own begins one"}
    begins = known.get(begin, f"{begin} begins one")
    yield f"{tokenizer.end_of_document} ends a document, {begins}. {Path(tokenizer.path).name} has the SHA-256"
    yield f"{tokenizer.sha256}.\n"


def _replaced(run: Path) -> Iterable[str]:
    """Yield the section on personal data that was replaced, by kind."""
    replaced = Counts()
    for stage in STAGES:
        record = load_record(run, stage.name)
        if record:
            replaced.merge(record.counts)
    if replaced.replaced:
        yield "\n## Personal data\n\nReplaced in the documents, before duplicates were removed and sources weighted.\n"
        yield from markdown_table(("", "replaced"), [(kind, f"{count:,}") for kind, count in replaced.replaced.items()])
        yield ""


def _kept_versions(run: Path) -> Iterable[str]:
    """Yield the section on what other versions of libraries made, and --accept_versions kept."""
    kept = list[str]()
    for stage in STAGES:
        record = load_record(run, stage.name)
        if record:
            kept += kept_versions({stage.name: record})
    if kept:
        yield "## Versions of libraries\n"
        for sentence in kept:
            yield f"- {sentence}"
        yield ""


def _without_folders(value: Any) -> Any:
    """Return an option without the folders of its paths, which tell about a machine and not about the data."""
    if isinstance(value, dict):
        return {key: _without_folders(item) for key, item in value.items()}
    if isinstance(value, list):
        return list(map(_without_folders, value))
    if isinstance(value, str) and Path(value).is_absolute():
        return Path(value).name
    return value


def _source_row(source: str, counts: Counts, tokens: dict[str, int]) -> Sequence[str]:
    read = counts.total(READ, source)
    trained = counts.total(TRAIN, source)
    count = tokens.get(source, 0)
    bytes_per_token = "none"
    if count:
        bytes_per_token = f"{trained.bytes / count:.2f}"
    return (
        source,
        f"{read.documents:,}",
        f"{read.bytes / 1e6:,.1f}",
        f"{trained.documents:,}",
        f"{trained.bytes / 1e6:,.1f}",
        f"{count:,}",
        bytes_per_token,
    )


def push(
    run: Positional[Path],
    target: Positional[Path],
    dry_run: bool = False,
    private: bool = True,
    tokens: Path | None = None,
) -> Text:
    """Upload tokens with their card, or a model with one, to the Hugging Face Hub; the repository is made if need be.

    A model is exported for transformers, with its tokenizer, its loss curve, its scores and the card of its data.
    Files that are already there are not sent again. Log in with HF_TOKEN or `hf auth login`.

    Args:
        run: The --out of a finished `gristmill run` on a disk (run `gristmill card` on it first); or a checkpoint, or
            the --out_dir of a training run.
        target: hf://datasets/ORG/NAME for tokens, hf://ORG/NAME for a model.
        dry_run: List the files and their sizes, without contacting the Hub.
        private: Create the repository as private.
        tokens: For a model: folder of token shards with its tokenizer; by default that of the run.

    Raises:
        UsageError: the run has not finished, has no card, or the target is no dataset.
        StorageError: the Hub refuses it, or cannot be reached.
    """
    if model := model_name(str(target)):
        require_checkpoint(run)
        return Text(spell_urls(push_model(run, model, dry_run, private, tokens)))
    require(tokens is None, "--tokens is for a model, hf://ORG/NAME; leave it out")
    name, dataset = _dataset_of(target)
    require(
        not store_of(run).needs_copies,
        f"{run}: expected a run on a disk, got one in a bucket; copy its tokens to a disk",
    )
    read_funnel(run)
    folder = run / "tokens"
    require(is_file(folder / CARD), f"{folder / CARD} is missing; write it first: gristmill card {run}")
    sizes = sizes_of_files(folder)
    lines = [f"{size:>16,} {file}" for file, size in sizes.items()]
    total = f"{count_of(len(sizes), 'file')}, {count_of(sum(sizes.values()), 'byte')}: {folder} → {target}"
    if dry_run:
        return Text(spell_urls("\n".join([*lines, f"{total}; nothing was sent"])))
    with hub_library(name):
        from huggingface_hub import HfApi

        api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
        api.create_repo(dataset, repo_type="dataset", private=private, exist_ok=True)
        api.upload_folder(
            repo_id=dataset, folder_path=folder, repo_type="dataset", allow_patterns=list(map(glob.escape, sizes)),
            commit_message="Tokens of gristmill run",
        )  # fmt: skip
    return Text(spell_urls(total))


def _dataset_of(target: Path) -> tuple[ObjectName, str]:
    """Return the place of hf://datasets/ORG/NAME, and ORG/NAME. Raises UsageError for another target."""
    if str(target).startswith("hf:/") and "datasets/" in str(target):
        name = object_name(target)
        kind, _, dataset = name.bucket.partition("/")
        if kind == "datasets" and not name.key and "@" not in dataset and dataset.count("/") == 1:
            return name, dataset
    raise UsageError(f"{target}: expected hf://datasets/ORG/NAME for tokens, or hf://ORG/NAME for a model")
