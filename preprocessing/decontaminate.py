"""Stage: keep benchmarks out of a corpus: find their items by n-grams of words, and drop or cut what has them."""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby, product
from pathlib import Path
from typing import Any, Literal, NamedTuple

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import msgspec
import numpy as np
import pyarrow as pa
from tyro.conf import Positional

from gristmill.budget import reserve_memory
from gristmill.command import command
from gristmill.counts import CHANGED, Counts
from gristmill.engine.options import RunOptions
from gristmill.engine.rewriting import OutputFormat, open_rewriting, rewrite_corpus
from gristmill.engine.run import StageRun
from gristmill.engine.slices import SliceGroup, cut_raw_corpus, leaves_out_damaged, read_slices
from gristmill.engine.staleness.records import StepResult
from gristmill.engine.task import FileSet, Result, Stage, Task
from gristmill.errors import UsageError, require
from gristmill.io.artefacts import stream_table, write_rows
from gristmill.io.corpus import list_corpus
from gristmill.io.documents import CorpusFile, Document, paths_of
from gristmill.io.external_sort import write_array
from gristmill.io.readers import read_documents
from gristmill.io.writers import Rejects, open_jsonl_writer
from gristmill.storage.files import exists, file_info, is_file, resolved
from gristmill.storage.local import atomic_write_bytes
from gristmill.text import utf8_size
from gristmill.wording import count_of
from preprocessing.contamination.benchmarks import (
    ALL_FIELDS,
    SHORTEST,
    Benchmarks,
    IndexFiles,
    IndexSummary,
    Match,
    write_index,
)
from preprocessing.contamination.ngrams import TextWords, find_words
from preprocessing.contamination.report import (
    CONTAMINATED,
    EXACT,
    NEAR,
    BenchmarkReport,
    Report,
    read_report,
    report_paths,
)
from preprocessing.contamination.task_files import is_task_file, list_task, task_files_in

STAGE = Stage("decontaminate", version=6, libraries=("unicode", "zstandard", "zlib", "pyarrow"))
Policy = Literal["drop", "cut", "report"]
_SCHEMA = pa.schema(
    {
        "file": pa.string(), "row": pa.int64(), "source": pa.string(), "benchmark": pa.string(), "item": pa.string(),
        "match": pa.string(), "share": pa.float64(), "ngrams": pa.int64(), "start": pa.int64(), "end": pa.int64(),
        "text": pa.string(), "item_text": pa.string(), "removed": pa.bool_(),
    }
)  # fmt: skip
_KEY_COUNT = np.dtype([("key", "<u8"), ("documents", "<u8")])
_MEMORY_A_CHARACTER = 40  # bytes, of a text while its words are looked up: code points, hashes, places
_SHOWN = 600  # characters of a text in the table


def decontaminate(
    data_dir: Positional[Path],
    target_dir: Positional[Path],
    against: tuple[Path, ...],
    options: RunOptions = RunOptions(),
    *,
    template: str = ALL_FIELDS,
    policy: Policy = "drop",
    margin: int = 200,
    min_ngrams: int = 1,
    common: int = 1000,
    near: float = 0.6,
    format: OutputFormat = "jsonl",
    text_column: str = "text",
) -> Counts:
    """Write a corpus without the documents that contain items of benchmarks.

    A document contains an item if the two share 13 consecutive words, or all words of an item of 8 to 12. Case,
    punctuation, line ends, escapes of JSON and HTML, Unicode forms and zero-width characters do not matter. In scripts
    without spaces a character is a word. Words are compared, not only hashes. A document contains a near-duplicate of
    an item of 13 words or more if one passage has the share `near` of the item's words, in runs of 5 or more. The table
    TARGET_DIR.contamination.parquet has each passage, with both texts; TARGET_DIR.benchmarks.json has, for each
    benchmark, the share found and the documents by source.

    Args:
        data_dir: Folder of the corpus.
        target_dir: Output folder; files keep their relative paths.
        against: Benchmarks: files or folders of .jsonl, .parquet or the like, where each record is an item, or tasks of
            lm-eval (.yaml), where each field that a template names is an item.
        options: Workers, memory, and when to stop; they change no output.
        template: Template of an item's text: "{question} {choices} {answer}"; by default each field is an item.
        policy: drop the document; cut the passages, with a margin; or report them and write the corpus as it is.
        margin: Characters to cut before and after a passage.
        min_ngrams: Minimum number of different n-grams that a document and an item share; an item shorter than an
            n-gram counts as one.
        common: N-grams found in at least this many documents are boilerplate and do not count; neither do
            near-duplicates of an item that as many documents contain. 0: count all.
        near: Share of an item's words that a near-duplicate has; 0: look for exact n-grams only.
        format: Format of the output files: jsonl, or parquet, where each field has one type in all files of a source.
        text_column: The column or field that holds the text.

    Returns:
        Documents read, written, and left out, and the bytes cut (changed), per source.
    """
    require(bool(against), "expected files or folders of benchmarks, got none; try --against BENCHMARKS")
    check_limits(margin, min_ngrams, common, near)
    benchmarks = list_benchmarks(against, template)
    reject_own_corpus([*against, *paths_of(benchmarks)], [data_dir])
    table, report = places = report_paths(target_dir)
    with open_rewriting(STAGE, data_dir, target_dir, options, text_column, format, places) as (run, files, targets):
        index = IndexFiles.in_folder(run.work)
        task = Task("index", index_benchmarks, {"files": benchmarks, "index": index, "near": near > 0}, index)
        (summary,) = run.step("index", [task]).values(dict[str, IndexSummary])
        boilerplate = _find_common(run, files, index, common, near)
        arguments: dict[str, Any] = {"index": index, "near": near, "common": boilerplate, "min_ngrams": min_ngrams}
        done = rewrite_corpus(
            run, "search", files, targets, search_slices, {**arguments, "policy": policy, "margin": margin},
            table=table,
        )  # fmt: skip
        inputs = {"table": table, "common": boilerplate, "summary": summary, "report": report}
        run.step("report", [Task("report", write_report, inputs, (report,))])
        counts = run.finish(done.counts)
    if not options.quiet:
        for line in describe(read_report(report)):
            print(line, file=sys.stderr)
        if policy == "cut":
            size = counts.total(CHANGED).bytes
            gone = counts.total(CONTAMINATED).documents
            rewritten = read_report(report).documents - gone
            print(f"{STAGE.name}: {count_of(size, 'byte')} cut from {count_of(rewritten, 'document')}", file=sys.stderr)
    return counts


def check_limits(margin: int, min_ngrams: int, common: int, near: float) -> None:
    """Raise UsageError for a number out of range."""
    require(near == 0 or 0.5 <= near <= 1, f"--near: expected 0, or a share of 0.5 to 1, got {near:g}; try --near 0.6")
    for name, value, minimum in (("margin", margin, 0), ("min_ngrams", min_ngrams, 1), ("common", common, 0)):
        require(value >= minimum, f"--{name}: expected {minimum} or more, got {value}")


def reject_own_corpus(against: Sequence[Path], corpora: Sequence[Path]) -> None:
    """Raise UsageError for a benchmark that lies in a corpus, or has one in it."""
    for path, corpus in product(against, corpora):
        inner = resolved(path)
        outer = resolved(corpus)
        if inner.is_relative_to(outer) or outer.is_relative_to(inner):
            raise UsageError(
                f"--against {path} and the corpus {corpus} overlap, so items of the benchmark would also be read as "
                "documents: move the benchmark out of the corpus"
            )


def _describe_benchmark(name: str, benchmark: BenchmarkReport) -> str:
    """Return how many items of a benchmark are in documents, and in which sources."""
    share = benchmark.found / max(1, benchmark.items)
    documents = count_of(sum(benchmark.documents.values()), "document")
    line = f"{name}: {benchmark.found:,} of {count_of(benchmark.items, 'item')} found ({share:.1%}) in {documents}"
    by_source = ", ".join(f"{source} {count:,}" for source, count in benchmark.documents.items())
    if by_source:
        line += f" ({by_source})"
    if benchmark.near_documents:
        near_documents = sum(benchmark.near_documents.values())
        line += f"; near-duplicates of {benchmark.near:,} more in {near_documents:,}"
    if benchmark.too_short:
        line += f"; {benchmark.too_short:,} with fewer than {SHORTEST} words not searched for"
    return line


def describe(report: Report) -> list[str]:
    """Return a line for each benchmark."""
    lines = [_describe_benchmark(name, benchmark) for name, benchmark in report.benchmarks.items()]
    if report.common_ngrams or report.common_items:
        lines.append(
            f"{count_of(report.common_ngrams, 'n-gram')} of benchmarks, and near-duplicates of "
            f"{count_of(report.common_items, 'item')}, are in so many documents that they count as "
            "boilerplate: an item that has no other n-grams is not found"
        )
    return lines


def list_benchmarks(against: Sequence[Path], template: str = ALL_FIELDS) -> list[CorpusFile]:
    """Return the files of some benchmarks, each named by its folder and itself, with the template of their texts."""
    require(
        "{" in template,
        f"--template {template!r}: expected names of fields in braces, as in '{{question}} {{choices}}'",
    )
    files = list[CorpusFile]()
    for path in against:
        require(exists(path), f"--against {path}: expected a file or a folder, but there is none of that name")
        if is_task_file(path):
            files += list_task(path, template)
        elif is_file(path):
            info = file_info(path)
            assert info is not None
            require(info.size > 0, f"--against {path}: expected items, a record each, got an empty file")
            files.append(CorpusFile(path, path.name, info.size, template))
        else:
            tasks = task_files_in(path)
            for task in tasks:
                files += list_task(task, template)
            if not tasks:
                files += list_corpus(path, f"{path.name}/", template)
    names = set[str]()
    for file in files:
        if file.name in names:
            raise UsageError(
                f"--against: expected benchmarks of different names, got {file.name} twice; rename one of them"
            )
        names.add(file.name)
    return files


def index_benchmarks(files: list[CorpusFile], index: IndexFiles, near: bool) -> Result:
    """Task: write the index of all benchmarks; the value is what it has of each."""
    return Result(Counts({}, []), write_index(files, index, near))


class CommonFiles(NamedTuple):
    """Boilerplate, in too many documents: keys of n-grams, and items with near-duplicates (uint64, ascending)."""

    ngrams: Path
    items: Path


def _find_common(
    run: StageRun, files: list[CorpusFile], index: IndexFiles, common: int, near: float
) -> CommonFiles | None:
    """Run the steps that find what `common` documents or more have; None if all is looked for."""
    if not common:
        return None

    def count(groups: list[SliceGroup]) -> Iterable[Task]:
        for group in groups:
            name = f"{group[0].label}.npy"
            outputs = CommonFiles(run.work / "ngrams" / name, run.work / "items" / name)
            arguments = {"index": index, "near": near, "outputs": outputs}
            yield Task.on_slices(group, count_documents, arguments, outputs)

    counted: StepResult = read_slices(run, "ngrams", cut_raw_corpus(run, files), count)
    paths = CommonFiles(run.work / "common.ngrams.npy", run.work / "common.items.npy")
    tasks = list[Task]()
    for number, path in enumerate(paths):
        of_tasks = tuple(counted.paths(number))
        arguments = {"counted": FileSet(of_tasks), "min_documents": common, "output": path}
        tasks.append(Task(path.stem, find_common, arguments, (path,)))
    run.step("common", tasks)
    return paths


@leaves_out_damaged
def count_documents(group: SliceGroup, index: IndexFiles, near: float, outputs: CommonFiles) -> Counts:
    """Task: count the documents that have each n-gram of a benchmark, and near-duplicates of each item."""
    counts = Counts({}, [])
    benchmarks = Benchmarks(index, near)
    ngrams = Counter[int]()
    items = Counter[int]()
    for part in group:
        for document in read_documents(part, counts, Rejects(outputs.ngrams)):
            counts.add(part.source, "counted", document.read_bytes)
            with _memory_for(document):
                words = find_words(document.text)
                ngrams.update(benchmarks.keys_in(words).tolist())
                items.update({match.item for match in benchmarks.find_near(words)})
    for output, documents_of in zip(outputs, (ngrams, items), strict=True):
        write_array(output, np.array(sorted(documents_of.items()), _KEY_COUNT))
    return counts


def find_common(counted: FileSet, min_documents: int, output: Path) -> None:
    """Task: write the keys that `min_documents` documents or more have, ascending."""
    total = np.empty(0, _KEY_COUNT)
    for start in range(0, len(counted.paths), 64):  # the sum has the benchmarks' keys at most
        both = np.concatenate([total, *map(np.load, counted.paths[start : start + 64])])
        keys, places = np.unique(both["key"], return_inverse=True)
        total = np.empty(len(keys), _KEY_COUNT)
        total["key"] = keys
        total["documents"] = np.bincount(places, both["documents"], len(keys)).astype(np.uint64)
    write_array(output, total["key"][total["documents"] >= min_documents])


@leaves_out_damaged
def search_slices(
    group: SliceGroup,
    outputs: tuple[Path, ...],
    index: IndexFiles,
    near: float,
    common: CommonFiles | None,
    min_ngrams: int,
    policy: Policy,
    margin: int,
    rows: Path,
) -> Counts:
    """Task: write the documents of each slice, contaminated ones as the policy says, and a table of the places."""
    counts = Counts({}, [])
    places = list[tuple[Any, ...]]()
    benchmarks = _open_benchmarks(index, near, common)
    for part, output in zip(group, outputs, strict=True):
        with open_jsonl_writer(output) as sink:
            for document in read_documents(part, counts, Rejects(output)):
                size = document.read_bytes
                with _memory_for(document):
                    words: TextWords = find_words(document.text)
                    matches = benchmarks.find(words, min_ngrams)
                text = document.text
                if matches and policy == "cut":
                    text = _cut(text, matches, margin)
                is_removed = bool(matches) and (policy == "drop" or not text)
                for match in matches:
                    places.append((*_row(document, benchmarks, match), is_removed))
                if is_removed:
                    counts.add(part.source, CONTAMINATED, size)
                    continue
                document.replace_text(text)
                sink.write(document.to_json())
                counts.add_written(part.source, utf8_size(text), size)
    write_rows(rows, _SCHEMA, places)
    return counts


def _open_benchmarks(index: IndexFiles, near: float, common: CommonFiles | None) -> Benchmarks:
    """Return an index without what is common, if that was looked for."""
    if common is None:
        return Benchmarks(index, near)
    return Benchmarks(index, near, np.load(common.ngrams), np.load(common.items))


def write_report(table: Path, common: CommonFiles | None, summary: dict[str, IndexSummary], report: Path) -> None:
    """Task: count what was found, from the table of all places."""
    benchmarks = dict[str, BenchmarkReport]()
    for name, of_index in summary.items():
        benchmarks[name] = BenchmarkReport(*of_index, 0, {}, 0, {})
    known = Report(benchmarks, 0, 0)
    if common is not None:
        known.common_ngrams = len(np.load(common.ngrams))
        known.common_items = len(np.load(common.items))
    items = defaultdict[str, set[str]](set)  # of each benchmark, that were found
    exact_items = defaultdict[str, set[str]](set)
    for document in _documents_in(table):
        known.documents += 1
        for name, rows in document.items():
            by_source = benchmarks[name].near_documents
            for row in rows:
                items[name].add(row["item"])
                if row["match"] == EXACT:
                    exact_items[name].add(row["item"])
                    by_source = benchmarks[name].documents
            source = rows[0]["source"]
            by_source[source] = by_source.get(source, 0) + 1
    for name, benchmark in benchmarks.items():
        benchmark.found = len(exact_items[name])
        benchmark.near = len(items[name]) - benchmark.found
        benchmark.documents = dict(sorted(benchmark.documents.items()))
        benchmark.near_documents = dict(sorted(benchmark.near_documents.items()))
    atomic_write_bytes(report, msgspec.json.format(msgspec.json.encode(known)) + b"\n")


def _documents_in(table: Path) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """Yield the rows of each document of the table, by benchmark."""
    blocks = stream_table(table, ("file", "row", "source", "benchmark", "item", "match"))
    rows = chain.from_iterable(block.to_pylist() for block in blocks)
    for _, rows_of_document in groupby(rows, key=lambda row: (row["file"], row["row"])):
        by_benchmark = defaultdict[str, list[dict[str, Any]]](list)
        for row in rows_of_document:
            by_benchmark[row["benchmark"]].append(row)
        yield by_benchmark


def _memory_for(document: Document) -> Any:
    return reserve_memory(_MEMORY_A_CHARACTER * len(document.text), f"the words of {document.key}")


def _row(document: Document, benchmarks: Benchmarks, match: Match) -> tuple[Any, ...]:
    benchmark, item, text = (column[match.item].as_py() for column in benchmarks.items.columns)
    passage = document.text[match.start : min(match.end, match.start + _SHOWN)]
    file, row = document.key
    kind = NEAR if match.near else EXACT
    share = round(match.share, 3)
    return (
        file, row, document.source, benchmark, item, kind, share, match.ngrams, match.start, match.end, passage,
        text[:_SHOWN],
    )  # fmt: skip


def _cut(text: str, matches: Sequence[Match], margin: int) -> str:
    """Return the text without the places and `margin` characters around each; an empty line marks each gap.

    What stays keeps its bytes, such as indentation.
    """
    kept = list[str]()
    end = 0
    for match in matches:
        start = max(0, match.start - margin)
        if start > end:
            kept.append(text[end:start])
        end = max(end, match.end + margin)
    kept.append(text[end:])
    return "\n\n".join(part for part in kept if part and not part.isspace())


if __name__ == "__main__":
    command(decontaminate)
