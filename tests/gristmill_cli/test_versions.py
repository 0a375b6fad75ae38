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
    "preprocessing.normalize_text:STAGE": (4, "95f734dcb5d24eda"),
    "preprocessing.filter:STAGE": (1, "70e49aa32718f012"),
    "dedup.to_hash:STAGE": (2, "4b896e53b0896ea8"),
    "dedup.generate_exact_pairs:STAGE": (2, "6b3f78c4f7d5987f"),
    "dedup.generate_duplicate_pairs:STAGE": (1, "db88a72e6be7739f"),
    "dedup.generate_connected_components:STAGE": (2, "b80db5b506c94425"),
    "dedup.generate_duplicates_dict:STAGE": (6, "4bd4857377c4eb0a"),
    "preprocessing.shuffle_holdout:PASS_1": (5, "306be65ab0c5cf7f"),
    "preprocessing.shuffle_holdout:PASS_2": (1, "e0f705e117f9bb6b"),
    "dedup.dedup_train:STAGE": (1, "6bbcba0afd1c62fb"),
    "preprocessing.train_tokenizer:STAGE": (1, "72e1618ff342c74b"),
    "preprocessing.mix:STAGE": (7, "16859704d61d85bd"),
    "preprocessing.encode:STAGE": (2, "5b2144f17dfe8658"),
    "preprocessing.tokenize_chats:STAGE": (3, "5c4b581d28c8270e"),
    "preprocessing.tokenize_corpus:STAGE": (4, "ceb6e9d657d6460a"),
    "preprocessing.filter_quality:STAGE": (5, "09c265ec11fde34c"),
    "dedup.remove_lines:STAGE": (3, "fd3b7c227524e906"),
    "dedup.remove_spans:STAGE": (1, "608335503375a7ef"),
    "preprocessing.decontaminate:STAGE": (6, "2d2224f432973c08"),
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
