"""The sample of a corpus on the Hub: as that of the same corpus on this disk, and little more than it is fetched."""

import gzip
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from gristmill.errors import InputError
from gristmill.storage import hub as hub_module
from gristmill_cli.estimate import corpus_sample, partial_copy
from gristmill_cli.estimate.corpus_sample import sample_corpus
from tests.hub_server import DATASET, running_hub

pytest.importorskip("huggingface_hub")
SAMPLE = 60_000


def _files() -> dict[str, bytes]:
    draw = random.Random(1)
    texts = [" ".join(str(draw.getrandbits(40)) for _ in range(20)) for _ in range(4000)]
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(pa.table({"text": texts, "id": range(4000)}), sink, row_group_size=50)
    table = sink.getvalue().to_pybytes()
    return {"a/a.jsonl": lines, "a/b.jsonl.gz": gzip.compress(lines), "b/c.parquet": table, "b/d.parquet": table}


def test_a_sample_of_a_dataset_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in (
        (corpus_sample, "_MARGIN_BYTES", 150_000), (corpus_sample, "_COMPRESSED_BYTES", 1 << 10),
        (partial_copy, "_TAIL_BYTES", 100),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
    for name, data in (files := _files()).items():
        (tmp_path / "local" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "local" / name).write_bytes(data)
    near = sample_corpus(tmp_path / "local", tmp_path / "near", SAMPLE)
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub_module._open.cache_clear()
        hub.commit(files)
        far = sample_corpus(Path(f"hf://datasets/{DATASET}"), tmp_path / "far", SAMPLE)
        assert far.extent.documents == pytest.approx(near.extent.documents, rel=0.1) == pytest.approx(16_000, rel=0.1)
        assert far.extent.text_bytes == pytest.approx(near.extent.text_bytes, rel=0.1)
        assert far.extent.disk_bytes == near.extent.disk_bytes
        assert SAMPLE / 2 < hub.sent < sum(map(len, files.values())) / 2
        sampled = sum(path.stat().st_size for path in far.large.rglob("*.jsonl*"))
        assert sampled == pytest.approx(sum(path.stat().st_size for path in near.large.rglob("*.jsonl*")), rel=0.2)
        hub.commit({"b/c.parquet": bytes(100_000)})
        with pytest.raises(InputError, match=r"hf://datasets/org/name/b/c.parquet: not a readable .parquet"):
            sample_corpus(Path(f"hf://datasets/{DATASET}"), tmp_path / "damaged", SAMPLE)
    hub_module._open.cache_clear()
