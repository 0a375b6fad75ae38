"""CPU time per document of the stages that compare signatures, on made-up signatures: a sample has too few of them."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np

from dedup.minhash.signature_shards import SUFFIX, write_shard
from gristmill_cli.estimate.stage_runs import SampleConfig, measure_cpu
from gristmill_cli.run_stages import plan_stages

_DOCUMENTS = (10_000, 50_000)  # of the two runs
_COPIED = 10  # every tenth document is a copy of the one before it
_FILE = "made/made.jsonl"
_STAGES = ("generate_connected_components", "generate_duplicates_dict")


def cpu_per_document(config: SampleConfig, folder: Path) -> dict[str, float]:
    """CPU seconds per document of the stages that compare signatures, or choose among those that are similar.

    Only of the first if the choice depends on the documents themselves. `config` is of a run that has finished.
    """
    reads_documents = config.dedup.verify or config.dedup.keep != "first"
    names = _STAGES[:1] if reads_documents else _STAGES
    few, many = (_compare(config, folder / f"{count}", count, names) for count in _DOCUMENTS)
    return {name: max(0.0, many[name] - few[name]) / (_DOCUMENTS[1] - _DOCUMENTS[0]) for name in names}


def _compare(config: SampleConfig, out: Path, documents: int, names: tuple[str, ...]) -> dict[str, float]:
    """CPU seconds of the stages on so many signatures."""
    values = np.random.default_rng(0).integers(0, 1 << 32, (documents, config.sketch.permutations), np.uint32)
    values[1::_COPIED] = values[::_COPIED]
    with write_shard(out / "minhash" / f"made+0{SUFFIX}", _FILE, config.sketch) as shard:
        shard.add(np.arange(documents), values)
    shutil.copyfile(config.out / "filtered.pickle", out / "filtered.pickle")
    config = replace(config, out=out)
    (config.clean / "made").mkdir(parents=True)
    (config.clean / _FILE).touch()  # is listed, and not read
    stages = {stage.name: stage for stage in plan_stages(config)}
    return {name: measure_cpu(stages[name])[1] for name in names}
