"""`gristmill run` end to end: identical bytes after any interruption, and every document counted."""

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from gristmill.counts import WRITTEN, Counts, Tally
from gristmill.errors import ConservationError, GristmillError, InputError, OutputError, UsageError
from gristmill.io.corpus import list_corpus
from gristmill.io.lines import read_lines
from gristmill_cli.cards.data_card import card
from gristmill_cli.funnel import Funnel
from gristmill_cli.report.write import report
from gristmill_cli.run import _explain, _next_steps, main
from gristmill_cli.run import run as run_here
from gristmill_cli.run_config import Apply, Dedup, Filter, Mix, RunConfig, Tokenizer
from gristmill_cli.run_records import remove_record
from gristmill_cli.stages.pipeline import plan_stages
from preprocessing import document_pass
from preprocessing.mixing import decisions
from tests.gristmill_cli.corpus import make_corpus, run, run_arguments, run_in_process, tree, write_records
from tests.patience import patience
from tests.verify_shards import verify_shards

STAGES = (
    "normalize_text", "filter", "generate_exact_pairs", "to_hash", "generate_connected_components",
    "generate_duplicates_dict", "mix", "pass1", "pass2", "dedup_train", "train_tokenizer", "encode",
)  # fmt: skip


def keys_in(folder: Path) -> Counter[str]:
    """How often each document of the normalised corpus stands in a set."""
    lines = (line for file in list_corpus(folder) for line in read_lines(file.path))
    return Counter(json.loads(line)["gristmill_key"] for line in lines)


def test_same_bytes_for_other_workers_hash_seed_memory_and_creation_order(finished, tmp_path):
    corpus = make_corpus(tmp_path / "corpus", reverse=True)
    done = run(corpus, tmp_path / "out", "--workers", "1", "--memory", "1MiB", PYTHONHASHSEED="1")
    assert done.returncode == 0, done.stderr
    expected, found = tree(finished[1]), tree(tmp_path / "out")
    assert expected.keys() == found.keys()
    assert [name for name in expected if expected[name] != found[name]] == []


def test_resumes_after_kills_in_its_stages(finished, tmp_path):
    stages = STAGES[::2]  # each start takes seconds, and the engine resumes all stages alike
    hit = [stage for stage in stages if killed_in(stage, finished[0], tmp_path / "out")]
    assert len(hit) >= 3, f"of {len(stages)} kills, only those in {', '.join(hit)} came before the stage had ended"
    last = run_in_process(finished[0], tmp_path / "out", "--workers", "2")
    assert last.returncode == 0, last.stderr
    assert tree(finished[1]) == tree(tmp_path / "out")  # and so no partial file is left


def killed_in(stage: str, corpus: Path, out: Path) -> bool:
    """Kill a run soon after `stage` began: whether it was before it ended."""
    process = subprocess.Popen(
        run_arguments(corpus, out, "--workers", "2"), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    assert process.stderr is not None
    before = STAGES[STAGES.index(stage) - 1] if stage != STAGES[0] else None
    if before is None:
        while not out.exists():
            time.sleep(0.005)
    for line in process.stderr if before else ():
        if line.startswith(f"{before}:"):
            break
    time.sleep(random.Random(stage).uniform(0.0, 0.1))
    process.send_signal(signal.SIGKILL)  # the parent alone: its workers must see to themselves
    _, errors = process.communicate()
    assert process.returncode in (-signal.SIGKILL, 0), (stage, errors)
    return process.returncode == -signal.SIGKILL and f"{stage}:" not in errors


def test_a_finished_run_does_nothing_and_says_so(finished):
    corpus, out, printed = finished
    files = [path for path in out.rglob("*") if path.is_file() and ".gristmill" not in path.parts]
    times = {path: path.stat().st_mtime_ns for path in files}
    for name in ("funnel.json", "run.json", ".gristmill/run/filter.json", "train/.gristmill/pass2.unfinished"):
        (out / f"{name}.0123abcd.partial").touch()  # of runs that were killed as they wrote them
    again = run(corpus, out, "--workers", "2")
    assert again.returncode == 0, again.stderr
    lines = again.stderr.splitlines()
    assert len(lines) == len(STAGES) and all(line.endswith("done already, nothing to do") for line in lines)
    changed = [path for path, then in times.items() if path.stat().st_mtime_ns != then]
    assert {path.name for path in changed} == {"funnel.json", "run.json"}
    assert again.stdout == printed
    assert not list(out.rglob("*.partial"))


def test_only_stages_that_depend_on_a_change_are_redone(finished, tmp_path):
    shutil.copytree(finished[0], tmp_path / "corpus")
    shutil.copytree(finished[1], tmp_path / "out")
    (tmp_path / "out" / "run.json").unlink()
    first = run_in_process(tmp_path / "corpus", tmp_path / "out")  # other paths: everything is redone
    again = run_in_process(tmp_path / "corpus", tmp_path / "out", "--mix.weights", "book", "2.5")
    assert first.returncode == again.returncode == 0, again.stderr
    redone = {line.partition(":")[0] for line in again.stderr.splitlines() if "nothing to do" not in line}
    assert redone - {"note"} == {"mix", "pass1", "pass2", "dedup_train", "train_tokenizer", "encode"}
    assert tree(finished[1]).keys() == tree(tmp_path / "out").keys()


def test_explain_says_first_which_option_changed_and_which_stages_follow(finished, tmp_path, capsys):
    corpus, out, _ = finished
    same = replace(_config(corpus, out), filter=Filter(100), mix=Mix(holdout=0.05))
    changed = replace(same, dedup=Dedup(bands=8))
    assert _explain(changed, plan_stages(changed)[3:]) and not _explain(same, plan_stages(same))
    shutil.copytree(out, tmp_path / "killed")
    killed = replace(same, out=tmp_path / "killed")
    remove_record(killed.out, plan_stages(killed)[-1])
    assert not _explain(killed, plan_stages(killed))
    first, second, third, last = capsys.readouterr().err.splitlines()
    assert last == "no option changed of the stages that have finished"
    assert first == "changed: generate_connected_components bands 9 → 8"
    assert second.startswith("runs again: generate_connected_components; and where its input changes: generate_dup")
    assert third == "no option changed since the last run"


def test_funnel_accounts_for_every_document_once(finished):
    _, out, printed = finished
    funnel = msgspec.json.decode((out / "funnel.json").read_bytes(), type=Funnel)
    Counts(funnel.tallies, []).check_conserved("test")
    assert funnel.tallies["c4"]["read"].documents == 300
    assert {source: entry["read"].documents for source, entry in funnel.tallies.items()} == {
        "book": 150, "c4": 300, "code": 150, "tiny": 3, "web": 150,
    }  # fmt: skip
    train, held = keys_in(out / "train_deduped"), keys_in(out / "holdout")
    assert set(train.values()) == set(held.values()) == {1} and not train.keys() & held.keys()
    total = Counts(funnel.tallies, []).total
    assert (total("train").documents, total("holdout").documents) == (len(train), len(held))
    assert total("duplicate").documents >= 40 and total("short").documents >= 40
    assert all(f"{total(reason).documents:,}" in printed for reason in ("read", "duplicate", "short", "train"))
    assert all(entry["holdout"].documents >= 1 for entry in funnel.tallies.values())
    manifest = verify_shards(out / "tokens" / "train")
    assert manifest.documents == len(train)
    assert {source: record.tokens for source, record in manifest.sources.items()} == funnel.tokens["train"]


def test_all_fields_of_a_record_are_kept(finished):
    _, out, _ = finished
    lines = [line for file in list_corpus(out / "train_deduped") for line in read_lines(file.path)]
    ours = next(line for line in lines if b"book/" in line)
    assert b'"score":1.5' in ours and b'{"n": 12345678901234567890123}' in ours and b'"id":"book' in ours


def _config(corpus: Path, out: Path) -> RunConfig:
    return RunConfig(corpus, out, workers=1, tokenizer=Tokenizer(vocab_size=420))


def test_every_file_of_a_run_its_report_and_card_have_the_mode_of_the_umask(finished, tmp_path):
    shutil.copytree(finished[1], tmp_path / "out", copy_function=shutil.copy2)
    report((tmp_path / "out",))
    card(tmp_path / "out")
    os.umask(mask := os.umask(0))
    modes = {path: path.stat().st_mode & 0o777 for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert {"report.html", "README.md", "train.bin"} & {path.name for path in modes}
    assert not {path: oct(mode) for path, mode in modes.items() if mode != 0o666 & ~mask}


def test_a_document_lost_between_stages_fails_the_run(finished, tmp_path, monkeypatch):
    real = document_pass.open_jsonl_writer

    @contextmanager
    def forgetful(path, level):
        with real(path, level) as sink:
            yield ForgetfulSink(sink)

    class ForgetfulSink:
        def __init__(self, sink):
            self.sink, self.lines = sink, 0

        def write(self, data):
            self.lines += 1
            if self.lines != 17:
                self.sink.write(data)

    monkeypatch.setattr(document_pass, "open_jsonl_writer", forgetful)
    with pytest.raises((ConservationError, InputError), match=r"are in the corpus|bytes of text in the mix|has no row"):
        run_here(replace(_config(finished[0], tmp_path / "out"), dedup=Dedup(verify="none")))


def test_a_document_lost_within_a_stage_fails_it(finished, tmp_path, monkeypatch):
    real = decisions._decide
    seen = []

    def forgetful(drawn, source, *others):
        decided = real(drawn, source, *others)
        seen.append(drawn)
        if len(seen) == 1:
            counts = others[-1]
            counts.add(source, WRITTEN, 0, -1)
        return decided

    monkeypatch.setattr(decisions, "_decide", forgetful)
    with pytest.raises(ConservationError, match=re.escape("mix")):
        run_here(_config(finished[0], tmp_path / "out"))


def test_another_corpus_into_the_same_folder_is_refused(finished, tmp_path):
    done = run_in_process(make_corpus(tmp_path / "other"), finished[1])
    assert done.returncode == 1 and "holds a run of the corpus" in done.stderr


def test_a_range_of_stages_hands_over_to_the_next(finished, tmp_path, capsys):
    config = replace(_config(finished[0], tmp_path / "out"), filter=Filter(100), mix=Mix(holdout=0.05))
    config = replace(config, keep=("train_text",))
    assert run_here(replace(config, until="filter")) is None
    assert {path.name for path in (tmp_path / "out").iterdir() if path.name[0] != "."} == {
        "facts", "filtered.pickle", "normalized", "run.json",
    }  # fmt: skip
    with pytest.raises(
        UsageError, match="--from pass2: generate_exact_pairs has not finished: give --from generate_exact"
    ):
        run_here(replace(config, from_="pass2"))
    assert run_here(replace(config, from_="generate_exact_pairs", until="dedup_train")) is None
    with pytest.raises(UsageError, match=r"filter ran with other options \(threshold 100 → 50\)"):
        run_here(replace(config, from_="train_tokenizer", filter=Filter(50)))
    assert "normalize_text" in capsys.readouterr().err
    capsys.readouterr()
    assert run_here(replace(config, from_="train_tokenizer")) is not None
    assert "normalize_text" not in capsys.readouterr().err
    assert tree(tmp_path / "out") == tree(finished[1])
    for name in ("minhash", "dup", "facts"):  # to save space
        shutil.rmtree(tmp_path / "out" / name)
    assert run_here(replace(config, from_="train_tokenizer")) is not None


def test_a_dry_run_says_what_is_done_and_writes_nothing(finished, capsys):
    corpus, out, _ = finished
    times = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    with pytest.raises(SystemExit, match="0"):
        main(run_arguments(corpus, out, "--dry_run", "--dedup.keep", "longest", "--from", "filter")[4:])
    text = capsys.readouterr().out
    assert "read_also=none" in text and "weights=none seed=1" in text
    printed = [line for line in text.splitlines()[2:] if line[1] != " "]  # no lines that go on
    lines = {line.split()[0]: line for line in printed}
    assert list(lines) == [*STAGES]
    assert "done, not checked" in lines["normalize_text"] and "done; its files" in lines["to_hash"]
    assert "keep first → longest" in lines["generate_duplicates_dict"]
    assert "to run again where its input changes" in lines["mix"]
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == times


@pytest.mark.parametrize(
    ("texts", "options", "wanted"),
    [
        ([], {}, "normalize_text: no document is left of 0: give a corpus"),
        (["short"], {}, "filter: no document is left of 1 (1 short): give longer documents, or a smaller --filter."),
        (
            ["some words"],
            {"mix": Mix(weights={"a": 0.001})},
            "mix: no document is left of 1 (1 left out",
        ),
        (
            ["some words"],
            {"mix": Mix(holdout=0.9)},
            "mix: no document is left of 1 (1 holdout): give",
        ),
    ],
)
def test_a_run_that_loses_every_document_says_where(tmp_path, texts, options, wanted):
    (tmp_path / "corpus" / "a").mkdir(parents=True)
    write_records(tmp_path / "corpus" / "a" / "a.jsonl", [{"text": text} for text in texts])
    config = replace(_config(tmp_path / "corpus", tmp_path / "out"), **{"filter": Filter(6), **options})
    with pytest.raises(InputError, match=re.escape(wanted)):
        run_here(config)


@pytest.mark.parametrize("exact", [False, True])
def test_a_corpus_of_one_repeated_text_becomes_one_document(tmp_path, exact):
    (tmp_path / "corpus" / "a").mkdir(parents=True)
    write_records(tmp_path / "corpus" / "a" / "a.jsonl", [{"text": "over and over again"}] * 9)
    tokenizer = Tokenizer(vocab_size=300, exact=False)
    config = RunConfig(tmp_path / "corpus", tmp_path / "out", workers=1, filter=Filter(5), tokenizer=tokenizer)
    funnel = run_here(replace(config, dedup=Dedup(exact=exact)))
    assert (funnel.tallies["a"]["duplicate"].documents, funnel.tallies["a"]["train"].documents) == (8, 1)
    if exact:  # a run without it reads no pairs of this one
        run_here(replace(config, dedup=Dedup(exact=False), until="generate_connected_components"))
        assert not list((tmp_path / "out" / "dup").glob("duplicate_pairs_exact.*"))


def test_an_error_of_a_stage_names_the_option_of_the_run(tmp_path):
    (tmp_path / "corpus/a").mkdir(parents=True)
    (tmp_path / "corpus/a/a.jsonl").write_text('{"text": "the only document"}\n')
    config = RunConfig(tmp_path / "corpus", tmp_path / "out", workers=1, filter=Filter(0), mix=Mix(holdout=0.0))
    with pytest.raises(GristmillError, match=r"^--tokenizer\.vocab_size 32000 .* --tokenizer\.vocab_size"):
        run_here(config)


def test_another_seed_shuffles_again_and_keeps_the_signatures(tmp_path, capsys):
    (tmp_path / "corpus" / "a, b").mkdir(parents=True)
    write_records(tmp_path / "corpus" / "a, b" / "a.jsonl", [{"text": f"document {i} of ten"} for i in range(10)])
    config = RunConfig(
        tmp_path / "corpus", tmp_path / "out", workers=1, filter=Filter(5), until="pass2", keep=("train_text",)
    )
    orders = []
    for changed in ({}, {"seed": 2}, {"mix": Mix(seed=2)}, {"mix": Mix(weights={"a, b": 2})}):
        run_here(replace(config, **changed))
        printed = {line.partition(":")[0]: line for line in capsys.readouterr().err.splitlines()}
        assert printed["to_hash"].endswith("done already, nothing to do") == bool(changed)
        orders.append(list(keys_in(tmp_path / "out" / "train").elements()))
    assert orders[0] != orders[1] == orders[2] and sorted(orders[0]) != sorted(orders[3])
    assert len(orders[0]) == 9 and len(orders[3]) == 19  # without one document, or one of its two copies, held out


def test_an_interrupt_prints_one_line(finished, tmp_path):
    process = subprocess.Popen(
        run_arguments(finished[0], tmp_path / "out"), stderr=subprocess.PIPE, text=True, env=dict(os.environ),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell ignores it for what it runs behind &
    )  # fmt: skip
    assert process.stderr is not None and process.stderr.readline().startswith("normalize_text")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=patience(60))
    assert process.returncode == 130 and "interrupted" in errors and "Traceback" not in errors


def test_a_source_named_like_markup_is_shown_as_it_is():
    funnel = Funnel({"[red]": {"read": Tally(1, 2), "train": Tally(1, 2)}}, {"train": {"[red]": 3}})
    console = Console(width=120)
    with console.capture() as shown:
        console.print(funnel)
    assert "[red]" in shown.get()


def test_sources_named_like_a_total_have_a_row_of_their_own():
    tallies = {name: {"read": Tally(1, 2), "train": Tally(1, 2)} for name in ("all", "total", "book")}
    console = Console(width=120)
    with console.capture() as shown:
        console.print(Funnel(tallies, {"train": dict.fromkeys(tallies, 3)}), Counts(tallies))
    labels = [line.strip().partition("  ")[0] for line in shown.get().splitlines()]
    rows = ["all", "book", "total", "total (*/)"]
    assert labels == ["funnel: documents", "source", *rows, "", "source", *rows, "source", *rows]


def test_a_function_of_the_user_stands_between_normalisation_and_the_filter(tmp_path, monkeypatch, capfd):
    (tmp_path / "own_filter.py").write_text(
        "def keep_long(documents):\n    yield from (d for d in documents if len(d.text) > 500)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    write_records(make_folder(tmp_path / "corpus/c4") / "a.jsonl", [{"text": "word " * n} for n in range(50, 150)])
    config = RunConfig(tmp_path / "corpus", tmp_path / "out", workers=1, apply=Apply("own_filter:keep_long"))
    run_here(replace(config, until="filter"))
    lines = capfd.readouterr().err.splitlines()
    assert lines[1].startswith("apply: 100 read = 49 written + 51 dropped by keep_long")
    assert lines[2].startswith("warning: the source c4 loses 51% of its documents (51 of 100), as dropped by keep_long")
    assert lines[3].startswith("note_facts: 49 read = 49 noted")
    assert lines[4].startswith("filter: 49 read")
    with pytest.raises(OutputError, match="holds a run with --apply"):
        run_here(replace(config, apply=Apply()))
    with pytest.raises(UsageError, match=r"\[apply\] there is no module 'own_filters'"):
        run_here(replace(config, apply=Apply("own_filters:keep_long")))


def make_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def test_the_line_on_how_to_train_is_one_that_a_shell_takes() -> None:
    assert "The holdout is empty" in _next_steps(Path("out"), 0, 0.001) and "0.001" in _next_steps(
        Path("out"), 0, 0.001
    )
    line = _next_steps(Path("my runs/it's"), 3, 0.001).rpartition("to train: ")[2]
    words = shlex.split(line)
    assert words[:4] == ["torchrun", "--nproc_per_node=2", "-m", "gristmill_cli.train"]
    assert words[4:] == [
        "--data.train", "my runs/it's/tokens/train", "--data.holdout", "my runs/it's/tokens/holdout",
        "--out_dir", "my runs/it's/model",
    ]  # fmt: skip
