"""The stage `filter` of a run: list the documents that are too short, from facts. No text is read."""

from pathlib import Path

from gristmill.batches import batched
from gristmill.counts import READ, Counts
from gristmill.engine.facts import count_files, list_facts, plan_facts
from gristmill.engine.key_sets import merge_task
from gristmill.engine.options import RunOptions
from gristmill.engine.run import open_stage
from gristmill.engine.task import FileSet, Task
from gristmill.io.artefacts import is_table
from gristmill.io.documents import source_of
from gristmill.io.facts import paths_of_facts, written_by_file
from gristmill.io.files import STATE_DIR
from gristmill.io.keys import KeyBlocks, write_keys
from gristmill.steps import FORM_BYTES, FORM_CHARACTERS
from preprocessing.filter import KEPT, SHORT, STAGE
from preprocessing.minimum_length import SizeUnit, check_threshold
from preprocessing.mixing.first_texts import FirstTexts
from preprocessing.mixing.keep_list import reject_stale_lines

_FACTS_FILES = 64  # read by one task


def list_short(
    facts_dir: Path,
    output_file: Path,
    threshold: int,
    options: RunOptions = RunOptions(),
    unit: SizeUnit = "character",
    keep_list: Path | None = None,
    first: FirstTexts | None = None,
) -> Counts:
    """List the short documents as `filter` does, from the facts of a pass with the step Fingerprint: no text is read.

    This is the first stage of a run that reads the facts, so it refuses a list that the mix would refuse later.

    Args:
        facts_dir: Folder of facts that prepare wrote.
        output_file: The key set, .pickle or .parquet.
        threshold: Minimum size of the matching form of a document to keep, in units.
        options: Workers, memory, and when to stop; they change no output.
        unit: Unit of the threshold: character, or byte of UTF-8.
        keep_list: The list of documents that the mix will be given. A line that fits no document is an error now.
        first: The texts that the first stage of the run wrote, if later ones wrote others.

    Returns:
        Documents read, kept and short, per source.
    """
    check_threshold(threshold)
    is_table(output_file)  # raises for an unknown suffix now, before the work
    with open_stage(
        STAGE,
        output_file.parent,
        options,
        reads={facts_dir: list_facts(facts_dir)},
        files=[output_file],
        label=output_file.name,
    ) as run:
        files = plan_facts(run, facts_dir)
        reject_stale_lines(run, keep_list, facts_dir, files, first)
        paths = paths_of_facts(facts_dir, files)
        tasks = list[Task]()
        for bundle in batched(paths, count=_FACTS_FILES):
            name = bundle[0].relative_to(facts_dir).as_posix()
            output = run.ledger.root / STATE_DIR / run.output / f"{name}.short.parquet"
            arguments = {"facts": FileSet(tuple(bundle)), "threshold": threshold, "unit": unit, "output": output}
            tasks.append(Task(name, find_short_rows, arguments, (output,)))
        listed = run.step("find", tasks)
        run.step("merge", [merge_task(listed.paths(), output_file, options.memory_bytes)])
        read = run.note("files that are read", count_files(files))
        return run.finish(listed.counts.merge(read))


def find_short_rows(facts: FileSet, threshold: int, unit: SizeUnit, output: Path) -> Counts:
    """Task: write the keys of the short documents in some files of facts."""
    counts = Counts({}, [])
    short = KeyBlocks()
    measure = FORM_CHARACTERS if unit == "character" else FORM_BYTES
    for path in facts.paths:
        for name, facts_of_file in written_by_file(path, (measure, "bytes")):
            is_short_row = facts_of_file[measure].to_numpy() < threshold
            sizes = facts_of_file["bytes"].to_numpy()
            for reason, chosen in ((SHORT, is_short_row), (KEPT, ~is_short_row)):
                if chosen.any():
                    counts.add(source_of(name), READ, int(sizes[chosen].sum()), int(chosen.sum()))
                    counts.add(source_of(name), reason, int(sizes[chosen].sum()), int(chosen.sum()))
            short.add(name, facts_of_file["row"].to_numpy()[is_short_row])
    write_keys(output, short.join())
    return counts
