"""The stage `to_hash` of a run: write signature shards of what a pass signed. No text is read."""

from itertools import groupby
from operator import itemgetter
from pathlib import Path

from dedup.candidates.signature_shards import SUFFIX, write_shard
from dedup.minhash.signatures import Sketch
from dedup.steps.fingerprint import SHINGLES, SIGNATURE
from dedup.to_hash import NO_ROWS, STAGE, count_signed, plan_skipped, print_notes
from gristmill.counts import READ, Counts
from gristmill.engine.facts import count_files, list_facts, plan_facts
from gristmill.engine.options import RunOptions
from gristmill.engine.run import open_stage
from gristmill.engine.staleness.outputs import reject_unknown_files
from gristmill.engine.task import Task
from gristmill.io.documents import source_of
from gristmill.io.facts import FactsFile, VectorReader, vector_path, written_by_file
from gristmill.io.keys import is_among, read_split


def select_signatures(
    facts_dir: Path, output_dir: Path, sketch: Sketch, skip: Path | None = None, options: RunOptions = RunOptions()
) -> Counts:
    """Write signature shards as to_hash does, from the facts of a pass with the step Fingerprint.

    Args:
        facts_dir: Folder of facts that prepare wrote.
        output_dir: MINHASH/, the folder of signature shards to write.
        sketch: What the signatures were made with.
        skip: Keys of documents to leave out, such as the copies that pair_exact_copies found.
        options: Workers, memory, and when to stop; they change no output.

    Returns:
        Documents read, signed, skipped and too short (no shingle), per source.
    """
    with open_stage(
        STAGE, output_dir, options, reads={facts_dir: list_facts(facts_dir)}, publishes=[output_dir]
    ) as run:
        listed = plan_facts(run, facts_dir)
        files = [file for file in listed if file.documents]
        planned = list[Path]()
        for file in files:
            planned += _shards_of(file, output_dir).values()
        reject_unknown_files(output_dir, planned, (SUFFIX,), run.ledger)
        groups = [file.corpus_files for file in files]
        skipped, keys = plan_skipped(run, skip, groups, "keys")
        tasks = list[Task]()
        for file, group in zip(files, groups, strict=True):
            path = facts_dir / file.path
            shards = _shards_of(file, output_dir)
            given = {
                "facts": path,
                "vectors": vector_path(path, SIGNATURE),
                "shards": shards,
                "sketch": sketch,
                "skip": skipped.get(group),
            }
            tasks.append(Task(file.path, write_signed, given, tuple(shards.values())))
        signed = run.step("select", tasks)
        read = run.note("files that are read", count_files(listed))
        counts = run.finish(signed.counts.merge(read))
    if run.ran and not options.quiet:
        print_notes(counts, sketch, skip if keys else None)
    return counts


def _shards_of(file: FactsFile, output_dir: Path) -> dict[str, Path]:
    """Return the shard of each corpus file of which documents are in a file of facts, by its name."""
    shards = dict[str, Path]()
    for part in file.slices:
        if part.documents:
            shards[part.file] = output_dir / f"{part.file}+{part.first}{SUFFIX}"
    return shards


def write_signed(facts: Path, vectors: Path, shards: dict[str, Path], sketch: Sketch, skip: Path | None) -> Counts:
    """Task: write the signatures in a file of facts to the shard of each corpus file, without the keys in `skip`."""
    counts = Counts({}, [])
    names = tuple(shards)
    keys = read_split(skip, names) if skip else {}
    reader = VectorReader(vectors, SIGNATURE, sketch.permutations)
    for name, tables in groupby(written_by_file(facts, (SHINGLES, "bytes")), key=itemgetter(0)):
        skipped = keys.get(name, NO_ROWS)
        with write_shard(shards[name], name, sketch) as shard:
            for _, table in tables:
                rows = table.column("row").to_numpy()
                sizes = table.column("bytes").to_numpy()
                is_skipped = is_among(rows, skipped)
                is_signed = (table.column(SHINGLES).to_numpy() > 0) & ~is_skipped
                shard.add(rows[is_signed], reader.take(len(rows))[is_signed])
                counts.add(source_of(name), READ, int(sizes.sum()), len(rows))
                count_signed(counts, source_of(name), sizes, is_signed, is_skipped)
    return counts
