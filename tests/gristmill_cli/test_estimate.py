"""`gristmill estimate`: how large a corpus is, what its options refuse, and costs that grow as they should."""

import bz2
import json
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gristmill.counts import Counts
from gristmill.io.corpus import Source, list_corpus
from gristmill.io.documents import DocKey, Document, normal_name
from gristmill.io.lines import read_lines
from gristmill_cli.estimate import EstimateConfig, _grown, estimate, main
from gristmill_cli.estimates.sample import ReadingTime, documents_of, write_samples
from gristmill_cli.run_config import Decontaminate, Dedup, Tokenizer
from gristmill_cli.stages.pipeline import find_stage
from preprocessing.normalize_text import normalize_text
from preprocessing.steps.user_function import StepOptions
from tests.gristmill_cli.corpus import make_corpus
from tests.object_store import object_store
from tests.tokenizers_of_models import content_of

MISTAKES = {
    "{corpus} --documents 9": "expected --bytes alone with a corpus, got --documents 9",
    "--documents 9": "expected the folder of a corpus, or --documents and --bytes",
    "--documents 9 --bytes 4.5XB": "--bytes: expected a size with a unit, got '4.5XB'",
    "--documents 9 --bytes 3": "--documents: expected 1 to 3, one for each byte, got 9",
    "--documents 9 --bytes 9kB --mix.bytes a 2": "--mix.bytes: expected --mix.weights",
    "--documents 9 --bytes 9kB --mix.weights a 2": "name sources of a corpus; try with its folder",
    "{corpus} --sample 0": "--sample: expected a size",
    "{corpus} --cores 0": "--cores: expected 1 to 1,000,000, got 0; try 64",
    "{corpus} --duplicates nan": "--duplicates: expected a fraction below 1",
    "{corpus} --until apply": "--until: expected one of normalize_text, filter",
    "{corpus} --from encode --until mix": "expected stages in the order of the run",
    "{corpus} --dry_run true": "--dry_run has no effect on an estimate",
    "{corpus} --explain true": "--explain has no effect on an estimate",
    "{corpus} --workers 0": "--workers 0: ",
    "{corpus} --core_price -1": "--core_price: expected a price of 0 or more, got -1",
    "{corpus} --core 2": "unknown option --core; did you mean --cores?",
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("estimate") / "corpus")


@pytest.mark.parametrize(("arguments", "said"), MISTAKES.items())
def test_a_mistake_is_refused_in_one_sentence(corpus: Path, capsys, arguments: str, said: str) -> None:
    with pytest.raises(SystemExit) as end:
        main([word.replace("{corpus}", str(corpus)) for word in arguments.split()])
    message = capsys.readouterr().err
    assert end.value.code == 2 and message.startswith("error: ") and said in message


def test_the_extent_is_that_of_the_corpus_and_costs_are_linear_in_it(
    corpus: Path, tmp_path: Path, capsys, monkeypatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    config = EstimateConfig(corpus, sample="300kB", tokenizer=Tokenizer(vocab_size=420), cores=4)
    found = estimate(config)
    assert found.extent.documents == pytest.approx(753, rel=0.1)
    assert [stage.name for stage in found.stages][:2] == ["normalize_text", "filter"]
    assert found.stages[0].requests == find_stage("normalize_text").requests * found.extent.slices
    assert all(stage.wall_seconds <= stage.core_seconds for stage in found.stages)
    large = estimate(replace(config, bytes="1TB", from_="normalize_text", until="filter"))
    assert large.extent.text_bytes == 10**12 and len(large.stages) == 2
    assert large.stages[0].disk_bytes / found.stages[0].disk_bytes == pytest.approx(
        10**12 / found.extent.text_bytes, rel=0.1
    )
    (tokenizer := tmp_path / "tokenizer.json").write_text(content_of("Llama 3"), encoding="utf-8")
    with pytest.raises(SystemExit, match="0"):
        main([str(corpus), "--sample", "300kB", "--json", "--tokenizer.file", str(tokenizer), "--workers", "3"])
    printed = capsys.readouterr()
    assert json.loads(printed.out)["total"]["requests"] > 0
    assert "--workers do not change an estimate: they only say where a run works" in printed.err


def test_a_sample_is_what_normalisation_writes_of_the_corpus(corpus: Path, tmp_path: Path) -> None:
    """With all fields, and in its compression: the bytes that later stages write and read depend on both."""
    extent, _ = write_samples(corpus, EstimateConfig(corpus), 10**9, tmp_path / "samples")
    normalize_text(corpus, tmp_path / "normalized")
    written = {file.name: file for file in list_corpus(tmp_path / "normalized")}
    assert extent.documents == 753 and set(written) == {normal_name(file.name) for file in list_corpus(corpus)}
    samples = list_corpus(tmp_path / "samples" / "large")
    assert sum(file.size for file in samples) == pytest.approx(sum(file.size for file in written.values()), rel=0.02)
    lines = [line for file in samples for line in read_lines(file.path)]
    assert sorted(lines) == sorted(line for file in written.values() for line in read_lines(file.path))


def test_sources_with_columns_of_their_own_have_one_in_the_sample(tmp_path: Path) -> None:
    for source, column in (("a", "body"), ("b", "text")):
        (tmp_path / "corpus" / source).mkdir(parents=True)
        (tmp_path / "corpus" / source / "a.jsonl").write_text(f'{{"{column}": "a text", "n": 1.50}}\n')
    config = EstimateConfig(tmp_path / "corpus", sources={"a": Source(column="body"), "b": Source()})
    write_samples(tmp_path / "corpus", config, 10**6, tmp_path / "samples")
    for sample in list_corpus(tmp_path / "samples" / "large"):
        assert sample.path.read_text() == '{"text":"a text","n":1.50}\n'


def test_the_first_stage_reads_the_bytes_of_the_corpus(tmp_path: Path) -> None:
    """In a format that is not written, of which a byte of text has other bytes than in the sample."""
    (tmp_path / "corpus" / "a").mkdir(parents=True)
    lines = "".join(json.dumps({"text": f"{n} of many lines"}) + "\n" for n in range(4000))
    (tmp_path / "corpus" / "a" / "a.jsonl.bz2").write_bytes(bz2.compress(lines.encode()))
    _, raw = write_samples(tmp_path / "corpus", EstimateConfig(tmp_path / "corpus"), 10**6, tmp_path / "samples")
    (sample,) = list_corpus(tmp_path / "samples" / "large")
    assert sample.name == "a/0000.jsonl.zst"
    assert raw.read == (tmp_path / "corpus" / "a" / "a.jsonl.bz2").stat().st_size - sample.size
    assert raw.times(2.0).read == 2 * raw.read


def test_what_reading_documents_takes_is_added_up_but_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "process_time", lambda: now)

    def read() -> Iterator[Document]:
        nonlocal now
        for seconds in (100.0, 3.0, 5.0):
            now += seconds
            yield Document("four", DocKey("a", 0), {}, read_bytes=4)

    reading = ReadingTime()
    for _ in reading.watch(read()):
        now += 1000.0  # what is done with a document is not counted
    assert reading.seconds_a_byte == 1.0


def test_duplicates_are_compared_and_not_only_left_out(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each with the document that is kept in its place; the costs are so high that none measured is higher."""
    config = EstimateConfig(
        corpus, sample="300kB", bytes="1TB", tokenizer=Tokenizer(vocab_size=420), duplicates=0.4,
        from_="generate_duplicates_dict", until="generate_duplicates_dict",
    )  # fmt: skip
    spec = find_stage("generate_duplicates_dict")
    assert spec.seconds_a_compared_byte(config) > 0
    assert spec.seconds_a_compared_byte(replace(config, dedup=Dedup(verify="none"))) == 0
    monkeypatch.setattr(type(spec), "seconds_a_compared_byte", lambda *_: 1.0)
    (cost,) = estimate(config).stages
    assert cost.core_seconds == pytest.approx(0.8 * 10**12)


def test_what_functions_of_the_user_read_is_counted(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They run in a process of their own."""
    (tmp_path / "rules_of_estimate.py").write_text("def keep(texts):\n    return [True] * len(texts)\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = EstimateConfig(corpus, sample="300kB", tokenizer=Tokenizer(vocab_size=420), until="normalize_text")
    (plain,) = estimate(config).stages
    (with_function,) = estimate(replace(config, steps=(StepOptions(keep="rules_of_estimate:keep"),))).stages
    assert with_function.read_bytes >= 0.9 * plain.read_bytes
    assert with_function.written_bytes >= 0.9 * plain.written_bytes


def test_a_file_of_the_tokenizer_is_stored_once_whatever_the_corpus(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content_of("Llama 3"), encoding="utf-8")
    config = EstimateConfig(
        corpus, sample="300kB", bytes="1TB", cores=640, tokenizer=Tokenizer(file=tmp_path / "tokenizer.json")
    )
    small = estimate(config)
    padded = content_of("Llama 3") + " " * 3_000_000
    (tmp_path / "tokenizer.json").write_text(padded, encoding="utf-8")
    large = estimate(config)
    more = [theirs.disk_bytes - ours.disk_bytes for theirs, ours in zip(large.stages, small.stages, strict=True)]
    assert abs(more[-1]) < 1e9  # and not 3 MB for each 300 kB of text, which are 10 TB


def test_what_one_process_does_is_small_and_does_not_depend_on_chance(corpus: Path) -> None:
    """`cluster` costs what was measured for a document; the time of a stage that none of the work needs is its own."""
    config = EstimateConfig(
        corpus, sample="300kB", bytes="5TB", cores=640, memory="200GiB", tokenizer=Tokenizer(vocab_size=420),
        from_="generate_connected_components", until="generate_duplicates_dict",
    )  # fmt: skip
    found = estimate(config)
    cluster, remove = found.stages
    documents = found.extent.documents
    costs = find_stage("generate_connected_components").seconds_a_document(config, documents)
    assert cluster.core_seconds == costs.cores * documents
    serial = costs.serial * documents
    assert serial < cluster.wall_seconds < 1.02 * serial
    assert remove.wall_seconds < 0.01 * remove.core_seconds + 0.5e-6 * documents
    assert found.notes == []


def test_labels_that_do_not_fit_the_memory_cost_more_and_it_is_said() -> None:
    stage = find_stage("generate_connected_components")
    config = EstimateConfig(memory="10GiB")
    in_memory = stage.seconds_a_document(config, 10**9)
    on_disk = stage.seconds_a_document(replace(config, memory="9GiB"), 10**9)
    assert in_memory.note == "" and on_disk.serial == pytest.approx(8 * in_memory.serial)
    assert "do not fit half of --memory, 9.0 GiB here.\nWith --memory 10GiB it takes an eighth" in on_disk.note


def test_costs_that_differ_by_chance_alone_stay_in_bounds() -> None:
    """A difference of two times may be negative, or more than the whole; neither makes the result jump."""
    texts = [1e6, 4e6]
    for less in (0.0, 0.01, 0.049, 0.05, 0.051, 0.2):
        assert 0.05 <= _grown(less, 0.05, texts, 4e9) <= 50.001
    assert _grown(0.051, 0.05, texts, 4e9) == _grown(0.05, 0.05, texts, 4e9) == 0.05
    assert _grown(1.0, 4.0, texts, 4e9) == pytest.approx(4000)
    assert _grown(1.5, 4.5, texts, 4e9, repeats=10) == pytest.approx(4000 + 5)


def test_machines_and_storage_have_a_price(corpus: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--sample", "300kB", "--until", "filter", "--bytes", "1TB", "--cores", "100"]
    with pytest.raises(SystemExit, match="0"):
        main([str(corpus), *words, "--core_price", "0.05", "--storage_price", "23"])
    said = capsys.readouterr().out
    assert re.search(r"Machines: 100 cores for .* are [\d,.]+ core hours at 0\.05: [\d,.]+\.\n", said)
    assert "on disk: the labels" not in said
    assert re.search(r"Storage: .*B at 23 a TB and month: [\d,.]+ a month\.\n", said)


@pytest.mark.thorough
def test_benchmarks_are_indexed_once_whatever_the_corpus(corpus: Path, tmp_path: Path) -> None:
    costs = []
    for items in (10, 4000):
        quiz = tmp_path / f"q{items}.jsonl"
        quiz.write_text("".join(f'{{"q": "{" ".join(f"w{n}x{at}" for at in range(60))}"}}\n' for n in range(items)))
        config = EstimateConfig(
            corpus, bytes="1GB", sample="300kB", tokenizer=Tokenizer(vocab_size=420),
            decontaminate=Decontaminate((quiz,)), from_="decontaminate", until="decontaminate",
        )  # fmt: skip
        (cost,) = estimate(config).stages
        costs.append(cost.written_bytes)
    assert costs[0] < costs[1] < 1.2 * costs[0]  # 4,000 items have 4 MB of n-grams


def test_files_of_one_name_in_a_bucket_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of a short file does not end as that of a longer one before it."""
    corpus, counts = Path("s3://bucket/corpus"), {"book": 9, "web": 2}
    with object_store() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        for source, count in counts.items():
            store.put(f"corpus/{source}/part-0.jsonl", b'{"text": "a"}\n' * count)
        found = {file.source: len(list(documents_of(file, Counts({}, [])))) for file in list_corpus(corpus)}
    assert found == counts
