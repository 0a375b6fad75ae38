"""`gristmill estimate`: a real run of a sample, costs that add up, JSON, and options that are refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gristmill.errors import InputError, TooManyMalformed
from gristmill.io.readers import read_corpus
from gristmill_cli.estimate.corpus_sample import Extent, sample_corpus
from gristmill_cli.estimate.cost_table import cost_table, explanation
from gristmill_cli.estimate.estimate import Estimate, EstimateConfig, estimate, given_extent, main
from gristmill_cli.estimate.made_corpus import write_made_corpus
from gristmill_cli.estimate.stage_costs import AFTER_MIX, SERIAL, Volume, stage_costs
from gristmill_cli.estimate.stage_runs import SampleConfig
from gristmill_cli.run_config import Filter, Mix, Tokenizer
from gristmill_cli.run_stages import plan_stages
from tests.gristmill_cli.corpus import documents, make_corpus, write_records

OPTIONS = {"tokenizer": Tokenizer(vocab_size=420), "mix": Mix(holdout=0.05), "filter": Filter(100)}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("estimate") / "corpus")


@pytest.fixture(scope="module")
def found(corpus: Path) -> Estimate:
    return estimate(EstimateConfig(corpus, sample="200kB", cores=4, **OPTIONS))


def test_where_a_run_works_does_not_matter(tmp_path: Path, corpus: Path) -> None:
    """The sample runs in this process, whose time is taken, and is on a disk."""
    on_ray = {"executor": "ray", "address": "127.0.0.1:9", "scratch_size": "1GiB"}
    found = estimate(EstimateConfig(corpus, sample="50kB", **on_ray, **OPTIONS))
    assert all(stage.core_seconds > 0 for stage in found.stages)
    shared = SampleConfig.of(EstimateConfig(corpus, shard="1/2"), corpus, tmp_path)
    assert shared.run_options == SampleConfig.of(EstimateConfig(corpus), corpus, tmp_path).run_options


def test_every_stage_of_a_run_has_its_costs(corpus: Path, found: Estimate) -> None:
    config = EstimateConfig(corpus, **OPTIONS)
    assert [stage.name for stage in found.stages] == [stage.name for stage in plan_stages(config)]
    for stage in found.stages:
        assert stage.core_seconds > 0 and stage.wall_seconds > 0
        assert stage.read_bytes > 0 and stage.written_bytes > 0 and stage.peak_bytes > 0
        assert stage.gets > 0 and stage.puts > 0 and stage.lists == 1 and stage.dollars > 0


def test_the_extent_of_the_corpus_is_that_of_its_documents(corpus: Path, found: Estimate) -> None:
    texts = [document.text for document in read_corpus(corpus)]
    extent = found.volume.extent
    assert extent.documents == pytest.approx(len(texts), rel=0.25)
    assert extent.text_bytes == pytest.approx(sum(map(len, texts)), rel=0.25)
    assert extent.files == extent.slices == 6


def test_costs_grow_with_the_corpus_and_add_up(found: Estimate) -> None:
    extent = Extent(10**9, 4 * 10**12, 4 * 10**12, 60_000, 60_000, 60_000)
    few, many = (stage_costs(found.rates, Volume(extent, cores, 2**26)) for cores in (1, 64))
    for one, other in zip(few, many, strict=True):
        assert other.wall_seconds <= one.wall_seconds and one.core_seconds <= other.core_seconds
        assert one.wall_seconds == pytest.approx(one.core_seconds)
        assert one.serial_seconds <= one.wall_seconds
    half = replace(extent, text_bytes=2 * 10**12, files=30_000, slices=30_000, groups=30_000)
    for one, other in zip(stage_costs(found.rates, Volume(half, 1, 2**26)), few, strict=True):
        assert one.core_seconds <= other.core_seconds <= 2.01 * one.core_seconds
        assert other.gets == pytest.approx(2 * one.gets, rel=0.1)
    fewer = stage_costs(found.rates, Volume(extent, 1, 2**26, duplicates=0.9))
    for one, other in zip(fewer, few, strict=True):
        assert (one.written_bytes < other.written_bytes) == (one.name in AFTER_MIX)
    assert set(SERIAL) < {stage.name for stage in few}


def test_small_files_are_read_in_groups_by_as_many_tasks_as_there_are(tmp_path: Path) -> None:
    (tmp_path / "corpus/book").mkdir(parents=True)
    for number, document in enumerate(documents("book", 2_000)):
        write_records(tmp_path / f"corpus/book/{number}.jsonl", [document])
    small = estimate(EstimateConfig(tmp_path / "corpus", sample="400kB", cores=64, **OPTIONS))
    assert small.volume.extent.files == 2_000 and small.rates.files > 50 * small.rates.groups
    assert small.volume.extent.groups > 4
    listing = small.stages[1]  # by as many processes, not by one
    assert listing.core_seconds > 3 * listing.wall_seconds


def test_json_has_every_stage_and_a_total_that_adds_up(found: Estimate) -> None:
    read = json.loads(found.to_json())
    assert read["corpus"]["files"] == 6 and read["cores"] == 4 and read["sample"]["documents"] > 0
    for name in ("core_seconds", "wall_seconds", "written_bytes", "gets", "puts", "dollars"):
        assert read["total"][name] == pytest.approx(sum(stage[name] for stage in read["stages"]))
    assert read["total"]["peak_bytes"] == max(stage["peak_bytes"] for stage in read["stages"])


def test_the_table_has_a_row_for_each_stage_and_the_sentences_name_what_decides(found: Estimate) -> None:
    table = cost_table(found.stages, found.volume)
    assert table.row_count == len(found.stages) + 1
    most = max(found.stages, key=lambda stage: stage.core_seconds)
    assert most.name in explanation(found.stages, found.volume, found.rates).splitlines()[0]


def test_samples_have_each_source_with_its_share(tmp_path: Path) -> None:
    for name, count in (("a/x.jsonl", 90), ("a/y.jsonl.zst", 90), ("b/z.parquet", 90), ("c/t.jsonl.gz", 1)):
        (tmp_path / "corpus" / name).parent.mkdir(parents=True, exist_ok=True)
        write_records(tmp_path / "corpus" / name, list(documents(name, count)))
    samples = sample_corpus(tmp_path / "corpus", tmp_path, 50_000)
    small, large = ([*read_corpus(folder)] for folder in (samples.small, samples.large))
    assert {each.source for each in small} == {each.source for each in large} == {"a", "b", "c"}
    assert 2 * len(small) < len(large) < 150
    assert {each.text for each in small} <= {each.text for each in large}
    assert samples.extent.documents == pytest.approx(271, rel=0.25)


def test_a_small_corpus_is_read_whole_and_no_document_twice(tmp_path: Path) -> None:
    for name, count in (("a/x.jsonl", 90), ("a/y.jsonl", 3), ("b/z.parquet", 40), ("c/t.jsonl.gz", 30)):
        (tmp_path / "corpus" / name).parent.mkdir(parents=True, exist_ok=True)
        write_records(tmp_path / "corpus" / name, list(documents(name, count)))
    (tmp_path / "corpus/a/spaced.jsonl").write_text("".join(f'{{   "text":   "grain {i}"   }}\n' for i in range(20)))
    written = sorted(each.text for each in read_corpus(tmp_path / "corpus"))
    samples = sample_corpus(tmp_path / "corpus", tmp_path, 10**6)
    assert sorted(each.text for each in read_corpus(samples.large)) == written
    extent = samples.extent
    assert (extent.documents, extent.text_bytes) == (183, sum(len(text.encode()) for text in written))


@pytest.mark.parametrize("share", [0.1, 0.6])
def test_places_of_a_sample_do_not_overlap(tmp_path: Path, share: float) -> None:
    """Documents of very different lengths: what is read from a place ends where the next one begins."""
    texts = [f"{i} " + "grain " * (500 if i % 7 == 0 else 5) for i in range(200)]
    (tmp_path / "corpus").mkdir()
    write_records(tmp_path / "corpus/a.jsonl", [{"text": text} for text in texts])
    size = (tmp_path / "corpus/a.jsonl").stat().st_size
    samples = sample_corpus(tmp_path / "corpus", tmp_path, int(share * size))
    found = [each.text for each in read_corpus(samples.large)]
    assert len(found) == len(set(found)) < 200 and set(found) < set(texts)
    assert samples.extent.documents == pytest.approx(200, rel=0.35)


@pytest.mark.parametrize("name", ["b/y.jsonl.gz", "b/y.parquet", "a/y.jsonl.gz"])
def test_damaged_files_are_left_out_as_in_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    for each in ("a/x.jsonl.gz", name, "a/z.jsonl.gz"):
        (tmp_path / "corpus" / each).parent.mkdir(parents=True, exist_ok=True)
        write_records(tmp_path / "corpus" / each, list(documents(each, 30)))
    damaged = tmp_path / "corpus" / name
    damaged.write_bytes(damaged.read_bytes()[:-400])
    samples = sample_corpus(tmp_path / "corpus", tmp_path / "half", 50_000, max_malformed=0.5)
    assert {each.source for each in read_corpus(samples.large)} == {"a"} and samples.extent.files == 2
    assert f"left out, as `gristmill run` does: {name} (" in capsys.readouterr().err
    with pytest.raises(TooManyMalformed, match=rf"estimate: damaged files \(1\) hold .*{name}"):
        sample_corpus(tmp_path / "corpus", tmp_path / "none", 50_000)


def test_a_corpus_without_documents_is_refused(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus/a.jsonl").write_text("")
    with pytest.raises(InputError, match="holds no document"):
        estimate(EstimateConfig(tmp_path / "corpus"))
    (tmp_path / "corpus/a.jsonl").write_text('{"text":"ab"}\n')
    with pytest.raises(InputError, match=r"filter: no document is left of 1 \(1 short\): give longer documents"):
        estimate(EstimateConfig(tmp_path / "corpus"))


MISTAKES = {
    "": "wanted the folder of a corpus, or --documents and --bytes",
    "nowhere": "nowhere: expected a folder, and there is none",
    "{corpus} --documents 9": "give --bytes alone",
    "{corpus} --workers 0": "--workers 0: wanted 1 or more",
    "{corpus} --max_malformed nan": "--max_malformed nan: wanted a fraction",
    "--documents 9": "wanted the folder of a corpus, or --documents and --bytes",
    "--documents 9 --bytes 4.5XB": "--bytes '4.5XB' is not a size: wanted",
    "--documents 9 --bytes nan": "is not a size: wanted",
    "--documents 9 --bytes -1GB": "is not a size: wanted",
    "--documents 9 --bytes 3": "--documents 9: wanted 1 or more",
    "--documents 0 --bytes 3": "--documents 0: wanted 1 or more",
    "--documents 1000 --bytes 20kB": "shorter than --filter.threshold 200",
    "--documents 9 --bytes 9kB --mix.weights a 2": "--mix.weights and --dedup.keep source: name sources of a corpus",
    "--documents 9 --bytes 9kB --dedup.keep source:a": "name sources of a corpus: give its folder, or neither",
    "{corpus} --bytes 4.5XB": "--bytes '4.5XB' is not a size: wanted",
    "{corpus} --sample 0": "--sample '0' is not a size: wanted",
    "{corpus} --cores 0": "--cores 0: wanted 1 to",
    "{corpus} --duplicates 1": "--duplicates 1.0: wanted a fraction",
    "{corpus} --duplicates nan": "--duplicates nan: wanted a fraction",
    "{corpus} --until apply": "--until apply: this run has the stages normalize_text, filter",
    "{corpus} --from pass2 --until pass1": "wanted stages in the order of the run",
    "{corpus} --tokenizer.vocab_size 3": "[tokenizer] --vocab_size 3: wanted",
    "{corpus} --mix.weights nonexist 2": "names 'nonexist'",
    "{corpus} --core 2": "unknown option --core; did you mean --cores?",
}


@pytest.mark.parametrize(("arguments", "wanted"), MISTAKES.items())
def test_a_mistake_is_refused_in_one_sentence(corpus: Path, capsys, arguments: str, wanted: str) -> None:
    with pytest.raises(SystemExit) as end:
        main([word.replace("{corpus}", str(corpus)) for word in arguments.split()])
    message = " ".join(capsys.readouterr().err.split())
    assert end.value.code == 2 and message.startswith("error: ") and wanted in message


def test_a_configuration_of_a_run_is_read(tmp_path: Path, corpus: Path, capsys) -> None:
    (tmp_path / "pipeline.toml").write_text(f"corpus = '{corpus}'\nout = 'out'\n[mix.weights]\nnonexist = 2\n")
    with pytest.raises(SystemExit):
        main([str(tmp_path / "pipeline.toml")])
    assert "names 'nonexist'" in capsys.readouterr().err


def test_a_corpus_with_a_size_stands_for_a_larger_one_of_such_documents(corpus: Path, found: Estimate) -> None:
    large = estimate(EstimateConfig(corpus, bytes="1TB", sample="200kB", **OPTIONS)).volume.extent
    assert (large.text_bytes, large.files) == (10**12, 14_902)
    extent = found.volume.extent
    assert large.documents / extent.documents == pytest.approx(10**12 / extent.text_bytes, rel=0.05)


def test_a_corpus_that_is_not_here_has_the_given_extent_and_documents_of_the_mean_length(tmp_path: Path) -> None:
    extent = given_extent(EstimateConfig(bytes="4.5TB"), 931_000_000)
    assert (extent.documents, extent.text_bytes, extent.slices) == (931_000_000, 4_500_000_000_000, 67_056)
    texts = [document["text"].encode("ascii", "ignore").decode() for document in documents("a", 30)]
    made = [*read_corpus(write_made_corpus(tmp_path, texts, 9_000, 1_000))]
    assert [len(each.text) for each in made] == [1_000] * 9
    assert "".join(each.text for each in made) == "\n\n".join(texts)[:9_000]
