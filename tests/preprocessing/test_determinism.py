"""Determinism: output bytes do not depend on PYTHONHASHSEED, workers or the order of file creation."""

import json
from pathlib import Path

import pytest

from tests.patience import patience

SOURCES = {"book": 30, "c4": 20, "web": 10}

PLACES = ("in", "norm", "out", "short.pickle")


def stages(corpus: str) -> list[str]:
    return [
        f"preprocessing/normalize_text.py --data_dir {corpus} --target_dir norm",
        "preprocessing/filter.py norm short.pickle 0 all 40",
        "preprocessing/shuffle_holdout.py pass1 --input_dir norm --out_dir out/pass1 --short_docs short.pickle "
        "--weights book=1.5,web=0.5",
        "preprocessing/shuffle_holdout.py pass2 0 20 1 --input_dir out/pass1 --train_dir out/train "
        "--holdout_dir out/holdout --holdout 0.1",
        "preprocessing/train_tokenizer.py --input_dir out/train --out_dir out/tokenizer --vocab_size 300",
        "preprocessing/tokenize_corpus.py --input_dir out/train --tokenizer out/tokenizer/tokenizer.model "
        "--out_dir out/tokens",
    ]


def make(root: Path, backwards: bool) -> None:
    """Create the corpus's folders and files in ascending or descending order."""
    files = [(source, part) for source in SOURCES for part in range(4)]
    for source, part in reversed(files) if backwards else files:
        folder = root / "in" / source
        folder.mkdir(parents=True, exist_ok=True)
        records = [{"text": f"{source} {i} cafe\u0301 " + "word " * (i % 9)} for i in range(part, SOURCES[source], 4)]
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


@pytest.fixture
def grind(tmp_path: Path, start, digest):
    def grind(name: str, seed: str, workers: int, backwards: bool) -> dict[str, str]:
        root = tmp_path / name
        make(root, backwards)
        for line in stages("in"):
            words = [str(root / word) if word.split("/")[0] in PLACES else word for word in line.split()]
            process = start(*words, "--workers", workers, seed=seed)
            _, err = process.communicate(timeout=patience(120))
            assert process.returncode == 0, err
        return digest(root)

    return grind


@pytest.mark.thorough
def test_output_depends_on_inputs_and_seed_only(grind) -> None:
    one = grind("one", seed="0", workers=1, backwards=False)
    two = grind("two", seed="1", workers=2, backwards=True)
    assert one == two
    kinds = {Path(name).suffix for name in one}
    assert {".pickle", ".zst", ".bucket", ".model", ".bin", ".idx", ".json"} <= kinds
