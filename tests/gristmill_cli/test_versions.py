"""The bytes that each stage writes are those of its version, so that a change of bytes needs a new version.

To mend a failure: raise the version in the stage's `Stage(…)`, and put the digest that the failure shows here.
"""

import hashlib
import importlib
import json
from pathlib import Path

import pytest

from dedup import generate_duplicate_pairs, generate_exact_pairs
from dedup.remove_lines import remove_lines
from dedup.remove_spans import remove_spans
from gristmill.engine.options import RunOptions
from gristmill.engine.task import Stage, library_version
from gristmill.io.readers import read_corpus
from preprocessing.decontaminate import decontaminate
from preprocessing.filter_quality import filter_quality
from preprocessing.tokenize_chats import tokenize_chats
from preprocessing.tokenize_corpus import tokenize_corpus
from tests.gristmill_cli.corpus import ROOT, tree
from tests.preprocessing.chats import make_chats, make_tokenizer, write_chats

OUTPUTS = {  # module and name of its Stage → what it writes in the folder of a run
    "preprocessing.normalize_text:STAGE": ("normalized/",),
    "preprocessing.filter:STAGE": ("filtered.pickle",),
    "dedup.to_hash:STAGE": ("minhash/",),
    "dedup.generate_exact_pairs:STAGE": ("pairs/duplicate_pairs_exact",),
    "dedup.generate_duplicate_pairs:STAGE": ("pairs/duplicate_pairs.txt",),
    "dedup.generate_connected_components:STAGE": ("dup/connected_components",),
    "dedup.generate_duplicates_dict:STAGE": ("dup/duplicates",),
    "preprocessing.shuffle_holdout:PASS_1": ("pass1/",),
    "preprocessing.shuffle_holdout:PASS_2": ("train/", "holdout/"),
    "dedup.dedup_train:STAGE": ("train_deduped/",),
    "preprocessing.mix:STAGE": ("mix/",),
    "preprocessing.train_tokenizer:STAGE": ("tokenizer/",),
    "preprocessing.encode:STAGE": ("tokens/",),
    "preprocessing.tokenize_corpus:STAGE": ("of_text/",),
    "preprocessing.tokenize_chats:STAGE": ("of_chats/",),
    "preprocessing.filter_quality:STAGE": ("quality/", "quality.removed"),
    "dedup.remove_lines:STAGE": ("lines/", "lines.lines"),
    "dedup.remove_spans:STAGE": ("spans/", "spans.spans"),
    "preprocessing.decontaminate:STAGE": (
        "decontaminated/",
        "decontaminated.contamination",
        "decontaminated.benchmarks",
    ),
}
DIGESTS = {  # of a small corpus: the version, and the beginning of the SHA-256
    "preprocessing.normalize_text:STAGE": (4, "998944649758fad7"),
    "preprocessing.filter:STAGE": (1, "cd06654500fb322f"),
    "dedup.to_hash:STAGE": (2, "c53d25e73140ec24"),
    "dedup.generate_exact_pairs:STAGE": (2, "64d1dabef7e9bc0d"),
    "dedup.generate_duplicate_pairs:STAGE": (1, "43008f09ba2fa3a0"),
    "dedup.generate_connected_components:STAGE": (2, "38aa948cd993cfbf"),
    "dedup.generate_duplicates_dict:STAGE": (6, "84cb0b92f0301281"),
    "preprocessing.shuffle_holdout:PASS_1": (5, "67e0106de387d5a8"),
    "preprocessing.shuffle_holdout:PASS_2": (1, "18ececf2f59e12d1"),
    "dedup.dedup_train:STAGE": (1, "bf9940646ce011b4"),
    "preprocessing.train_tokenizer:STAGE": (1, "f50bde4eae3aabd4"),
    "preprocessing.mix:STAGE": (7, "9d25af0f43aa39fd"),
    "preprocessing.encode:STAGE": (2, "9a3b6406c0737fd0"),
    "preprocessing.tokenize_chats:STAGE": (3, "5c4b581d28c8270e"),
    "preprocessing.tokenize_corpus:STAGE": (4, "cf78d60fffc99857"),
    "preprocessing.filter_quality:STAGE": (5, "0f06ecb8e2a36a81"),
    "dedup.remove_lines:STAGE": (3, "66270aa93071decc"),
    "dedup.remove_spans:STAGE": (1, "9157f2504fc49f1d"),
    "preprocessing.decontaminate:STAGE": (6, "53e3dfeaf880e213"),
}


@pytest.fixture(scope="module")
def written(finished: tuple[Path, Path, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Every file of a run, and of the stages that it does not have."""
    _, out, _ = finished
    folder, options = tmp_path_factory.mktemp("pairs"), RunOptions(workers=1, quiet=True)
    quiz = folder / "quiz.jsonl"
    text = next(document.text for document in read_corpus(out / "normalized") if len(document.text) > 600)
    quiz.write_text(json.dumps({"question": text[200:500]}) + "\n")
    filter_quality(out / "normalized", folder / "quality", "gopher", options)
    remove_lines(out / "normalized", folder / "lines", "line", options, min_count=2)
    remove_spans(out / "normalized", folder / "spans", 20, options)
    decontaminate(out / "normalized", folder / "decontaminated", (quiz,), options, policy="cut")
    generate_exact_pairs(out / "normalized", folder / "pairs" / "duplicate_pairs_exact.txt", options=options)
    tokenize_corpus(out / "train_deduped", out / "tokenizer" / "tokenizer.model", folder / "of_text", options)
    chats = write_chats(folder / "chats.jsonl", make_chats(20))
    tokenize_chats(chats, folder / "of_chats", make_tokenizer(folder / "model"), options)
    generate_duplicate_pairs(out / "minhash", folder / "pairs" / "duplicate_pairs.txt", options=options)
    return tree(out) | tree(folder)


@pytest.mark.parametrize("name", OUTPUTS)
def test_bytes_are_those_of_the_version(written: dict[str, bytes], name: str) -> None:
    module, _, attribute = name.partition(":")
    stage: Stage = getattr(importlib.import_module(module), attribute)
    if others := [library for library in stage.libraries if not is_pinned(library)]:
        pytest.skip(f"{', '.join(others)}: other versions than the digests are of")
    files = {file: data for file, data in written.items() if file.startswith(OUTPUTS[name])}
    assert files
    digest = hashlib.sha256(b"".join(file.encode() + b"\0" + data for file, data in sorted(files.items())))
    assert (stage.version, digest.hexdigest()[:16]) == DIGESTS.get(name)


def is_pinned(library: str) -> bool:
    """Whether a library has the version in constraints.txt; Python's own are those of Python 3.11 and 3.12."""
    if library in ("unicode", "zlib"):
        return library_version("unicode") in ("14.0.0", "15.0.0")
    return f"{library}=={library_version(library)}" in (ROOT / "constraints.txt").read_text().split()
