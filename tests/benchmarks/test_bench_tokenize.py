"""bench_tokenize runs, and finds the same ids for every document."""

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece

from tests.patience import patience
from tests.tokenizers_of_models import content_of

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "bench_tokenize.py"
TEXTS = ["the mill grinds grain into flour", "while water turns its wheel", "水車は水の力で回る", ""] * 5


@pytest.mark.parametrize("name", ["tokenizer.model", "tokenizer.json"])
def test_the_table_has_a_row_per_text(tmp_path: Path, name: str) -> None:
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS[:3]), model_writer=written, model_type="bpe", vocab_size=60, minloglevel=2
    )
    (tmp_path / "tokenizer.model").write_bytes(written.getvalue())
    (tmp_path / "tokenizer.json").write_text(content_of("GPT-2"))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    command = [sys.executable, str(SCRIPT), name, "a.jsonl", "--repeat", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patience(120))
    assert done.returncode == 0, done.stderr
    (row,) = (line for line in done.stdout.splitlines() if "a.jsonl" in line)
    cells = [cell.strip() for cell in row.strip("│ ").split("│")]
    assert cells[:2] == ["a.jsonl", "20"] and cells[-1] == "0"
