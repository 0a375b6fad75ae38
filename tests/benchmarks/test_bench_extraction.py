"""bench_extraction runs, on generated pages and on a checkout of real ones."""

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patience

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_extraction.py"


@pytest.mark.parametrize("arguments", [[], ["--real", "checkout"]])
def test_the_table_has_a_row_per_extractor(tmp_path: Path, arguments: list[str]) -> None:
    text = "The mill grinds the grain that the farmers bring."
    (tmp_path / "checkout/html").mkdir(parents=True)
    (tmp_path / "checkout/ground-truth.json").write_text(json.dumps({"a": {"articleBody": text}}))
    (tmp_path / "checkout/html/a.html.gz").write_bytes(gzip.compress(f"<p>{text}</p><p>Imprint".encode()))
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patience(60))
    assert done.returncode == 0, done.stderr
    first, *rows = done.stdout.splitlines()
    assert first.startswith("1 pages" if arguments else "50 pages")
    shares = {row[:15].strip(): row[15:].split(" ms")[0].split() for row in rows}
    assert shares["gristmill main"][:3] == ["100.0%", "kept,", "10.0%" if arguments else "0.2%"]
    assert float(shares["gristmill all"][2].rstrip("%")) >= 10.0
