"""Benchmark: MinHash signatures, LSH and connected components, ours against other libraries.

python benchmarks/bench_dedup.py NORM/
"""

import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import numpy as np
import tyro
from numpy.typing import NDArray
from tyro.conf import Positional

from benchmarks.dedup_rounds import Measurement, find_installed, run_rounds
from benchmarks.dedup_tables import REFERENCE, calibration_range, graph_table, signature_table
from benchmarks.peers_graph import GraphContender, graph_contenders
from benchmarks.peers_graph import Table as GraphTable
from benchmarks.peers_minhash import assert_equal_to_datasketch, contenders
from benchmarks.sample_documents import draw_sample, make_pairs
from gristmill.command import run_with_exit_code
from gristmill.engine.options import parse_size
from gristmill.errors import UsageError
from gristmill.text import utf8_size

SLOTS = 128
EDGE_CASES = [
    "", "short", "exactly13char", "İstanbul ΟΔΟΣ ΣΑΣ, Straße ﬁne", "一二三四五六七八九十百千萬億兆京",
    "a\u2003b\u3000c\x1cd" * 9, "🂡🂢🂣 emoji 👩‍👩‍👧 and e\u0301 accents, " * 3,
]  # fmt: skip
_TITLES = {
    "lsh": "LSH step, one core: 128 × uint32, 9 bands of 13 rows, a fifth of them copies with slot agreement U(0.8, 1)",
    "components": "Connected components, one core: random edges, 1.2 nodes an edge",
}


def bench_dedup(
    inputs: Positional[tuple[Path, ...]],
    sample: str = "2MB",
    rounds: int = 3,
    seconds: float = 1.0,
    clock: Literal["wall", "cpu"] = "wall",
    pairs: int = 200,
    signatures: int = 1_000_000,
    edges: int = 5_000_000,
    only: tuple[str, ...] = (),
    python: tuple[Path, ...] = (),
) -> None:
    """Measure ours and the installed peers on the same documents.

    In each round, each contender runs in its own process, single-threaded, in rotating order; compilation
    and warm-up are not timed. The columns for two cores are two processes, each with half of the documents.
    Asserts that our signatures equal datasketch's, and that all contenders find the same number of components.

    Args:
        inputs: A corpus folder, or files of it: .jsonl, .jsonl.zst and the others.
        sample: Size of the sample of documents to compute signatures of, such as 2MB.
        rounds: Runs of each contender.
        seconds: Minimum duration of each measurement: the contender repeats its work until then.
        clock: wall time, or cpu: processor time, for a shared machine.
        pairs: Document pairs of known similarity, to measure the error of estimated similarities.
        signatures: Synthetic signatures for the LSH table, a tenth of them for slow contenders; 0 omits the table.
        edges: Random edges for the components table, a tenth of them for slow contenders; 0 omits the table.
        only: Parts of names: run only contenders whose name contains one of them, and SlimPajama's algorithm.
        python: Other Python interpreters, with packages whose requirements conflict with ours.
    """
    if (
        rounds < 1
        or not seconds >= 0
        or pairs < 0
        or min(signatures, edges) < 0
        or {signatures, edges} & set(range(1, 10))
    ):
        raise UsageError(
            f"--rounds {rounds} --seconds {seconds} --pairs {pairs} --signatures {signatures} --edges {edges}: "
            "expected 1 round or more, nothing below 0, and 10 signatures and edges or more, or 0 of them"
        )
    texts = draw_sample(inputs, parse_size(sample))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        results = find_installed(contenders(), python, (*only, REFERENCE) if only else ())
        _measure_signatures(
            texts, make_pairs(texts, pairs), results, folder, rounds, {"seconds": seconds, "clock": clock}
        )
        for table in _signature_tables(texts, results, clock):
            print(table, flush=True)
        for name, count in (("lsh", signatures), ("components", edges)):
            found = find_installed(graph_contenders(name), python, only)  # type: ignore[arg-type]
            if count and found:
                print(_measure_graphs(name, count, found, folder, rounds, clock), flush=True)  # type: ignore[arg-type]


def _measure_signatures(
    texts: list[str], pairs: list[tuple[str, str]], results: list[Measurement], folder: Path, rounds: int,
    options: dict[str, Any],
) -> None:  # fmt: skip
    path = folder / "texts.json"
    path.write_text(json.dumps({"texts": texts, "pairs": pairs}))
    task = {"table": "signatures", "input": str(path), **options}
    run_rounds(results, rounds, {cores: [task | {"part": i, "parts": cores} for i in range(cores)] for cores in (1, 2)})


def _signature_tables(texts: list[str], results: list[Measurement], clock: str) -> Iterator[str]:
    megabytes = {cores: [sum(map(utf8_size, texts[i::cores])) / 1e6 for i in range(cores)] for cores in (1, 2)}
    reference = next(
        (result for result in results if result.is_measured and result.contender.name.startswith(REFERENCE)), None
    )
    notes = [_check_equality(texts, results), f"{clock} time; {calibration_range(results)}"]
    for features in ("13 characters", "words"):
        chosen = [result for result in results if getattr(result.contender, "features", "") == features]
        title = f"Signatures, shingles of {features}: {len(texts):,} documents, {megabytes[1][0]:.2f} MB"
        if chosen:
            yield signature_table(title, chosen, reference, megabytes, len(texts), notes)


def _check_equality(texts: Sequence[str], results: Sequence[Measurement]) -> str:
    here = Path(sys.executable)
    if not any(result.python == here and result.contender.majors == {"datasketch": 2} for result in results):  # type: ignore[union-attr]
        return "datasketch 2 is not installed or not selected: equality with it was not checked"
    checked = assert_equal_to_datasketch(EDGE_CASES + [text[:5000] for text in texts[:40]])
    return f"asserted equal: {', '.join(checked)}"


def _measure_graphs(
    table: GraphTable, count: int, results: Sequence[Measurement], folder: Path, rounds: int, clock: str
) -> str:
    """Measure all contenders on a tenth of the input, then all but the slow ones on the whole input."""
    measured: list[tuple[int, Measurement]] = []
    for size in (count // 10, count):
        nodes, path = size if table == "lsh" else size * 6 // 5, folder / f"{table}.npy"
        np.save(path, synthetic_signatures(size) if table == "lsh" else random_edges(size, nodes))
        chosen = [
            Measurement(result.contender, result.python, result.version)
            for result in results
            if size < count or not _is_slow(result)
        ]
        run_rounds(
            chosen, rounds, {1: [{"table": table, "input": str(path), "seconds": 0.0, "clock": clock, "nodes": nodes}]}
        )
        found = {number for result in chosen for report in result.all_reports() for number in report["components"]}
        assert len(found) <= 1, f"contenders differ in the number of components: {found}"
        measured += [(size, result) for result in chosen]
    return graph_table(
        _TITLES[table],
        measured,
        [
            "asserted: all contenders find the same number of components",
            f"{clock} time; {calibration_range(result for _, result in measured)}",
        ],
    )


def _is_slow(result: Measurement) -> bool:
    return isinstance(result.contender, GraphContender) and result.contender.slow


def synthetic_signatures(count: int, seed: int = 0) -> NDArray[np.uint32]:
    """Random signatures (count × 128); every fifth has a fraction U(0.8, 1) of the slots of an earlier one."""
    random = np.random.default_rng(seed)
    made = random.integers(1 << 32, size=(count, SLOTS), dtype=np.uint32)
    for copy in range(5, count, 5):
        agrees = random.random(SLOTS) < random.uniform(0.8, 1)
        made[copy, agrees] = made[random.integers(copy), agrees]
    return made


def random_edges(count: int, nodes: int, seed: int = 0) -> NDArray[np.int64]:
    """Random edges (count × 2, int64): node indices drawn uniformly from `nodes`."""
    return np.random.default_rng(seed).integers(nodes, size=(count, 2), dtype=np.int64)


if __name__ == "__main__":
    sys.exit(run_with_exit_code(lambda: tyro.cli(bench_dedup, use_underscores=True)))
