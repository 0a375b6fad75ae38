"""`gristmill estimate`: how large a corpus is, what its options refuse, and costs that grow as they should."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gristmill.counts import Counts
from gristmill.io.corpus import list_corpus
from gristmill_cli.estimate import EstimateConfig, documents_of, estimate, main
from gristmill_cli.run_config import Decontaminate, Tokenizer
from gristmill_cli.stages.pipeline import find_stage
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
