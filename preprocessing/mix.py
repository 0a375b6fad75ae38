"""Stage: decide which documents are in the train set, how often, and which are held out; no text is written.

The corpus is read once for facts of its documents (mixing/facts.py), which stay in the output folder: after a change of
weights, seed, holdout or duplicates, decisions are made anew (mixing/decisions.py) without a text being read. The stage
`encode` reads them. Train set and holdout have the documents that pass1, pass2 and dedup_train would write.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import tyro

from gristmill.command import command
from gristmill.console import wide_console
from gristmill.counts import READ, Counts, warn_of_losses
from gristmill.engine.options import RunOptions
from gristmill.engine.run import open_stage
from gristmill.engine.slices import cut_corpus, group_slices
from gristmill.engine.task import Stage, Task
from gristmill.io.corpus import list_corpus
from gristmill.io.documents import paths_of
from gristmill.io.tokenizer_file import find_tokenizer_file
from preprocessing.datasets import shares_table, source_amounts, source_weights
from preprocessing.mixing.decisions import GroupFacts, choose_epochs, choose_holdout, decide_tasks
from preprocessing.mixing.drops import DUPLICATE, check_all_found, drops_task, note_provenance
from preprocessing.mixing.facts import NOTED, facts_path, facts_task
from preprocessing.mixing.mix import files_of
from preprocessing.mixing.mix_manifest import (
    MixManifest,
    cuts_of,
    decisions_path,
    mix_manifest_path,
    write_mix_manifest,
)
from preprocessing.mixing.sampling import check_seed
from preprocessing.mixing.split import check_holdout

OfSources = Annotated[Mapping[str, float] | str, tyro.conf.arg(constructor=str, metavar="TEXT|FILE.toml")]
STAGE = Stage("mix", version=1, libraries=("zstandard", "pyarrow"))
FAN_IN = 256  # files that a task opens at once


def mix(
    input_dir: Path,
    out_dir: Path,
    duplicates: Path | None = None,
    short_docs: Path | None = None,
    weights: OfSources = "",
    seed: int = 1,
    holdout: float = 0.0017,
    options: RunOptions = RunOptions(),
    text_column: str = "text",
    *,
    bytes: OfSources = "",
    tokens: OfSources = "",
    tokenizer: Path | None = None,
    keep_list: Path | None = None,
) -> Counts:
    """Decide which documents are in the train set, how often, and which are held out.

    Args:
        input_dir: The clean corpus: the folder of all sources.
        out_dir: OUT/mix, for facts and decisions, which encode and train_tokenizer read.
        duplicates: The duplicates to drop, .pickle or .parquet; none are dropped without it.
        short_docs: The short documents to drop, .pickle or .parquet; none are dropped without it.
        weights: Epochs of each source: book=2.5,c4=1 (a name with a comma in double quotes: "a,b"=2), or a .toml
            file, or in Python a mapping; the weights in preprocessing/datasets.py are the defaults.
        seed: Seed of all random choices.
        holdout: Fraction of each source's documents to hold out, at least one of a source with two or more.
        options: Workers, memory, and when to stop; they change no output.
        text_column: The column or field that holds the text.
        bytes: In place of weights, bytes of text that the mix has of each source: book=2e9,web=8e9, or a file. Epochs
            follow from what is neither short nor a duplicate, as a fraction of the documents.
        tokens: Or tokens, without those that begin and end documents.
        tokenizer: The tokenizer that counts them, as encode takes it.
        keep_list: A file of lines `keep KEY` and `drop KEY`, as gristmill browse writes it: what it keeps is not
            dropped as short or duplicate, what it drops is.

    Returns:
        Documents read, in the train set (written), repeated, held out, and left out, per source and reason. One of
        which the text is held out, too, counts as in the holdout.
    """
    check_seed(seed)
    check_holdout(holdout)
    files = list_corpus(input_dir, text_column=text_column)
    sources = {file.source for file in files}
    amounts = source_amounts(bytes, tokens, tokenizer and find_tokenizer_file(tokenizer), weights, sources)
    source_weight = source_weights(weights, sources)
    stage = STAGE
    if amounts.tokenizer:
        library = "sentencepiece" if amounts.tokenizer.suffix == ".model" else "tokenizers"
        stage = replace(stage, libraries=(*stage.libraries, library))
    with open_stage(stage, out_dir, options, reads={input_dir: paths_of(files)}, publishes=[out_dir]) as run:
        slices = cut_corpus(run, files)
        groups = group_slices(slices)
        facts = {group: facts_path(group, out_dir) for group in groups}
        noted = run.step("facts", [
            facts_task(group, amounts.tokenizer if group[0].source in amounts.of else None, path)
            for group, path in facts.items()
        ])  # fmt: skip
        drops = {files_of(group): run.work / "drops" / f"{group[0].name}.npz" for group in groups}
        absent = tuple(sorted(source for source, weight in source_weight.items() if not weight))
        dropped = run.step("drops", [drops_task(drops, duplicates, short_docs, absent, keep_list, options)])
        ((named, both, is_of_others),) = dropped.values(tuple[int, int, bool])
        note_provenance(duplicates, is_of_others, options)
        known = [GroupFacts.of(group, path, drops[files_of(group)]) for group, path in facts.items()]
        source_weight, epochs = choose_epochs(run, source_weight, amounts, known, seed, FAN_IN)
        limits, digests, digest_bytes = choose_holdout(run, known, epochs, holdout, seed, FAN_IN)
        outputs = [decisions_path(group, out_dir) for group in groups]
        facts_bytes = [record.outputs[0].size for record in noted.records]
        decided = run.step(
            "decide", decide_tasks(known, outputs, epochs, limits, digests, seed, digest_bytes, facts_bytes)
        )
        check_all_found(decided.counts, named, filter(None, (duplicates, short_docs, keep_list)))
        text_bytes = sum(map(sum, decided.values(list[int])))
        manifest = MixManifest(
            seed, source_weight, holdout, text_bytes, [part.label for part in slices], cuts_of(slices)
        )
        path = mix_manifest_path(out_dir)
        run.step("manifest", [Task("manifest", write_mix_manifest, {"manifest": manifest, "path": path}, (path,))])
        counts = run.finish(_join_counts(noted.counts, decided.counts))
        if both and run.ran and not options.quiet:
            print(f"note: {both:,} of the short documents are duplicates, too, and count as short", file=sys.stderr)
    if not options.quiet:
        wide_console().print(shares_table(source_weight, counts, amounts))
    if run.ran and not (options.quiet or options.of_run):  # a run says it with its own limits
        for line in warn_of_losses(counts, DUPLICATE).values():
            print(f"warning: {line}", file=sys.stderr)
    return counts


def _join_counts(noted: Counts, decided: Counts) -> Counts:
    """Return the counts of the stage: documents read and malformed as noted, and by which reason each left."""
    counts = Counts({}, []).merge(noted)
    for reasons in counts.tallies.values():
        reasons.pop(NOTED, None)
    for source, reason, tally in decided.rows():
        if reason != READ:  # counted when it was noted
            counts.add(source, reason, tally.bytes, tally.documents)
    return counts


if __name__ == "__main__":
    command(mix)
