"""`gristmill push CHECKPOINT hf://ORG/NAME`: what arrives is the export, with a card of the run's numbers."""

import json
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import ModelCard

from tests.gristmill_cli.in_process import gristmill
from tests.gristmill_cli.test_data_card import Uploads
from training.config import TrainConfig
from training.train import train


@pytest.fixture
def run(config: TrainConfig) -> Path:
    train(config)
    return config.out_dir


def test_a_model_arrives_with_its_card(run: Path, config: TrainConfig, tmp_path: Path) -> None:
    data_card = Path(str(config.data.train)).parent / "README.md"
    data_card.write_text("# Grain\n")
    (run / "scores.json").write_text('{"mill": {"acc": 0.25, "items": 4}, "holdout": {"loss": 2.5}}')
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Uploads)
    server.repos, server.files = [], {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    there = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_TOKEN": "hf_x", "HF_HUB_DISABLE_XET": "1"}
    try:
        dry = gristmill("push", run, "hf://org/mill", "--dry_run", "true", **there)
        assert dry.returncode == 0 and not server.repos and not server.files, dry.stderr
        done = gristmill("push", run / "checkpoints/step-00000012", "hf://org/mill", **there)
        assert done.returncode == 0, done.stderr
    finally:
        server.shutdown()
        server.server_close()
        data_card.unlink()
    listed = {line.split()[1] for line in dry.stdout.splitlines()[:-1]}
    assert listed == set(server.files) and "nothing was sent" in dry.stdout
    assert server.repos[0]["name"] == "mill" and server.repos[0].get("type", "model") == "model"
    folder = tmp_path / "arrived"
    folder.mkdir()
    for name, content in server.files.items():
        (folder / name).write_bytes(content)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert torch.isfinite(model(**tokenizer("the mill", return_tensors="pt")).logits).all()
    card = ModelCard.load(folder / "README.md")
    assert card.data.pipeline_tag == "text-generation" and card.data.library_name == "transformers"
    summary = json.loads((run / "summary.json").read_text())
    assert f"| holdout | {summary['holdout_loss']:.4f} | {summary['bits_per_byte']:.4f} |" in card.text
    assert "| mill | acc | 0.2500 | 4 |" in card.text and "| holdout | loss" not in card.text
    assert "![Loss](loss.svg)" in card.text and server.files["loss.svg"].startswith(b"<?xml")
    assert server.files["data-card.md"] == b"# Grain\n" and "[data-card.md](data-card.md)" in card.text
    assert '"optim.lr": 0.01' in card.text and str(run) not in card.text


def test_what_cannot_be_pushed_is_refused_in_one_sentence(run: Path, tmp_path: Path) -> None:
    cases = (
        ((str(tmp_path / "nothing"), "hf://org/mill"), 2, "expected a checkpoint, or the --out_dir of a training run"),
        ((str(tmp_path), "hf://org/mill"), 2, "expected a checkpoint with record.json"),
        ((str(run), "hf://mill"), 2, "expected hf://datasets/ORG/NAME for tokens, or hf://ORG/NAME for a model"),
        ((str(run), "hf://datasets/org/mill", "--tokens", "t"), 2, "--tokens is for a model"),
    )
    for words, code, message in cases:
        done = gristmill("push", *words)
        assert done.returncode == code and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    gone = gristmill("push", run, "hf://org/mill", HF_ENDPOINT="http://127.0.0.1:9", HF_TOKEN="hf_x")
    assert gone.returncode == 1 and "cannot be reached" in gone.stderr and "Traceback" not in gone.stderr
