"""Scores of a fastText model: what they add to the pass that writes a corpus, and MB/s of a core beside datatrove.

    python benchmarks/bench_scores.py CORPUS MODEL --label positive --peer PYTHON

The pass runs without and with scores, in turns, in two workers; processor time as its record has it. PYTHON is an
interpreter with datatrove, of an environment of its own: both sides score the same texts in turns, each in one process.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import tyro

from gristmill.io.readers import read_corpus
from gristmill.text import utf8_size

_STAGE = "normalize_text"  # the pass of a run without rules


def main(
    corpus: tyro.conf.Positional[Path],
    model: tyro.conf.Positional[Path],
    label: str,
    peer: Path | None = None,
    rounds: int = 3,
    every: int = 16,
) -> None:
    """Print what scores add to a pass in each round; with a peer, MB/s of both sides and the documents that each keeps.

    Args:
        corpus: A corpus folder.
        model: A supervised fastText model with two labels.
        label: The label whose probability is the score, without __label__; at 0.5 a document is kept.
        peer: Interpreter with datatrove.
        rounds: Runs of each side, in turns.
        every: Score each n-th document beside the peer.
    """
    scores = f"[scores.model]\nfasttext = {json.dumps(str(model.resolve()))}\nlabel = {json.dumps(label)}\n"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shares = list[float]()
        for _ in range(rounds):
            plain = run_pass(corpus, folder, "")
            scored = run_pass(corpus, folder, scores)
            shares.append(scored / plain - 1)
            print(f"pass {plain:.2f} core seconds, with scores {scored:.2f}: {shares[-1]:.1%} more", flush=True)
        print(f"median {median(shares):.1%}")
        if peer:
            compare(corpus, model, label, {"datatrove": peer, "ours": Path(sys.executable)}, folder, rounds, every)


def run_pass(corpus: Path, folder: Path, scores: str) -> float:
    """Return the core seconds of a pass over a corpus, by its record."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        config = Path(name) / "pipeline.toml"
        out = Path(name) / "out"
        paths = f"corpus = {json.dumps(str(corpus.resolve()))}\nout = {json.dumps(str(out))}\nworkers = 2\n"
        config.write_text(paths + scores)
        command = [sys.executable, "-m", "gristmill_cli", "run", str(config), "--until", _STAGE]
        subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).resolve().parents[1])
        record = json.loads((out / f".gristmill/run/{_STAGE}.json").read_text())
        return float(record["core_seconds"])


def compare(
    corpus: Path, model: Path, label: str, sides: dict[str, Path], folder: Path, rounds: int, every: int
) -> None:
    """Print MB/s of each side, the fastest of the rounds, and how many documents it keeps."""
    texts = [document.text for document in read_corpus(corpus)][::every]
    megabytes = sum(utf8_size(text) for text in texts) / 1e6
    source = folder / "texts.json"
    source.write_text(json.dumps(texts))
    output = folder / "out.json"
    script = Path(__file__).with_name("scores_peer.py")
    speeds = {side: list[float]() for side in sides}
    kept = dict[str, int]()
    for _ in range(rounds):
        for side, python in sides.items():
            subprocess.run([python, script, side, model, label, source, output], check=True, capture_output=True)
            result = json.loads(output.read_text())
            speeds[side].append(megabytes / result["seconds"])
            kept[side] = result["kept"]
    for side in sides:
        print(f"{side}: {max(speeds[side]):.1f} MB/s a core, keeps {kept[side]:,} of {len(texts):,} documents")


if __name__ == "__main__":
    tyro.cli(main)
