"""A document on which the tokenizer fails, or ends a worker process, costs its own tokens alone within --max_failed."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from gristmill.io.token_shards import Manifest, open_shards
from gristmill_cli.documents.tracer import Tracer
from gristmill_cli.report.write import report as write_report
from gristmill_cli.run_config import load_options, read_options
from tests.gristmill_cli import in_process
from tests.gristmill_cli.corpus import ROOT, tree

tokenizers = pytest.importorskip("tokenizers")
HARMFUL = {("book", 1, 30): "deadly", ("book", 1, 33): "deadly", ("web", 0, 39): "poisoned"}
HARM = """
import os
from gristmill.io import tokenizer_file

encode = tokenizer_file.JsonTokenizer.encode

def harmful(self, text):
    if "poisoned" in text:
        raise ValueError("poisoned text")
    if "deadly" in text:
        os._exit(9)
    return encode(self, text)

tokenizer_file.JsonTokenizer.encode = harmful
"""
RUN = """
corpus = "corpus"
out = "out"
[mix]
weights = { book = 2.5 }
holdout = 0.1
[tokenizer]
file = "tokenizer.json"
"""


def write_folder(folder: Path) -> None:
    """Write a corpus of 240 documents, a tokenizer of its words, and what makes workers of it fail (sitecustomize)."""
    chance = random.Random(4)
    words = dict.fromkeys(["</s>"])
    for source in ("book", "web"):
        for number in range(3):
            lines = list[str]()
            for row in range(40):
                first = HARMFUL.get((source, number, row), "harmless")
                text = [first, f"{source}-{number}-{row}", *(f"word{chance.randrange(500)}" for _ in range(60))]
                words |= dict.fromkeys(text)
                lines.append(json.dumps({"text": " ".join(text), "id": text[1]}))
            path = folder / "corpus" / source / f"{number}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(lines))
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "sitecustomize.py").write_text(HARM)
    (folder / "run.toml").write_text(RUN)


def gristmill(folder: Path, *words: str, does_harm: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a command in the folder; in a process of its own if its workers are to import what does harm."""
    if not does_harm:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            return in_process.gristmill(*words)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{folder}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "gristmill_cli", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def encode(out: Path, *words: str, does_harm: bool = True) -> subprocess.CompletedProcess[str]:
    """Run the last stage of a run with this output."""
    command = ("run", "run.toml", "--out", out.name, "--from", "encode", *words)
    return gristmill(out.parent, *command, does_harm=does_harm)


def copy_of(out: Path, name: str) -> Path:
    """Return a copy of a run, next to it."""
    return shutil.copytree(out, out.with_name(name))


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of a run that has decided on a mix."""
    folder = tmp_path_factory.mktemp("mixed")
    write_folder(folder)
    done = gristmill(folder, "run", "run.toml", "--until", "mix", "--workers", "2")
    assert done.returncode == 0, done.stderr
    return folder / "out"


@pytest.fixture(scope="module")
def whole(mixed: Path) -> Path:
    """The run to its end, with a tokenizer that does no harm."""
    out = copy_of(mixed, "whole")
    assert encode(out, "--workers", "2", does_harm=False).returncode == 0
    return out


@pytest.fixture(scope="module")
def harmed(mixed: Path) -> Path:
    """The run to its end without three documents, after it was refused."""
    out = copy_of(mixed, "harmed")
    refused = encode(out, "--workers", "2", "--max_failed", "0.001")
    assert refused.returncode == 2
    (said,) = refused.stderr.splitlines()[-1:]
    assert said.startswith("error: encode: the tokenizer failed on 5 of 403 documents, more than --max_failed 0.10% ")
    assert "harmed/normalized/book/1.jsonl.zst line 31: exit code 9; " in said
    assert (
        "web/0.jsonl.zst line 40: ValueError: poisoned text. All are listed in harmed/tokens.removed.parquet. " in said
    )
    done = encode(out, "--workers", "2", "--max_failed", "0.1")
    assert done.returncode == 0, done.stderr
    assert "+ 4 failed: a worker process died + 1 failed: tokenizer + " in done.stderr
    assert " tasks done before" in done.stderr
    return out


def documents_of(out: Path, set_name: str) -> list[str]:
    """Return the texts of the tokens of a set, in order; each ends with the token for that."""
    tokenizer = tokenizers.Tokenizer.from_file(str(out.parent / "tokenizer.json"))
    _, shards = open_shards(out / "tokens" / set_name)
    texts = list[str]()
    for shard in shards:
        for ids in shard:
            *of_text, end = ids.tolist()
            assert end == 0
            texts.append(tokenizer.decode(of_text))
    return texts


def test_a_harmful_document_costs_its_own_tokens_alone(harmed: Path, whole: Path) -> None:
    listed = pq.read_table(harmed / "tokens.removed.parquet").to_pylist()
    assert [(row["file"], row["row"], row["id"], row["rule"], row["detail"]) for row in listed] == [
        ("book/1.jsonl.zst", 30, "book-1-30", "failed: a worker process died", "exit code 9"),
        ("book/1.jsonl.zst", 33, "book-1-33", "failed: a worker process died", "exit code 9"),
        ("web/0.jsonl.zst", 39, "web-0-39", "failed: tokenizer", "ValueError: poisoned text"),
    ]
    for set_name in ("train", "holdout"):
        harmless = [text for text in documents_of(whole, set_name) if text.startswith("harmless ")]
        assert documents_of(harmed, set_name) == harmless  # in this order
        assert Manifest.load(harmed / "tokens" / set_name).documents == len(harmless)
    assert not (whole / "tokens.removed.parquet").exists()


def test_one_worker_writes_the_same_bytes(mixed: Path, harmed: Path) -> None:
    alone = copy_of(mixed, "alone")
    done = encode(alone, "--workers", "1", "--max_failed", "0.1")
    assert done.returncode == 0, done.stderr
    assert tree(alone / "tokens") == tree(harmed / "tokens")
    table = "tokens.removed.parquet"
    assert (alone / table).read_bytes() == (harmed / table).read_bytes()


def test_funnel_report_and_trace_tell(harmed: Path) -> None:
    went = json.loads((harmed / "funnel.json").read_bytes())["went"]
    assert went["book"]["failed: a worker process died"]["documents"] == 4
    assert went["web"]["failed: tokenizer"]["documents"] == 1
    train = Counter(text.split()[1].partition("-")[0] for text in documents_of(harmed, "train"))
    assert train == {source: reasons["train"]["documents"] for source, reasons in went.items()}
    write_report((harmed,))
    said = "5 documents of the mix, copies included, have no tokens, as the tokenizer failed: tokens.removed.parquet "
    assert said in (harmed / "report.html").read_text()
    ((_, fates),) = tracer_of(harmed).find("web/0.jsonl@39")
    assert fates[-1].outcome == "removed: failed: tokenizer, ValueError: poisoned text"


def test_trace_and_its_way_back_agree_without_the_documents(harmed: Path) -> None:
    tracer = tracer_of(harmed)
    for set_name in ("train", "holdout"):
        texts = documents_of(harmed, set_name)
        keys = tracer.keys_in_tokens(set_name, range(len(texts)))
        names = [f"{key.source}-{Path(key.file).name[0]}-{key.row}" for key in keys.values()]
        assert names == [text.split()[1] for text in texts]
        ways = tracer.find_all([str(key) for key in keys.values()])
        for number, key in keys.items():
            (way,) = ways[str(key)]
            assert f"tokens/{set_name}/tokens_00000@{number}" in way.fates[-1].outcome.split("; ")


def test_a_retry_gives_the_bytes_of_a_run_that_never_failed(harmed: Path, whole: Path) -> None:
    """Also where the documents were removed, as they were used up."""
    out = copy_of(harmed, "retried")
    command = ("run", "run.toml", "--out", out.name, "--workers", "2", "--remove_used", "true")
    again = gristmill(out.parent, *command, "--max_failed", "0.1")
    assert "+ 1 failed: tokenizer + " in again.stderr and "done already" in again.stderr
    assert not (out / "normalized/book/1.jsonl.zst").exists()
    retried = gristmill(out.parent, *command, "--retry_failed")
    assert retried.returncode == 0, retried.stderr
    assert tree(out / "tokens") == tree(whole / "tokens")
    assert not (out / "tokens.removed.parquet").exists()


def tracer_of(out: Path) -> Tracer:
    return Tracer(load_options(read_options(out), out))
