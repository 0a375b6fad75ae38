"""`import-hf hf://ORG/NAME`: what a Hub on this machine has is what the folder of the same files gives."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.gristmill_cli.in_process import gristmill
from tests.hub_server import DATASET, Hub, running_hub, status
from tests.training.hf_models import build_theirs
from training.hugging_face.import_hf import import_hf


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    folder = tmp_path / "theirs"
    build_theirs("qwen3", folder)
    (folder / "pytorch_model.bin").write_bytes(b"pickled")  # is not fetched
    with running_hub() as hub:
        hub.commit({path.name: path.read_bytes() for path in sorted(folder.iterdir())}, "main")
        yield hub


def run(hub: Hub, tmp_path: Path, name: str, out: Path) -> subprocess.CompletedProcess[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        return gristmill("import-hf", name, out, HF_ENDPOINT=hub.url)


def test_a_model_of_the_hub_is_imported_as_its_folder_is(hub: Hub, tmp_path: Path) -> None:
    import_hf(tmp_path / "theirs", tmp_path / "folder")
    done = run(hub, tmp_path, f"hf://{DATASET}@main", tmp_path / "fetched")
    assert done.returncode == 0, done.stderr
    assert "qwen3 model" in done.stdout and f"--init_from {tmp_path}/fetched" in done.stdout
    content = []
    for name in ("folder", "fetched"):
        files = [path for path in (tmp_path / name).rglob("*") if path.is_file() and path.suffix == ".distcp"]
        content.append({path.relative_to(tmp_path / name).as_posix(): path.read_bytes() for path in files})
    assert content[0] == content[1] and content[0]
    fetched = {path.rpartition("/")[2] for verb, path in hub.requests if verb == "GET" and "/resolve/" in path}
    assert fetched == {"config.json", "generation_config.json", "model.safetensors"}
    sent = hub.sent
    assert run(hub, tmp_path, f"hf://{DATASET}", tmp_path / "again").returncode == 0
    assert hub.sent - sent < 10_000  # the weights are in the cache


def test_what_the_hub_has_not_is_refused_in_one_sentence(hub: Hub, tmp_path: Path) -> None:
    cases = [
        (f"hf://{DATASET}@v9", 2, "it has no revision v9: give a branch, tag or commit after the @"),
        ("hf://org/other", 2, "there is no hf://org/other, or it is private"),
        ("hf://datasets/org/name", 2, "expected the folder of a Hugging Face model, or hf://ORG/NAME"),
        ("s3://bucket/model", 2, "expected the folder of a Hugging Face model, or hf://ORG/NAME"),
    ]
    here = {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    for name, code, message in cases:
        done = gristmill("import-hf", name, tmp_path / "out", **here)
        assert done.returncode == code and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
    gone = gristmill("import-hf", f"hf://{DATASET}", tmp_path / "out", **here | {"HF_ENDPOINT": "http://127.0.0.1:9"})
    assert gone.returncode == 1 and "the Hub cannot be reached" in gone.stderr and gone.stderr.count("\n") == 1
    hub.faults = [status(403, **{"X-Error-Code": "GatedRepo"})]
    gated = gristmill("import-hf", f"hf://{DATASET}", tmp_path / "out", **here)
    assert "accept the terms on its page" in gated.stderr
    assert not (tmp_path / "out").exists()
