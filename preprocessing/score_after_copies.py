"""Stage: score the documents that neither rules nor copies leave out; the scores are facts, in a folder of their own.

It reads the corpus once more, for models that are too slow to score copies, too. Which documents are left is found as
the mix finds it.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gristmill.counts import Counts
from gristmill.engine.facts import list_facts, plan_facts
from gristmill.engine.options import RunOptions
from gristmill.engine.run import open_stage
from gristmill.engine.slices import cut_raw_corpus, group_slices
from gristmill.engine.task import FileSet, Task
from gristmill.io.corpus import list_corpus
from gristmill.io.documents import names_of, paths_of
from gristmill.io.facts import paths_of_facts
from gristmill.steps import DocumentStep
from preprocessing.document_pass import list_removed
from preprocessing.mixing.drops import drops_task
from preprocessing.mixing.first_texts import FirstTexts
from preprocessing.mixing.keep_list import find_listed_texts
from preprocessing.prepare import STAGE as PREPARE
from preprocessing.prepare import PassPlan, stage_of

STAGE = replace(PREPARE, name="score_after_copies")


def score_after_copies(
    input_dir: Path,
    facts_dir: Path,
    scores_dir: Path,
    steps: Sequence[DocumentStep],
    duplicates: Path,
    short_docs: Path,
    options: RunOptions = RunOptions(),
    *,
    text_column: str = "text",
    absent: Sequence[str] = (),
    keep_list: Path | None = None,
    low_scores: Path | None = None,
    removed: Path | None = None,
    max_failed: float = 0.0,
    first: FirstTexts | None = None,
) -> Counts:
    """Note the scores of the documents that a mix of the corpus would not leave out.

    Args:
        input_dir: The clean corpus: the folder of all sources.
        facts_dir: Folder of the facts of all its documents, which the mix reads.
        scores_dir: Output folder of the facts with the scores.
        steps: The scores.
        duplicates: The duplicates that the mix drops.
        short_docs: The short documents that it drops.
        options: Workers, memory, and when to stop; they change no output.
        text_column: The column or field that holds the text.
        absent: The sources of weight 0.
        keep_list: Documents that the mix keeps or drops by name; see mix.
        low_scores: The documents that it drops as scores of the first pass are too low.
        removed: Output, a table of the documents on which a score failed.
        max_failed: Fraction of the documents on which scores may fail; see prepare.
        first: The texts by which `keep_list` drops documents, too; see mix_facts.

    Returns:
        Documents read, noted, left out by each reason, and failed, per source.
    """
    files = sorted(list_corpus(input_dir, text_column=text_column), key=lambda file: file.name)
    reads = {input_dir: paths_of(files), facts_dir: list_facts(facts_dir)}
    steps = tuple(steps)
    more = [removed] if removed else []
    with open_stage(
        stage_of(STAGE, steps, files), scores_dir, options, reads=reads, publishes=[scores_dir], files=more
    ) as run:
        facts = paths_of_facts(facts_dir, plan_facts(run, facts_dir))
        drops = dict[tuple[str, ...], Path]()
        for group in group_slices(cut_raw_corpus(run, files)):
            drops[names_of(group)] = run.work / "drops" / f"{group[0].name}.npz"
        listed = find_listed_texts(run, keep_list, facts, first)
        split = drops_task(drops, duplicates, short_docs, tuple(absent), keep_list, options, low_scores, listed)
        run.step("drops", [split])
        plan = PassPlan(run, scores_dir, steps, {}, (), "", sets_aside=max_failed > 0, drops=drops)
        done = plan.only_note(files)
        noted = plan.finish_facts(done)
        if removed:
            arguments = {"facts": FileSet(tuple(noted)), "output": removed}
            run.step("removed", [Task("removed", list_removed, arguments, (removed,))])
        done.counts.check_failed(STAGE.name, max_failed, removed)
        return run.finish(done.counts)
