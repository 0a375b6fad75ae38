"""shuffle_holdout on corpora of many slices: the same bytes for any number of levels and any memory, at linear cost."""

import gzip
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from gristmill.engine.options import RunOptions
from gristmill.io.keys import write_keys
from preprocessing import shuffle_holdout as stage
from preprocessing.mixing.mix import plan_levels
from preprocessing.mixing.shuffle_buckets import BucketManifest, manifest_path
from preprocessing.shuffle_holdout import pass1, pass2

ALL = 10**9
opened: list[str] = []  # by the test that counts; an audit hook is never removed


@pytest.fixture
def shuffled(tmp_path: Path, quiet: RunOptions, digest) -> Callable[..., dict[str, str]]:
    """Run both passes, with at most `fan_out` files at once; return the digests of the train and holdout sets."""

    def shuffled(norm: Path, name: str, fan_out: int, options: RunOptions = quiet, **arguments) -> dict[str, str]:
        out = tmp_path / name
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(stage, "FAN_OUT", fan_out)
            pass1(norm, out / "pass1", options=options, **arguments)
            pass2(0, ALL, 1, out / "pass1", out / "train", out / "holdout", 0.1, options)
        return digest(out / "train") | {f"holdout {path}": sha for path, sha in digest(out / "holdout").items()}

    return shuffled


@pytest.fixture
def no_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every small file is a slice of its own."""
    monkeypatch.setattr("gristmill.engine.slices.SMALL_BYTES", 0)


@pytest.mark.parametrize("fan_out", [2, 7])
def test_levels_change_no_byte(tmp_path: Path, corpus, no_groups: None, shuffled, fan_out: int) -> None:
    norm = corpus(files=5, book=60, c4=45)
    write_keys(tmp_path / "short.pickle", {"book/1.jsonl": np.array([0, 3])})
    sets = {"weights": "book=1.5,c4=2", "short_docs": tmp_path / "short.pickle"}
    assert shuffled(norm, "levels", fan_out, **sets) == shuffled(norm, "direct", 256, **sets)
    assert len(plan_levels(10, stage.MIN_PARTS, 10**5, fan_out)) == {2: 5, 7: 2}[fan_out]
    assert not BucketManifest.load(manifest_path(tmp_path / "levels" / "pass1")).bucket_files


def test_a_part_that_exceeds_the_memory_is_shuffled_on_disk(tmp_path: Path, corpus, shuffled) -> None:
    norm = corpus(book=400)
    little = RunOptions(workers=1, quiet=True, memory="4KiB")
    assert shuffled(norm, "little", 256, little) == shuffled(norm, "much", 256)
    assert not list((tmp_path / "little").rglob("*.partial"))


def test_parts_are_sized_by_the_bytes_found_in_compressed_files(
    tmp_path: Path, no_groups: None, shuffled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text that is compressed 20 times gave parts of five times the planned size."""
    folder = tmp_path / "norm" / "book"
    folder.mkdir(parents=True)
    for name in ("a", "b"):
        lines = b"".join(b'{"text":"%s %d%s"}\n' % (name.encode(), i, b" and on" * 99) for i in range(9))
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(lines))
    size = sum(path.stat().st_size for path in folder.iterdir())
    monkeypatch.setattr(stage, "MAX_PART_BYTES", size)
    monkeypatch.setattr(stage, "MIN_PARTS", 1)
    whole = shuffled(tmp_path / "norm", "direct", 256)
    manifest = BucketManifest.load(manifest_path(tmp_path / "direct" / "pass1"))
    assert manifest.buckets == 4 and manifest.parts > 2 * 4 and manifest.parts % 4 == 0
    assert shuffled(tmp_path / "norm", "levels", 3) == whole


def test_opens_and_tasks_a_slice_are_bounded_up_to_a_million_slices() -> None:
    """64 MiB slices and parts of twice that size; then tiny slices that make few parts."""
    for slice_bytes in (64 << 20, 1 << 20, 2 << 30):
        for slices in (10**3, 10**4, 10**5, 10**6):
            parts = max(20, slices * slice_bytes >> 27)
            levels = plan_levels(slices, parts, slices * slice_bytes, 256)
            ranges = [-(-parts // level.width) for level in levels]
            tasks = sum(count * level.tasks for count, level in zip(ranges, levels, strict=True))
            written = sum(
                count * level.tasks * -(-level.width // level.next_width)
                for count, level in zip(ranges, levels, strict=True)
            )
            assert max(level.fan_in for level in levels) <= 256 and levels[-1].tasks <= 256
            assert len(levels) <= 4 and tasks <= parts + slices
            assert written <= 4 * len(levels) * (slices + parts)


def test_opens_grow_with_the_corpus_and_not_with_its_square(
    tmp_path: Path, no_groups: None, write, shuffled, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    monkeypatch.setattr(stage, "MIN_PARTS", 1)
    sys.addaudithook(_note_open)
    for slices in (12, 48):
        for i in range(slices):
            write(tmp_path / f"norm{slices}" / "book" / f"{i}.jsonl", [{"text": f"document {i} {j}"} for j in range(3)])
        size = sum(path.stat().st_size for path in (tmp_path / f"norm{slices}").rglob("*.jsonl"))
        monkeypatch.setattr(stage, "MAX_PART_BYTES", size * 2 // slices)
        opened.clear()
        shuffled(tmp_path / f"norm{slices}", f"out{slices}", 5)
        counts.append(sum(1 for path in opened if path.startswith(str(tmp_path)) and ".ledger" not in path))
    assert counts[0] > 100 and counts[1] < 5 * counts[0], counts  # 4 times the slices


def _note_open(event: str, arguments: tuple) -> None:
    if event == "open" and isinstance(arguments[0], str):
        opened.append(arguments[0])
