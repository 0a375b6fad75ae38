"""train_tokenizer and tokenize_corpus: a lossless model, and token shards equal to SentencePiece's ids."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import sentencepiece
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from gristmill.counts import READ, WRITTEN
from gristmill.engine.execution.staging import StagedTask
from gristmill.engine.options import RunOptions
from gristmill.errors import InputError, OutputError, UsageError
from gristmill.io.token_shards import Manifest, open_shards, read_sources
from gristmill.io.tokenizer_file import open_tokenizer
from gristmill.storage import hub as hub_module
from gristmill.storage.files import FileInfo
from preprocessing.tokenize_corpus import tokenize_corpus
from preprocessing.tokenizer.loading import JsonEncoder, load_encoder
from preprocessing.train_tokenizer import SAMPLED, sentences, train_tokenizer
from tests.gristmill.engine.sandbox import sandboxed
from tests.hub_server import running_hub
from tests.tokenizers_of_models import BEGIN, END, content_of
from tests.verify_shards import verify_shards

VOCABULARY = 400
ADVERSARIAL = [
    "",
    " ",
    "   leading and trailing   ",
    "\ttabs\t\tand\nnew\n\n\nlines\r\n",
    "NUL \0 within\0",
    "😀👩‍👩‍👧‍👦🏳️‍🌈",
    "ᚠᛇᚻ 𐎀𐎁 ꙮ 𒀀 འ༽ ﷽",
    "1234567890 3.14159",
    "<s> </s> <unk> <0x41> [MASK]",
    "e\u0301 \u00e9 \ufb01 \u212b",
    "\ufeff\u200b\u00a0\u3000\u2028",
    "\U0010ffff\ufffe\ue000",
    "a" * 10_000,
    " " * 1000,
]
LOSSY = "a\u2581b"


@pytest.fixture(scope="module")
def prose() -> list[str]:
    line = "the mill grinds grain into flour while water turns its wheel and nobody counts 12 or 7 sacks"
    words = line.split(" ")
    return [" ".join(words[i * j % len(words)] for j in range(1, 30)) + ".\n\tNext line." for i in range(1, 60)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory, prose: list[str]) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "in").mkdir()
    (folder / "in" / "a.jsonl").write_bytes(b"".join(msgspec.json.encode({"text": text}) + b"\n" for text in prose))
    train_tokenizer(folder / "in", folder / "out", VOCABULARY, options=RunOptions(workers=1, quiet=True))
    return folder / "out" / "tokenizer.model"


@pytest.fixture(scope="module")
def model(model_path: Path) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_file=str(model_path))


@pytest.mark.parametrize("text", ADVERSARIAL)
def test_decoding_restores_odd_texts(model, text: str) -> None:
    assert model.decode(model.encode(text)) == text


@given(st.text().filter(lambda text: "\u2581" not in text))
def test_decoding_restores_any_text(model, text: str) -> None:
    assert model.decode(model.encode(text)) == text


def test_vocabulary_and_special_ids(model) -> None:
    assert model.vocab_size() == VOCABULARY
    assert (model.unk_id(), model.bos_id(), model.eos_id(), model.pad_id()) == (0, 1, 2, -1)
    assert len(model.encode("12345")) >= 5  # digits one by one
    assert len(model.encode("the mill grinds")) < 8  # it has learnt words
    assert model.unk_id() not in model.encode("ꙮ \0")


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_error_for_a_vocabulary_too_large(tmp_path: Path, quiet: RunOptions, write, prose, model_type: str) -> None:
    write(tmp_path / "in" / "a.jsonl", [{"text": text} for text in prose])
    with pytest.raises(UsageError, match=r"60000 is too large.* has [0-9]+ different pieces") as refused:
        train_tokenizer(tmp_path / "in", tmp_path / "out", 60_000, model_type, options=quiet)
    assert not (tmp_path / "out" / "tokenizer.model").exists()
    assert not list(tmp_path.rglob("*.partial"))
    most = int(re.search("has ([0-9]+)", str(refused.value))[1])
    train_tokenizer(tmp_path / "in", tmp_path / "out", most, model_type, options=quiet)
    train_tokenizer(tmp_path / "in", tmp_path / "fewer", 60_000, model_type, exact=False, options=quiet)
    for folder in ("out", "fewer"):
        model = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / folder / "tokenizer.model"))
        assert model.vocab_size() == most


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_a_vocabulary_smaller_than_the_characters_says_how_many(tmp_path, quiet, write, model_type: str) -> None:
    write(tmp_path / "in" / "a.jsonl", [{"text": "".join(chr(0x4E00 + i + 40 * row) for i in range(40))}
                                        for row in range(10)])  # fmt: skip
    with pytest.raises(UsageError, match=r"300 is too small: .* give --vocab_size 659 or more"):
        train_tokenizer(tmp_path / "in", tmp_path / "out", 300, model_type, options=quiet)
    train_tokenizer(tmp_path / "in", tmp_path / "out", 659, model_type, options=quiet)


def test_a_corpus_of_one_repeated_text_makes_as_many_pieces_as_it_has(tmp_path, quiet, write) -> None:
    write(tmp_path / "in" / "a.jsonl", [{"text": "hello world"}] * 5)
    with pytest.raises(UsageError, match="give --vocab_size 285 or less, --exact false"):
        train_tokenizer(tmp_path / "in", tmp_path / "out", 300, options=quiet)
    train_tokenizer(tmp_path / "in", tmp_path / "out", 300, exact=False, options=quiet)


def test_the_summary_covers_the_training_itself_which_is_announced(tmp_path, write, capfd) -> None:
    write(tmp_path / "in" / "a.jsonl", [{"text": "hello world"}] * 5)
    for _ in range(2):
        counts = train_tokenizer(tmp_path / "in", tmp_path / "out", 280, options=RunOptions(workers=1))
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith("train_tokenizer: training 280 pieces on 0.0 MB of text")
    assert lines[1].startswith("train_tokenizer: 5 read = 5 sampled | 0.0 MB in ")
    assert lines[2:] == ["train_tokenizer: 5 read = 5 sampled | done already, nothing to do"]
    assert counts.total(SAMPLED).documents == 5


@pytest.mark.parametrize("vocabulary", [0, 259])
def test_error_for_a_vocabulary_too_small(tmp_path: Path, quiet: RunOptions, corpus, vocabulary: int) -> None:
    with pytest.raises(UsageError, match="expected more than the 259 pieces"):
        train_tokenizer(corpus(book=3), tmp_path / "out", vocabulary, options=quiet)


def test_error_for_a_corpus_without_text(tmp_path: Path, quiet: RunOptions, write) -> None:
    write(tmp_path / "in" / "a.jsonl", [{"text": ""}, {"text": "\n\n"}])
    with pytest.raises(UsageError, match="no text to train a tokenizer on"):
        train_tokenizer(tmp_path / "in", tmp_path / "out", 300, options=quiet)


def test_sample_has_the_requested_size_and_takes_from_all_files(tmp_path: Path, quiet: RunOptions, write) -> None:
    for name in "abcd":
        write(tmp_path / "in" / name / "a.jsonl", [{"text": f"{name}{i:03} " + "word " * 19} for i in range(100)])
    with pytest.raises(UsageError):  # 8 different words are no vocabulary; the sample stands all the same
        train_tokenizer(tmp_path / "in", tmp_path / "out", 3000, sample="10000", options=quiet)
    samples = sorted((tmp_path / "out" / ".gristmill").rglob("*.txt"))
    texts = [path.read_text().splitlines() for path in samples]
    assert all(15 <= len(lines) <= 25 for lines in texts)
    assert all(lines == sorted(lines) for lines in texts)
    assert len({line[1:4] for lines in texts for line in lines}) > 30  # not the same rows of each file, nor the first


def test_sentences() -> None:
    text = "a\tb\0c\r\n" + "é" * 5000
    assert "".join(sentences(text)) == text.translate(dict.fromkeys(map(ord, "\t\0\r\n")))
    assert max(len(line.encode()) for line in sentences("😀" * 5000)) <= 4096


@pytest.fixture
def texts(tmp_path: Path, write, prose: list[str]) -> dict[str, list[str]]:
    texts = {"book/a.jsonl": ADVERSARIAL, "c4/b@1 x.jsonl": [*prose[:7], LOSSY, LOSSY]}
    for name, found in texts.items():
        write(tmp_path / "in" / name, [{"text": text, "n": i} for i, text in enumerate(found)])
    return texts


def test_shards_equal_sentencepiece(tmp_path: Path, quiet: RunOptions, texts, model_path: Path, model) -> None:
    counts = tokenize_corpus(tmp_path / "in", model_path, tmp_path / "out", quiet)
    manifest, shards = open_shards(tmp_path / "out")
    wanted = [[*model.encode(text), model.eos_id()] for found in texts.values() for text in found]
    assert [[ids.tolist() for ids in shard] for shard in shards] == [wanted]
    assert [record.name for record in manifest.shards] == ["tokens_00000"]
    assert (tmp_path / "out" / "data_path.txt").read_text() == f"{manifest.tokens} tokens_00000\n"
    assert counts.total(READ) == counts.total(WRITTEN)
    assert verify_shards(tmp_path / "out") == manifest


def test_manifest_counts(tmp_path: Path, quiet: RunOptions, texts, model_path, model) -> None:
    tokenize_corpus(tmp_path / "in", model_path, tmp_path / "out", quiet)
    manifest = Manifest.load(tmp_path / "out")
    assert manifest.lossy_documents == 2
    assert manifest.dtype == "uint16" and manifest.tokenizer.end_of_document == model.eos_id()
    for (source, record), found in zip(sorted(manifest.sources.items()), texts.values(), strict=True):
        assert source in ("book", "c4") and record.documents == len(found)
        assert record.bytes == sum(len(text.encode()) for text in found)
        assert record.tokens == sum(len(model.encode(text)) + 1 for text in found)
    assert (tmp_path / "out" / manifest.tokenizer.path).read_bytes() == model_path.read_bytes()


def test_shards_are_joined_up_to_the_target_and_only_what_changes_is_written_again(
    tmp_path: Path, quiet: RunOptions, write, prose, model_path, monkeypatch
) -> None:
    monkeypatch.setattr("gristmill.engine.slices.SMALL_BYTES", 0)  # a part for each file
    for number in range(5):
        write(tmp_path / "in" / f"{number}.jsonl", [{"text": text} for text in prose])
    tokenize_corpus(tmp_path / "in", model_path, tmp_path / "one", quiet)
    part = (tmp_path / "one" / "tokens_00000.bin").stat().st_size // 5
    tokenize_corpus(tmp_path / "in", model_path, tmp_path / "out", quiet, shard_size=str(2 * part))
    manifest, shards = open_shards(tmp_path / "out")
    assert [record.name for record in manifest.shards] == [f"tokens_{number:05}" for number in range(3)]
    assert [len(shard) for shard in shards] == [2 * len(prose), 2 * len(prose), len(prose)]
    assert [ids.tolist() for shard in shards for ids in shard] == [
        ids.tolist() for ids in open_shards(tmp_path / "one")[1][0]
    ]
    times = [(tmp_path / "out" / f"tokens_{number:05}.bin").stat().st_mtime_ns for number in range(3)]
    write(tmp_path / "in" / "5.jsonl", [{"text": text} for text in prose])
    tokenize_corpus(tmp_path / "in", model_path, tmp_path / "out", quiet, shard_size=str(2 * part))
    now = [(tmp_path / "out" / f"tokens_{number:05}.bin").stat().st_mtime_ns for number in range(3)]
    assert now[:2] == times[:2] and now[2] != times[2]
    (tmp_path / "in" / "5.jsonl").unlink()
    tokenize_corpus(tmp_path / "in", model_path, tmp_path / "out", quiet, shard_size=f"{5 * part}")
    assert [path.name for path in sorted((tmp_path / "out").glob("*.bin"))] == ["tokens_00000.bin"]
    assert verify_shards(tmp_path / "out").sources == manifest.sources
    assert (tmp_path / "out/tokens_00000.idx").read_bytes() == (tmp_path / "one/tokens_00000.idx").read_bytes()


@pytest.mark.parametrize("size", ["0", "much", "nan"])
def test_error_for_a_shard_size_that_is_none(tmp_path: Path, quiet: RunOptions, texts, model_path, size: str) -> None:
    with pytest.raises(UsageError, match="expected a number with a unit"):
        tokenize_corpus(tmp_path / "in", model_path, tmp_path / "out", quiet, shard_size=size)
    assert not (tmp_path / "out").exists()


def test_sources_come_from_the_original_keys(tmp_path: Path, quiet: RunOptions, write, model_path: Path) -> None:
    keys = ["book/a.jsonl@3", "c4/b@2.jsonl@0", "book/a.jsonl@4"]
    write(tmp_path / "in" / "chunk1" / "a.jsonl", [{"text": "a", "gristmill_key": key} for key in keys])
    tokenize_corpus(tmp_path / "in", model_path, tmp_path / "out", quiet)
    sources = Manifest.load(tmp_path / "out").sources
    assert {name: record.documents for name, record in sources.items()} == {"book": 2, "c4": 1}
    (record,) = Manifest.load(tmp_path / "out").shards
    assert [record.sources[number] for number in read_sources(tmp_path / "out", record)] == ["book", "c4", "book"]


def test_another_tokenizer_reruns_the_stage(
    tmp_path: Path, quiet: RunOptions, texts, model_path: Path, prose, write
) -> None:
    own = tmp_path / "own.model"
    shutil.copy(model_path, own)
    tokenize_corpus(tmp_path / "in", own, tmp_path / "out", quiet)
    before = Manifest.load(tmp_path / "out")
    write(tmp_path / "prose" / "a.jsonl", [{"text": text.upper()} for text in prose])
    train_tokenizer(tmp_path / "prose", tmp_path / "other", 310, options=quiet)
    shutil.copy(tmp_path / "other" / "tokenizer.model", own)
    tokenize_corpus(tmp_path / "in", tmp_path / "other" / "tokenizer.model", tmp_path / "out", quiet)
    after = verify_shards(tmp_path / "out")
    assert after.tokenizer.vocab_size == 310 and after.tokens > before.tokens
    assert after.tokenizer.sha256 != before.tokenizer.sha256


@pytest.mark.parametrize("has_bytes", [True, False])
def test_a_tokenizer_that_loses_characters_gives_a_note(tmp_path: Path, prose, write, capfd, has_bytes: bool) -> None:
    write(tmp_path / "in/a.jsonl", [{"text": "mill \u2603"}])
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(prose), model_prefix=str(tmp_path / "m"), vocab_size=300, hard_vocab_limit=False,
        model_type="bpe", byte_fallback=has_bytes, minloglevel=2,
    )  # fmt: skip
    tokenize_corpus(tmp_path / "in", tmp_path / "m.model", tmp_path / "out", RunOptions(workers=1))
    assert ("m.model has no byte pieces" in capfd.readouterr().err) != has_bytes


def test_fallback_to_sentencepiece_gives_a_note(tmp_path: Path, texts, prose, write, capfd) -> None:
    """Shards equal SentencePiece's ids with either encoder, one after the other in one process."""
    loud = RunOptions(workers=1)
    write(tmp_path / "prose" / "a.jsonl", [{"text": text} for text in prose])
    for kind in ("unigram", "bpe"):
        train_tokenizer(tmp_path / "prose", tmp_path / kind, 310, kind, options=loud)
        path = tmp_path / kind / "tokenizer.model"
        tokenize_corpus(tmp_path / "in", path, tmp_path / "out" / kind, loud)
        model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        wanted = [[*ids, model.eos_id()] for found in texts.values() for ids in model.encode(found)]
        assert [ids.tolist() for ids in open_shards(tmp_path / "out" / kind)[1][0]] == wanted
        said = "SentencePiece itself encodes the texts" in capfd.readouterr().err
        assert said == (kind == "unigram")


def test_documents_larger_than_a_batch(tmp_path: Path, quiet: RunOptions, write, model_path, model) -> None:
    found = ["the mill " * 80_000, "grain", "flour " * 200_000, "", "water " * 100_000, "wheel"]
    write(tmp_path / "in" / "a.jsonl", [{"text": text} for text in found])
    tokenize_corpus(tmp_path / "in", model_path, tmp_path / "out", quiet)
    (shard,) = open_shards(tmp_path / "out")[1]
    assert [ids.tolist() for ids in shard] == [[*model.encode(text), model.eos_id()] for text in found]


def test_invalid_tokenizers_are_rejected(tmp_path: Path, quiet: RunOptions, texts) -> None:
    with pytest.raises(UsageError, match="train one with train_tokenizer"):
        tokenize_corpus(tmp_path / "in", tmp_path / "none.model", tmp_path / "out", quiet)
    (tmp_path / "bad.model").write_bytes(b"no model")
    with pytest.raises(UsageError, match="is no tokenizer"):
        tokenize_corpus(tmp_path / "in", tmp_path / "bad.model", tmp_path / "out", quiet)


def test_output_folder_with_unknown_shards_is_rejected(
    tmp_path: Path, quiet: RunOptions, texts, model_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old.bin").touch()
    with pytest.raises(OutputError, match=r"'old\.bin'"):
        tokenize_corpus(tmp_path / "in", model_path, tmp_path / "out", quiet)


def test_invalid_original_key_is_an_error(tmp_path: Path, quiet: RunOptions, write, model_path: Path) -> None:
    write(tmp_path / "in" / "a.jsonl", [{"text": "a", "gristmill_key": 5}])
    with pytest.raises(InputError, match=r"a.jsonl line 1, gristmill_key: '5' is not a document's key"):
        tokenize_corpus(tmp_path / "in", model_path, tmp_path / "out", quiet)


def test_overwritten_tokenizer_is_loaded_again(tmp_path: Path, quiet: RunOptions, corpus) -> None:
    """In one process, as in a notebook that tries two vocabularies."""
    norm = corpus(files=1, book=40)
    for size in (300, 310):
        train_tokenizer(norm, tmp_path / "tokenizer", size, options=quiet)
        tokenize_corpus(norm, tmp_path / "tokenizer" / "tokenizer.model", tmp_path / "tokens", quiet)
        assert verify_shards(tmp_path / "tokens").tokenizer.vocab_size == size


def test_tasks_name_all_that_they_read(
    tmp_path: Path, quiet: RunOptions, write, prose, model_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("gristmill.io.readers.SLICE_BYTES", 10_000)
    for number in range(50):
        write(tmp_path / "in" / "a" / f"{number}.jsonl", [{"text": prose[number]}])
    write(tmp_path / "in" / "b.jsonl", [{"text": text} for text in prose])
    tokenize_corpus(tmp_path / "in", model_path, tmp_path / "plain", quiet, shard_size="5K")
    with sandboxed(tmp_path) as sandbox:
        tokenize_corpus(tmp_path / "in", model_path, tmp_path / "boxed", quiet, shard_size="5K")
    assert 6 < sandbox.tasks < 16
    plain, boxed = (sorted((tmp_path / name).glob("[!.]*")) for name in ("plain", "boxed"))
    assert [(path.name, path.read_bytes()) for path in plain] == [(path.name, path.read_bytes()) for path in boxed]
    assert len(Manifest.load(tmp_path / "plain").shards) == 2


def test_interrupted_shards_are_refused_and_written_again(
    tmp_path: Path, quiet: RunOptions, texts, model_path: Path, monkeypatch
) -> None:
    """As a kill leaves them: a shard is there, its record is not, and neither is the manifest."""
    with monkeypatch.context() as patched:
        patched.setattr(StagedTask, "_put", _interrupt_at_shards)
        with pytest.raises(KeyboardInterrupt):
            tokenize_corpus(tmp_path / "in", model_path, tmp_path / "out", quiet)
    assert (tmp_path / "out" / "tokens_00000.bin").exists()
    with pytest.raises(InputError, match=r"is not complete: tokenize_corpus, which writes .* was interrupted"):
        Manifest.load(tmp_path / "out")
    tokenize_corpus(tmp_path / "in", model_path, tmp_path / "out", quiet)
    assert verify_shards(tmp_path / "out").documents == sum(map(len, texts.values()))
    with pytest.raises(UsageError, match="would lose it if"):
        tokenize_corpus(tmp_path / "in" / "book", model_path, tmp_path / "out", quiet)


_PUT = StagedTask._put


def _interrupt_at_shards(task: StagedTask, path: Path, done: FileInfo | None) -> tuple[FileInfo, str]:
    if path.name.startswith("tokens_"):
        raise KeyboardInterrupt
    return _PUT(task, path, done)


def test_malformed_records_stay_next_to_the_shard_with_the_others(
    tmp_path: Path, model_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("gristmill.engine.slices.SMALL_BYTES", 0)
    for name in "ab":
        (tmp_path / "in" / name).mkdir(parents=True)
        (tmp_path / "in" / name / "x.jsonl").write_text('{"text": "good"}\n{"no": "text"}\n')
    options = RunOptions(workers=1, quiet=True, max_malformed=0.9)
    tokenize_corpus(tmp_path / "in", model_path, tmp_path / "out", options)
    rejected = (tmp_path / "out" / "tokens_00000.bin.malformed").read_text().splitlines()
    assert [msgspec.json.decode(line)["raw"] for line in rejected] == ['{"no": "text"}'] * 2


def test_output_that_would_overwrite_or_join_the_input_is_refused(
    tmp_path: Path, quiet: RunOptions, texts, model_path: Path
) -> None:
    with pytest.raises(UsageError, match="lies in the output folder"):
        tokenize_corpus(tmp_path / "in", model_path, model_path.parent, quiet)
    for name in ("tokens_00000.bin", "a.idx", "manifest.json", "data_path.txt"):
        with pytest.raises(UsageError, match=rf"{name} is named as an output .* name it tokenizer\.model"):
            tokenize_corpus(tmp_path / "in", shutil.copy(model_path, tmp_path / name), tmp_path / "out", quiet)
    with pytest.raises(UsageError, match="is the input folder"):
        tokenize_corpus(tmp_path / "in", model_path, tmp_path / "in" / "tokens", quiet)


def test_moved_and_run_with_other_resources_nothing_is_encoded_again(
    tmp_path: Path, texts, model_path: Path, capfd
) -> None:
    tokenize_corpus(tmp_path / "in", model_path, tmp_path / "out", RunOptions(workers=1))
    (tmp_path / "moved").mkdir()
    for name in ("in", "out"):
        (tmp_path / name).rename(tmp_path / "moved" / name)
    capfd.readouterr()
    tokenize_corpus(tmp_path / "moved/in", model_path, tmp_path / "moved/out", RunOptions(workers=2, memory="1G"))
    assert "done already, nothing to do" in capfd.readouterr().err


def test_the_text_may_be_in_another_column(tmp_path: Path, quiet: RunOptions, write, model_path: Path, model) -> None:
    write(tmp_path / "in" / "a.jsonl", [{"body": "the mill", "text": 5}])
    tokenize_corpus(tmp_path / "in", model_path, tmp_path / "out", quiet, text_column="body")
    (shard,) = open_shards(tmp_path / "out")[1]
    assert shard[0].tolist() == [*model.encode("the mill"), model.eos_id()]


@pytest.fixture
def tokenizer_json(tmp_path: Path) -> Path:
    path = tmp_path / "model" / "tokenizer.json"
    path.parent.mkdir()
    path.write_text(content_of("Llama 3"), encoding="utf-8")
    (path.parent / "tokenizer_config.json").write_text(json.dumps({"bos_token": BEGIN, "eos_token": END}))
    return path


@pytest.mark.parametrize(("bos", "eos"), [("none", "model"), ("model", "model"), ("model", "none"), ("none", "none")])
def test_shards_of_a_tokenizer_json_hold_the_ids_of_tokenizers(
    tmp_path: Path, quiet: RunOptions, texts, tokenizer_json: Path, bos: str, eos: str
) -> None:
    tokenize_corpus(tmp_path / "in", tokenizer_json.parent, tmp_path / "out", quiet, bos=bos, eos=eos)
    reference = tokenizers.Tokenizer.from_file(str(tokenizer_json))
    begin = [reference.token_to_id(BEGIN)] if bos == "model" else []
    end = [reference.token_to_id(END)] if eos == "model" else []
    manifest, shards = open_shards(tmp_path / "out")
    wanted = [[*begin, *reference.encode(text, add_special_tokens=False).ids, *end]
              for found in texts.values() for text in found]  # fmt: skip
    assert [ids.tolist() for shard in shards for ids in shard] == wanted
    record = manifest.tokenizer
    assert (record.vocab_size, record.begin_of_document, record.end_of_document) == (
        500,
        *(begin or [-1]),
        *(end or [-1]),
    )
    assert manifest.lossy_documents == 0
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tokenizer_json.parent / name).read_bytes()


def test_a_long_text_has_its_tokens_around_it(tmp_path: Path, quiet: RunOptions, write, prose, tokenizer_json) -> None:
    long = " ".join(prose) * 20
    write(tmp_path / "in" / "a.jsonl", [{"text": text} for text in (long, "short", long)])
    tokenize_corpus(tmp_path / "in", tokenizer_json, tmp_path / "out", quiet, bos=BEGIN)
    reference = tokenizers.Tokenizer.from_file(str(tokenizer_json))
    first, _, last = open_shards(tmp_path / "out")[1][0]
    assert first.tolist() == last.tolist() == [1, *reference.encode(long).ids, 0]


def test_slices_on_which_gigatoken_differs_are_encoded_by_tokenizers_and_named(
    tmp_path: Path, quiet: RunOptions, texts, tokenizer_json: Path, monkeypatch, capsys
) -> None:
    tokenize_corpus(tmp_path / "in", tokenizer_json, tmp_path / "right", quiet)
    encoder = load_encoder(tokenizer_json)[1]
    assert isinstance(encoder, JsonEncoder) and not encoder.fallback
    right = encoder._encode_fast
    monkeypatch.setattr(encoder, "_encode_fast", lambda texts: (right(texts)[0] ^ 1, right(texts)[1]))
    tokenize_corpus(tmp_path / "in", tokenizer_json, tmp_path / "out", replace(quiet, quiet=False))
    assert (
        "note: tokenizers encoded parts of 1 shard, as gigatoken gave other ids from token 0" in capsys.readouterr().err
    )
    assert (tmp_path / "out/tokens_00000.bin").read_bytes() == (tmp_path / "right/tokens_00000.bin").read_bytes()
    assert not encoder.fallback


def test_byte_level_bpe_is_trained_the_same_every_time_and_restores_any_text(
    tmp_path: Path, quiet: RunOptions, write, prose
) -> None:
    write(tmp_path / "in" / "a.jsonl", [{"text": text} for text in [*prose, *ADVERSARIAL]])
    for name, workers in (("a", 1), ("b", 2)):
        train_tokenizer(
            tmp_path / "in", tmp_path / name, VOCABULARY, "byte-bpe", options=replace(quiet, workers=workers)
        )
    path = tmp_path / "a" / "tokenizer.json"
    assert path.read_bytes() == (tmp_path / "b" / "tokenizer.json").read_bytes()
    found = open_tokenizer(path)
    assert found.vocab_size == VOCABULARY and found.id_of(END) == 0
    assert all(found.decode(found.encode(text)) == text for text in [*ADVERSARIAL, LOSSY])
    assert len(found.encode("the mill grinds")) < 8 and len(found.encode("12345")) == 5
    assert len(found.encode(".\n\tNext line")) < 8  # it has seen lines together
    assert not load_encoder(path)[1].fallback  # gigatoken knows it
    with pytest.raises(UsageError, match=r"60000 is too large: this sample has \d+ different pieces"):
        train_tokenizer(tmp_path / "in", tmp_path / "c", 60_000, "byte-bpe", options=quiet)
    with pytest.raises(UsageError, match="there is no text to train a tokenizer on"):
        write(tmp_path / "empty" / "a.jsonl", [])
        train_tokenizer(tmp_path / "empty", tmp_path / "c", VOCABULARY, "byte-bpe", options=quiet)


def test_a_data_set_of_the_hub_is_tokenised_by_its_name(
    tmp_path: Path, quiet: RunOptions, model_path: Path, prose: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = b"".join(msgspec.json.encode({"text": text}) + b"\n" for text in prose)
    (tmp_path / "in/data").mkdir(parents=True)
    (tmp_path / "in/data/train.jsonl").write_bytes(lines)
    tokenize_corpus(tmp_path / "in", model_path, tmp_path / "local", quiet)
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub_module._open.cache_clear()
        hub.commit({"data/train.jsonl": lines, "README.md": b"a card"})
        tokenize_corpus(Path("hf://datasets/org/name"), model_path, tmp_path / "out", quiet)
        hub_module._open.cache_clear()
    assert (tmp_path / "out/manifest.json").read_bytes() == (tmp_path / "local/manifest.json").read_bytes()
    with pytest.raises(UsageError, match="a data set of the Hub is hf://datasets/org/name"):
        tokenize_corpus(Path("org/name"), model_path, tmp_path / "other", quiet)
