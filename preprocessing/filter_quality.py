"""Stage: keep the documents that a recipe of quality rules allows, as Gopher's, C4's and FineWeb's."""

import sys
from dataclasses import replace
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

from tyro.conf import Positional

from gristmill.command import command
from gristmill.counts import Counts
from gristmill.engine.options import RunOptions
from gristmill.engine.rewriting import OutputFormat, open_rewriting, rewrite_corpus
from gristmill.engine.slices import SliceGroup, leaves_out_damaged
from gristmill.engine.task import Stage
from gristmill.io.artefacts import write_rows
from gristmill.io.readers import read_documents
from gristmill.io.writers import Rejects, open_jsonl_writer
from gristmill.text import utf8_size
from preprocessing.document_pass import REMOVED, removed_path
from preprocessing.prepare import note_replaced
from preprocessing.quality.recipe import parse_recipe, read_recipe

STAGE = Stage("filter_quality", version=5, libraries=("unicode", "zstandard", "zlib", "pyarrow"))


def filter_quality(
    data_dir: Positional[Path],
    target_dir: Positional[Path],
    recipe: Positional[str],
    options: RunOptions = RunOptions(),
    *,
    format: OutputFormat = "jsonl",
    text_column: str = "text",
) -> Counts:
    """Write the documents of a corpus that the rules of a recipe allow, each counted once by the first rule it fails.

    The table TARGET_DIR.removed.parquet has each document that was removed (its file and row in data_dir), the rule,
    the value of its measure, and what it is of: the language, or the domain. Rules for lines and for personal data
    rewrite the text for the rules that follow.

    Args:
        data_dir: Folder with JSON lines (.jsonl, .ndjson, .json; also .gz, .zst, .bz2, .xz), .parquet or .arrow files,
            in any subfolders.
        target_dir: Output folder; files keep their relative paths.
        recipe: gopher, c4, fineweb, fineweb-en, or a TOML file of rules.
        options: Workers, memory, and when to stop; they change no output.
        format: Format of the output files: jsonl, or parquet, where each field has one type in all files of a source.
        text_column: The column or field that holds the text.

    Returns:
        Documents read, written, and removed by each rule, per source.
    """
    content = read_recipe(recipe)
    rules = parse_recipe(content, recipe)
    stage = replace(STAGE, libraries=(*STAGE.libraries, *rules.libraries))
    table = removed_path(target_dir)
    with open_rewriting(stage, data_dir, target_dir, options, text_column, format, [table]) as (run, files, targets):
        done = rewrite_corpus(
            run, "judge", files, targets, judge_slices, {"rules": content, "lists": dict(rules.lists)},
            table=table,
        )  # fmt: skip
        counts = run.finish(done.counts)
    note_replaced(counts, options)
    return counts


@leaves_out_damaged
def judge_slices(
    group: SliceGroup, outputs: tuple[Path, ...], rules: str, lists: dict[str, Path], rows: Path
) -> Counts:
    """Task: write the documents of each slice that the rules allow, and a table of the others."""
    counts = Counts({}, [])
    recipe = parse_recipe(rules, "of the run", lists)
    splitter = recipe.new_splitter()
    removed = list[tuple[str, int, str, float, str, str | None]]()
    field = recipe.url_field
    for part, output in zip(group, outputs, strict=True):
        with open_jsonl_writer(output) as sink:
            for document in read_documents(part, counts, Rejects(output)):
                url = ""
                if field:
                    url = str(document.value(field) or "")
                size = document.read_bytes
                label, score = recipe.language_of(document.value)
                decision = recipe.judge(document.text, splitter, url, label, score)
                if decision.rule:
                    removed.append((*document.key, decision.rule, decision.value, decision.detail, document.own_id))
                    counts.add(part.source, decision.rule, size)
                    continue
                counts.add_replaced(decision.replaced)
                document.replace_text(decision.text)
                sink.write(document.to_json())
                counts.add_written(part.source, utf8_size(document.text), size)
    write_rows(rows, REMOVED, removed)
    return counts


if __name__ == "__main__":
    command(filter_quality)
