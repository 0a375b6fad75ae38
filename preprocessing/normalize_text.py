"""Stage: normalise text to Unicode NFC, so that equal texts have equal bytes. Writes .jsonl[.gz|.zst]."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip


import tyro

from gristmill.command import command
from gristmill.counts import Counts
from gristmill.engine.options import RunOptions
from gristmill.engine.rewriting import plan_targets, rewrite_corpus
from gristmill.engine.run import open_stage
from gristmill.engine.slices import SliceGroup, leaves_out_damaged
from gristmill.engine.staleness.outputs import reject_unknown_files
from gristmill.engine.task import Stage
from gristmill.errors import UsageError
from gristmill.io.corpus import Source, join_corpora, scan_corpus, scan_sources, web_libraries
from gristmill.io.documents import CORPUS_SUFFIXES, Extract, paths_of
from gristmill.io.readers import read_documents
from gristmill.io.writers import Rejects, open_jsonl_writer
from gristmill.storage.files import listed_once
from gristmill.text import utf8_size
from preprocessing.steps.normalise import check_ftfy, normaliser

STAGE = Stage("normalize_text", version=4, libraries=("unicode", "zstandard", "zlib", "pyarrow"))
FILES_PER_INDEX = 64  # as in SlimPajama


def normalize_text(
    data_dir: Annotated[Path, tyro.conf.arg(aliases=["-d"])],
    target_dir: Annotated[Path, tyro.conf.arg(aliases=["-t"])],
    zst: bool = False,
    idx: int = -1,
    ftfy: bool = False,
    text_column: str = "text",
    read_also: tuple[str, ...] = (),
    skip_odd_names: bool = False,
    extract: Extract = "main",
    sources: tyro.conf.Suppress[Mapping[str, Source] | None] = None,
    options: RunOptions = RunOptions(),
) -> Counts:
    """Normalise every text of a corpus to Unicode NFC; all other fields are copied unchanged.

    The format follows from the file name. An output file has its input's name, but for the suffix: lines stay .jsonl
    or .jsonl.gz, and all other formats and compressions become .jsonl.zst. A large file is normalised by several
    tasks, in pieces.

    Args:
        data_dir: Folder with JSON lines (.jsonl, .ndjson, .json; also .gz, .zst, .bz2, .xz), .parquet or .arrow files,
            or web archives (.warc, .wet, also compressed: gristmill[web]), in any subfolders.
        target_dir: Output folder; files keep their relative paths.
        zst: Compress all output with zstd, even if the input is not compressed.
        idx: Index of the block of 64 files to normalise, to split a folder among machines; -1 for all files.
        ftfy: Repair mojibake with ftfy first, as SlimPajama did. It also rewrites Chinese punctuation and code.
        text_column: The column or field that holds the text; it keeps its name.
        read_also: More formats to read: txt, md, html (a file is one document), csv, tsv (a row is one).
        skip_odd_names: Leave out files whose names cannot be part of a document's key, such as those with a newline or
            bytes that are not UTF-8; they are counted as not read.
        extract: Text to take from HTML pages, in files and web archives: the main text, without menus and footers, or
            all of it.
        sources: Folder, text field and format of each source, where these differ; others are not read then.
        options: Workers, memory, and when to stop; they change no output.

    Returns:
        Documents read, written and malformed, and files read and not read, per source.
    """
    if ftfy:
        check_ftfy()
    with listed_once(data_dir):
        if sources:
            corpora = scan_sources(data_dir, sources, text_column, skip_odd_names)
        else:
            listed = scan_corpus(
                data_dir,
                text_column=text_column,
                read_also=read_also,
                skip_odd_names=skip_odd_names,
                extract=extract,
            )
            corpora = [(data_dir, listed)]
        corpus = join_corpora(corpora)
        reads = dict[Path, list[Path]]()
        files = corpus.files
        for folder, part in corpora:
            reads.setdefault(folder, []).extend(paths_of(part.files))
        targets = plan_targets(files, target_dir, zst)
        chosen = files
        part_name = ""
        if idx >= 0:
            chosen = files[idx * FILES_PER_INDEX : (idx + 1) * FILES_PER_INDEX]
            part_name = f"idx{idx}"
        if not chosen:
            last = (len(files) - 1) // FILES_PER_INDEX
            raise UsageError(f"--idx {idx}: {data_dir} has {len(files)} files, so expected 0 to {last}")
        libraries = [*STAGE.libraries]
        if ftfy:
            libraries.append("ftfy")
        libraries += web_libraries(files)
        stage = replace(STAGE, libraries=tuple(libraries))
        arguments: dict[str, Any] = {"ftfy": ftfy}
        if sources:
            arguments["written_as"] = text_column
        with open_stage(
            stage, target_dir, options, reads=reads, publishes=[target_dir], part=part_name, inputs_vary=bool(sources)
        ) as run:
            reject_unknown_files(target_dir, targets.values(), CORPUS_SUFFIXES, run.ledger)
            counts = rewrite_corpus(run, "normalize", chosen, targets, normalize_slices, arguments).counts
            if idx <= 0:  # once for all blocks
                counts.merge(run.note("files that are not read", corpus.count_unread()))
            return run.finish(counts)


@leaves_out_damaged
def normalize_slices(group: SliceGroup, outputs: tuple[Path, ...], ftfy: bool, written_as: str = "") -> Counts:
    """Task: normalise each slice of a group into its output; the field of the text is `written_as`, or stays."""
    counts = Counts({}, [])
    fix = normaliser(ftfy)
    for part, output in zip(group, outputs, strict=True):
        with open_jsonl_writer(output) as sink:
            for document in read_documents(part, counts, Rejects(output)):
                before = document.read_bytes
                text = fix(document.text)
                size = before
                if text != document.text:
                    size = utf8_size(text)
                document.replace_text(text)
                if written_as:
                    document.rename_text(written_as)
                sink.write(document.to_json())
                counts.add_written(part.source, size, before)
                del document, text  # a large one is gone before the next is read
    return counts


if __name__ == "__main__":
    command(normalize_text)
