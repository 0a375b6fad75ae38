"""Runs that earlier releases began, killed after their checkpoint of step 4, resume to the losses that they had.

Each archive in `earlier/`, named by its release's day, was written by that release in one process on a CPU: token
shards, and the folder of a run of 8 steps as it was after step 4, with the losses of steps 5 to 8 in losses.json.
"""

import json
import tarfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from training.checkpoint.checkpoint import find_checkpoint, find_record
from training.checkpoint.checkpoint_config import CheckpointConfig
from training.checkpoint.run_folder import document_options
from training.config import TrainConfig
from training.data.data_config import DataConfig
from training.model.model_config import ModelConfig
from training.optim.optim_config import OptimConfig
from training.reporting.metrics_file import METRICS, read_metrics
from training.reporting.reporting_config import EvalConfig, MetricsConfig
from training.train import train

EARLIER = Path(__file__).parent / "earlier"
RUNS: dict[str, dict[str, dict[str, Any]]] = {
    # before the keyed order and most options: run.json and record.json have older names of others
    "2026-11-21": {"data": {"order": "randperm"}, "model": {}, "optim": {}},
    "2026-11-23": {
        "data": {"packing": "best-fit", "mask_documents": True},
        "model": {"qk_norm": True, "window": 5, "head_dim": 6, "qkv_bias": True},
        "optim": {"name": "muon", "ema_decay": 0.9, "z_loss": 1e-3, "schedule": "wsd", "cooldown_steps": 3},
    },
}


def run_of(root: Path, release: str) -> TrainConfig:
    options = RUNS[release]
    return TrainConfig(
        out_dir=root / "run",
        data=DataConfig(root / "train", root / "holdout", seq_len=8, batch_size=8, **options["data"]),
        model=ModelConfig(
            layers=1, width=8, heads=2, kv_heads=1, ffn_width=8, tied=True, dropout=0.1, **options["model"]
        ),
        optim=OptimConfig(steps=8, lr=1e-2, warmup_steps=2, **options["optim"]),
        eval=EvalConfig(every=0, sample_tokens=0),
        checkpoint=CheckpointConfig(every=4, keep=9, async_save=False),
        metrics=MetricsConfig(tensorboard=False),
        device="cpu",
    )


def name_index_checksums(tokens: Path) -> None:
    """Write the manifest of token shards anew, as today: it had no checksums of the indices."""
    path = tokens / "manifest.json"
    manifest = json.loads(path.read_text())
    for shard in manifest["shards"]:
        shard["idx_sha256"] = sha256((tokens / f"{shard['name']}.idx").read_bytes()).hexdigest()
    path.write_text(json.dumps(manifest | {"version": 3}))


@pytest.mark.parametrize("release", RUNS)
def test_a_run_of_an_earlier_release_resumes(release: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with tarfile.open(EARLIER / f"{release}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    for folder in ("train", "holdout"):
        name_index_checksums(tmp_path / folder)
    config = run_of(tmp_path, release)
    checkpoint = find_checkpoint(config.out_dir)
    record = find_record(checkpoint)
    assert record is not None and record.mask_documents is None
    assert document_options(record, checkpoint) == (config.data.mask_documents, False)  # as its run.json says
    holdout = train(config).holdout_loss
    wanted = json.loads((config.out_dir / "losses.json").read_bytes())
    found = {str(r["step"]): r["loss"] for r in read_metrics(config.out_dir / METRICS) if r["kind"] == "step"}
    assert "resuming from" in capsys.readouterr().out
    # since then the first token of a masked document is no target
    rel = 0.02 if config.data.mask_documents else 1e-6
    assert found == pytest.approx(wanted["steps"], rel=rel) and holdout == pytest.approx(wanted["holdout"], rel=rel)
