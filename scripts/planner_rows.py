"""Measured rows: steps of published training runs, read from the folder that score_planner.py is given.

They are vTrain's measured iteration times of Megatron-LM (Bang et al. 2024), and BigScience's sweep for BLOOM.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from gristmill.errors import InputError
from gristmill_planner.hardware import Cluster, find_device
from gristmill_planner.planned_run import MEGATRON, MEGATRON_DEEPSPEED, PlannedRun
from gristmill_planner.published_runs import divided_layers
from training.experimental.parallel_config import ParallelConfig
from training.model.model_config import ModelConfig

MULTI_NODE, SINGLE_NODE, BLOOM = "vtrain_multi_node_a100.csv", "vtrain_single_node_a100.csv", "bloom_384_a100_sweep.csv"
_COLUMNS = {
    "batch": "global batch", "micro": "micro batch", "width": "hidden size", "heads": "attention heads",
    "layers": "# layers", "seq_len": "sequence length", "tp": "tensor parallelism", "dp": "data parallelism",
    "pp": "pipeline parallelism",
}  # fmt: skip
_BLOOM_HEADS = {14400: 80, 13824: 64, 14336: 112, 12288: 96, 13312: 104}  # where the sweep's log names none
_BLOOM_SECTION_BF16 = "Rebalancing layers"  # the last runs: bf16, and embeddings counted as layers


@dataclass(frozen=True)
class MeasuredRow:
    """A run, and what was measured of it."""

    file: str
    line: int
    run: PlannedRun
    seconds: float | None
    """Of a step."""
    memory: float | None = None
    """Gigabytes of a GPU, as nvidia-smi counts them (2**30 bytes); infinite where it ran out."""
    zero: int = 0

    @property
    def size(self) -> str:
        """Model size for tables, such as "18B"."""
        model = self.run.model
        return f"{(12 * model.layers * model.width**2 + model.vocab_size * model.width) / 1e9:.3g}B"


def read_rows(folder: Path) -> list[MeasuredRow]:
    """All rows of the three files in `folder`. Raises InputError for a row that cannot be read."""
    multi = _read_vtrain(folder / MULTI_NODE, "a100-80gb", "full")
    single = _read_vtrain(folder / SINGLE_NODE, "a100-40gb", "none")
    return [*multi, *single, *_read_bloom(folder / BLOOM)]


def _read_vtrain(path: Path, device: str, recompute: str) -> Iterator[MeasuredRow]:
    for line, row in _rows(path):
        try:
            sizes = {name: int(float(row[column])) for name, column in _COLUMNS.items()}
            seconds = float(row["iteration time (ms)"]) / 1e3
        except (KeyError, ValueError) as error:
            raise InputError(f"{path}, line {line}: {error}; expected a number") from error
        cluster = Cluster(find_device(device), sizes["tp"] * sizes["dp"] * sizes["pp"])
        cluster = cluster.with_network(100e9)  # four cards of 200 Gb/s; one node uses none
        yield MeasuredRow(path.name, line, _run(sizes, 51_200, cluster, recompute, None), seconds)


def _read_bloom(path: Path) -> Iterator[MeasuredRow]:
    """Of the sweep's rows, those that name a whole layout."""
    for line, row in _rows(path):
        names = {"width": "hidden_ctx", "layers": "layers_ctx", "micro": "mbs", "tp": "tp", "dp": "dp", "pp": "pp"}
        if not all(row[column] for column in names.values()):
            continue
        sizes = {name: int(row[column]) for name, column in names.items()}
        if sizes["tp"] * sizes["dp"] * sizes["pp"] != int(row["gpus"]):
            continue
        heads = int(row["heads"] or _BLOOM_HEADS[sizes["width"]])
        sizes |= {"seq_len": 2048, "heads": heads, "batch": int(row["gbs"] or 2048)}
        cluster = Cluster(find_device("a100-80gb"), int(row["gpus"])).with_network(50e9)  # four cards of 100 Gb/s
        bf16 = row["section"] == _BLOOM_SECTION_BF16
        zero = int(row["zero"] or 1)  # as its scripts set it
        vocabulary = 50_304 if sizes["width"] == 14_400 else 250_880
        run = _run(sizes, vocabulary, cluster, "full", zero, ends=1 if bf16 else 0)
        memory = float("inf") if row["mem"] == "OOM" else float(row["mem"].removesuffix("GB") or 0) or None
        seconds = float(row["sec_it"]) if row["sec_it"] not in ("", "x") else None
        yield MeasuredRow(path.name, line, replace(run, precision="bf16" if bf16 else "fp16"), seconds, memory, zero)


def _run(
    sizes: dict[str, int], vocabulary: int, cluster: Cluster, recompute: str, zero: int | None, ends: int = 0
) -> PlannedRun:
    """`ends`: layers that an embedding or the head counts as when the layers are divided over the stages."""
    width, seq_len, dp, tp, pp = (sizes[name] for name in ("width", "seq_len", "dp", "tp", "pp"))
    model = ModelConfig(preset="gpt2", layers=sizes["layers"], width=width, heads=sizes["heads"], context=seq_len)
    count = sizes["batch"] // (dp * sizes["micro"])
    layout = ParallelConfig(
        dp=dp, tp=tp, pp=pp, virtual_stages=1, micro_batches=count, zero=1 if zero else 0, zero_group=dp if zero else 1
    )
    batch = count * dp * sizes["micro"]
    layers = divided_layers(sizes["layers"], pp, ends)
    full = model.resolve(vocabulary, seq_len)
    software = MEGATRON_DEEPSPEED if zero is not None else MEGATRON
    return PlannedRun(full, layout, batch, seq_len, cluster, recompute, software, layers)  # type: ignore[arg-type]


def _rows(path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    if not path.is_file():
        raise InputError(f"{path} does not exist; expected a folder with {MULTI_NODE}, {SINGLE_NODE} and {BLOOM}")
    with path.open(encoding="utf-8", newline="") as lines:
        yield from enumerate(csv.DictReader(lines), 2)
