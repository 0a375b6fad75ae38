"""Stage: decide which documents are in the train set, how often, and which are held out; no text is written.

Decisions are made from facts of the documents (mixing/decisions.py): those that a pass over the corpus noted, or that
the command notes first, and which stay in the output folder. So after a change of weights, seed, holdout or duplicates
no text is read again. The stages `encode` and `train_tokenizer` read the decisions. Train set and holdout have the
documents that pass1, pass2 and dedup_train would write.
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
from gristmill.engine.facts import count_files, list_facts, plan_facts
from gristmill.engine.options import RunOptions
from gristmill.engine.run import open_stage
from gristmill.engine.task import Stage, Task
from gristmill.io.corpus import list_corpus
from gristmill.io.documents import source_of, sources_of
from gristmill.io.facts import paths_of_facts
from gristmill.steps import DocumentStep
from preprocessing.datasets import shares_table, source_amounts, source_weights
from preprocessing.document_pass import NOTED
from preprocessing.mixing.band_epochs import bands_table, choose_epochs
from preprocessing.mixing.decisions import choose_holdout, decide_tasks
from preprocessing.mixing.drops import DUPLICATE, check_all_found, drops_task, note_provenance
from preprocessing.mixing.facts import FactsByFile, GroupFacts
from preprocessing.mixing.first_texts import FirstTexts
from preprocessing.mixing.keep_list import find_listed_texts
from preprocessing.mixing.mix_manifest import (
    DecisionsFile,
    MixManifest,
    decisions_name,
    mix_manifest_path,
    write_mix_manifest,
)
from preprocessing.mixing.sampling import check_seed
from preprocessing.mixing.split import check_holdout
from preprocessing.prepare import STAGE as PREPARE
from preprocessing.prepare import prepare
from preprocessing.scoring.score_choice import ScoreBands
from preprocessing.steps.text_digest import TextDigest
from preprocessing.steps.token_count import TokenCount

OfSources = Annotated[Mapping[str, float] | str, tyro.conf.arg(constructor=str, metavar="TEXT|FILE.toml")]
STAGE = Stage("mix", version=7, libraries=("zstandard", "pyarrow"))
FACTS = "facts"  # folder of the facts that are noted where no pass before has done it
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
    low_scores: Path | None = None,
    bands: Path | None = None,
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
        bytes: Instead of weights, bytes of text of each source in the mix: book=2e9,web=8e9, or a file. Epochs are
            computed from the documents that are neither short nor duplicates.
        tokens: Or tokens of each source, without the tokens that begin and end documents.
        tokenizer: The tokenizer that counts them, as encode takes it.
        keep_list: File of lines `keep KEY` and `drop KEY`, as gristmill browse writes them, and `drop sha256:DIGEST`,
            as gristmill trace shows them: a document to keep is not dropped as short or duplicate, a document to drop
            always is, and so is each with a text to drop.
        low_scores: Documents to drop whose scores are too low, .pickle or .parquet, as choose_by_score lists them.
        bands: The bands of a score, .json, as choose_by_score writes them; their weights multiply the sources' weights.

    Returns:
        Documents read, in the train set (written), repeated, held out, and left out, per source and reason. One of
        which the text is held out, too, counts as in the holdout.
    """
    check_seed(seed)
    check_holdout(holdout)
    sources = sources_of(list_corpus(input_dir, text_column=text_column))
    source_weights(weights, sources)
    source_amounts(bytes, tokens, tokenizer, weights, sources)
    steps: list[DocumentStep] = [TextDigest()]
    if tokenizer:
        steps.append(TokenCount.of(tokenizer))
    facts_dir = out_dir / FACTS
    noting = replace(PREPARE, name="note_facts")
    noted, _ = prepare(input_dir, None, facts_dir, steps, options, text_column=text_column, stage=noting)
    counts = mix_facts(
        facts_dir, out_dir, duplicates, short_docs, weights, seed, holdout, options,
        bytes=bytes, tokens=tokens, tokenizer=tokenizer, keep_list=keep_list, low_scores=low_scores, bands=bands,
    )  # fmt: skip
    return _join_counts(noted, counts)


def mix_facts(
    facts_dir: Path,
    out_dir: Path,
    duplicates: Path | None = None,
    short_docs: Path | None = None,
    weights: Mapping[str, float] | str = "",
    seed: int = 1,
    holdout: float = 0.0017,
    options: RunOptions = RunOptions(),
    *,
    bytes: Mapping[str, float] | str = "",
    tokens: Mapping[str, float] | str = "",
    tokenizer: Path | None = None,
    keep_list: Path | None = None,
    low_scores: Path | None = None,
    bands: Path | None = None,
    first: FirstTexts | None = None,
    low_after_copies: Path | None = None,
    failed: Path | None = None,
    scored: Path | None = None,
) -> Counts:
    """Decide as `mix` does, from the facts of a pass with the steps TextDigest and TokenCount: no text is read.

    Args:
        facts_dir: Folder of facts that prepare wrote.
        out_dir: OUT/mix, for the decisions, which encode and train_tokenizer read.
        tokenizer: The tokenizer that TokenCount counted tokens with.
        first: The texts that the first stage of a run wrote, if later ones wrote others: `keep_list` drops documents by
            these, too.
        low_after_copies: More documents to drop, .parquet, as their scores after copies are too low.
        failed: Documents on which these scores failed, .parquet; they are dropped, and count as failed.
        scored: Folder of facts with the scores of `bands`, where score_after_copies noted them.

    The other arguments and what is returned: see mix.
    """
    check_seed(seed)
    check_holdout(holdout)
    reads = {facts_dir: list_facts(facts_dir)}
    if scored:
        reads[scored] = list_facts(scored)
    with open_stage(STAGE, out_dir, options, reads=reads, files=[mix_manifest_path(out_dir)]) as run:
        files = [file for file in plan_facts(run, facts_dir) if file.slices]
        drops = dict[tuple[str, ...], Path]()
        sources = set[str]()
        for file in files:
            drops[file.corpus_files] = run.work / "drops" / f"{file.path}.npz"
            sources.add(source_of(file.corpus_files[0]))
        amounts = source_amounts(bytes, tokens, tokenizer, weights, sources)
        source_weight = source_weights(weights, sources)
        absent = tuple(sorted(source for source, weight in source_weight.items() if not weight))
        listed = find_listed_texts(run, keep_list, paths_of_facts(facts_dir, files), first)
        split = drops_task(
            drops, duplicates, short_docs, absent, keep_list, options, low_scores, listed, low_after_copies, failed
        )
        dropped = run.step("drops", [split])
        ((named, both, is_of_others),) = dropped.values(tuple[int, int, bool])
        note_provenance(duplicates, is_of_others, options)
        score_bands = ScoreBands.read(bands) if bands else None
        by_file = FactsByFile(plan_facts(run, scored, "scores"), scored) if score_bands and scored else None
        known = list[GroupFacts]()
        for file in files:
            overlapping = by_file.overlapping(file) if by_file else None
            known.append(
                GroupFacts.of(file, facts_dir, drops[file.corpus_files], bool(tokens), score_bands, overlapping)
            )
        chosen = choose_epochs(run, source_weight, amounts, known, seed, FAN_IN, score_bands)
        source_weight = chosen.weights
        epochs = chosen.epochs
        limits, digests, digest_bytes = choose_holdout(run, known, epochs, holdout, seed, FAN_IN)
        outputs = [out_dir / decisions_name(file.path) for file in files]
        documents = [file.documents for file in files]
        decided = run.step(
            "decide", decide_tasks(known, outputs, epochs, limits, digests, seed, digest_bytes, documents)
        )
        key_sets = (duplicates, short_docs, low_scores, low_after_copies, failed, keep_list)
        check_all_found(decided.counts, named, filter(None, key_sets))
        decisions = list[DecisionsFile]()
        for file, sizes in zip(files, decided.joined_values(tuple[int, int]), strict=True):
            decisions.append(DecisionsFile(decisions_name(file.path), file.slices, *sizes))
        manifest = MixManifest(seed, source_weight, holdout, decisions, chosen.bands)
        path = mix_manifest_path(out_dir)
        run.step("manifest", [Task("manifest", write_mix_manifest, {"manifest": manifest, "path": path}, (path,))])
        read = run.note("files that are read", count_files(files))
        counts = run.finish(decided.counts.merge(read))
        if both and run.ran and not options.quiet:
            kinds = "short or low-scored" if low_scores else "short"
            print(f"note: {both:,} of the {kinds} documents are duplicates, too, and count as {kinds}", file=sys.stderr)
    if not options.quiet:
        wide_console().print(shares_table(source_weight, counts, amounts))
        if chosen.bands:
            wide_console().print(bands_table(chosen.bands))
    if run.ran and not (options.quiet or options.of_run):  # a run says it with its own limits
        for line in warn_of_losses(counts, DUPLICATE).values():
            print(f"warning: {line}", file=sys.stderr)
    return counts


def _join_counts(noted: Counts, decided: Counts) -> Counts:
    """Return the counts of the command: documents read and malformed as noted, and by which reason each left."""
    counts = Counts({}, []).merge(noted)
    for reasons in counts.tallies.values():
        reasons.pop(NOTED, None)
    for source, reason, tally in decided.rows():
        if reason != READ:  # counted when it was noted
            counts.add(source, reason, tally.bytes, tally.documents)
    return counts


if __name__ == "__main__":
    command(mix)
