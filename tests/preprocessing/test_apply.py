"""apply: a user's function in a module of its own, in workers, killed and resumed; every document is accounted for."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from gristmill.engine.options import RunOptions
from gristmill.errors import InputError, UsageError
from gristmill.io.files import reject_unfinished
from preprocessing.apply import apply
from tests.gristmill.engine.sandbox import run_here, sandboxed
from tests.patience import patience

ROOT = Path(__file__).resolve().parents[2]
MODULE = """
    '''Filters of a user.'''
    from copy import copy

    from gristmill.errors import InputError


    def keep_even(documents):
        for document in documents:
            if len(document.text) % 2 == 0:
                yield document


    def shout(documents):
        for document in sorted(documents, key=lambda document: document.text):
            if document.text:
                document.text = document.text.upper()
                document.fields["seen"] = True
                yield document


    def first_only(documents):
        yield next(documents)


    def forgets_to_yield(documents):
        for document in documents:
            document.text = document.text.strip()


    def swallow(documents):
        while True:
            try:
                document = next(documents)
            except InputError:
                return
            except StopIteration:
                return
            yield document


    def twice(documents):
        for document in documents:
            yield document
            yield document


    def doubles(documents):
        for document in documents:
            yield copy(document)
            yield document


    def words(documents):
        for document in documents:
            yield from [document.part(word, place=i) for i, word in enumerate(document.text.split())][::-1]


    def same_part_twice(documents):
        for document in documents:
            yield from [document.part("a")] * 2


    def whole_and_part(documents):
        for document in documents:
            yield from [document.part("a"), document]


    def texts(documents):
        yield from (document.text for document in documents)


    def fails(documents):
        for document in documents:
            yield document
            raise ValueError("no luck")


    def surrogate(documents):
        for document in documents:
            document.text += chr(0xD800)
            yield document


    def predicate(documents):
        return True


    def strange(documents):
        for document in documents:
            document.text = None
            yield document


    def sets_the_field(documents):
        for document in documents:
            document.fields["text"] = document.text + "!"
            yield document


    def sets_null(documents):
        for document in documents:
            document.fields["text"] = None
            yield document


    def sets_both(documents):
        for document in documents:
            document.text, document.fields["text"] = "one", "other"
            yield document


    def adds_a_set(documents):
        for document in documents:
            document.fields["tags"] = {"a", "b"}
            yield document


    def adds_an_object(documents):
        for document in documents:
            document.fields["x"] = object()
            yield document


    def adds_numbers(documents):
        import numpy

        for document in documents:
            document.fields["x"] = [float("-inf"), numpy.float32(0.5), numpy.arange(2), numpy.bool_(True), (1,)]
            document.fields["y"] = [numpy.float32("nan"), {1: 2}]
            yield document


    def nests(documents):
        for document in documents:
            for _ in range(5000):
                document.fields = {"text": document.text, "x": document.fields}
            yield document


    def leaves(documents):
        for document in documents:
            yield document
            raise SystemExit


    def is_talkative(documents):
        for document in documents:
            yield document
            raise ValueError("one\\ntwo")


    def asks_for_more(documents):
        for document in documents:
            yield document
            next(iter(()))


    def yields_none(documents):
        for document in documents:
            yield None
"""


@pytest.fixture(autouse=True)
def no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers take their time to start; the processes below have them."""
    run_here(monkeypatch)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a module of functions on sys.path; unlike those of other tests."""
    name = f"filters_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.fixture
def texts() -> list[str]:
    return ["a", "bb", "", "ccc", "dddd é"]


@pytest.fixture
def source(tmp_path: Path, write, texts: list[str]) -> Path:
    for name in ("book/a.jsonl", "c4/b.jsonl"):
        write(tmp_path / "in" / name, [{"text": text, "n": i} for i, text in enumerate(texts)])
    return tmp_path / "in"


def test_documents_are_kept_and_dropped_and_counted(
    source: Path, texts: list[str], tmp_path: Path, module: str, read, quiet: RunOptions
) -> None:
    counts = apply(source, tmp_path / "out", f"{module}:keep_even", quiet)
    kept = [text for text in texts if len(text) % 2 == 0]
    assert [record["text"] for record in read(tmp_path / "out")] == kept * 2
    assert counts.total("written").documents == 6 and counts.total("dropped by keep_even", "book").documents == 2
    assert (tmp_path / "out/book/a.jsonl").read_text().splitlines()[0] == '{"text":"bb","n":1}'


def test_documents_are_changed_and_reordered(
    source: Path, texts: list[str], tmp_path: Path, module: str, read, quiet: RunOptions
) -> None:
    counts = apply(source, tmp_path / "out", f"{module}:shout", quiet)
    records = read(tmp_path / "out")
    assert [record["text"] for record in records] == [text.upper() for text in sorted(texts) if text] * 2
    assert all(record["seen"] for record in records)
    assert counts.total("dropped by shout").documents == 2


def test_a_document_becomes_several_that_say_so(tmp_path: Path, module: str, write, read, quiet: RunOptions) -> None:
    write(tmp_path / "in/book/a.jsonl", [{"text": "one", "id": 7}, {"text": ""}, {"text": "a bc ünd", "id": 8}])
    counts = apply(tmp_path / "in", tmp_path / "out", f"{module}:words", quiet)
    records = read(tmp_path / "out")
    assert [record["gristmill_part"] for record in records] == [
        "book/a.jsonl@0#0", "book/a.jsonl@2#2", "book/a.jsonl@2#1", "book/a.jsonl@2#0",
    ]  # fmt: skip
    assert records[1] == {"text": "ünd", "id": 8, "place": 2, "gristmill_part": "book/a.jsonl@2#2"}
    found = {reason: counts.total(reason).documents for reason in counts.reasons}
    assert found == {"read": 3, "further parts": 2, "written": 4, "dropped by words": 1}
    assert counts.total("written").bytes == 3 + 4 + 2 + 1 and counts.check_conserved("apply")


def test_the_text_may_be_set_in_its_field(source: Path, tmp_path: Path, module: str, read, quiet: RunOptions) -> None:
    counts = apply(source, tmp_path / "out", f"{module}:sets_the_field", quiet)
    texts = [record["text"] for record in read(tmp_path / "out")]
    assert texts[:2] == ["a!", "bb!"] and counts.total("written").bytes == sum(len(text.encode()) for text in texts)


def test_the_text_may_be_in_another_column(tmp_path: Path, module: str, write, quiet: RunOptions) -> None:
    write(tmp_path / "in/a.jsonl", [{"body": "one", "text": None}])
    apply(tmp_path / "in", tmp_path / "out", f"{module}:shout", quiet, text_column="body")
    assert (tmp_path / "out/a.jsonl").read_text() == '{"body":"ONE","text":null,"seen":true}\n'


def test_numbers_are_written_as_such(source: Path, tmp_path: Path, module: str, quiet: RunOptions) -> None:
    apply(source, tmp_path / "out", f"{module}:adds_numbers", quiet)
    assert '"x":[-Infinity,0.5,[0,1],true,[1]],"y":[NaN,{"1":2}]' in (tmp_path / "out/book/a.jsonl").read_text()


def test_a_function_that_ends_early_drops_the_rest(
    source: Path, tmp_path: Path, module: str, read, quiet: RunOptions
) -> None:
    counts = apply(source, tmp_path / "out", f"{module}:first_only", quiet)
    assert (counts.total("read").documents, counts.total("dropped by first_only").documents) == (10, 8)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("twice", r"yielded book/a\.jsonl@0 twice: expected each document at most once"),
        ("doubles", r"yielded book/a\.jsonl@0 twice: expected each document at most once"),
        ("same_part_twice", r"yielded part 0 of book/a\.jsonl@0 twice: expected each document at most once, or each"),
        ("whole_and_part", r"yielded book/a\.jsonl@0 twice"),
        ("texts", r"yielded a str after book/a\.jsonl@0 \(/.*/book/a\.jsonl line 1\): expected a generator"),
        ("fails", r":fails failed on book/a\.jsonl@0 \(/.*/book/a\.jsonl line 1\): ValueError: no luck \("),
        ("surrogate", "book/a.jsonl@0, which cannot be written as JSON"),
        ("predicate", "returned a bool; expected a generator"),
        ("forgets_to_yield", "forgets_to_yield yields nothing: it returned None; expected a generator"),
        ("strange", "book/a.jsonl@0 with a text of type NoneType"),
        ("sets_null", "book/a.jsonl@0 with a text of type NoneType"),
        ("sets_both", "book/a.jsonl@0 with one text in `text` and another in fields\\['text'\\]"),
        ("nests", "book/a.jsonl@0, which cannot be written as JSON: maximum recursion depth"),
        ("adds_a_set", "which cannot be written as JSON: a set has no fixed order; give a sorted list"),
        ("adds_an_object", "which cannot be written as JSON: a object cannot be written as JSON; give text, numbers"),
        ("leaves", r"failed on book/a\.jsonl@0 .*: SystemExit"),
        ("is_talkative", r"/a\.jsonl line 1\): ValueError: one two \(.*py, line \d+"),
        ("asks_for_more", r"/a\.jsonl line 1\): RuntimeError: generator raised StopIteration \("),
        ("yields_none", r"yielded a NoneType after book/a\.jsonl@0 "),
        ("missing", "has no function 'missing': it has .*keep_even"),
    ],
)
def test_functions_that_do_something_else_are_told_so(
    source: Path, tmp_path: Path, module: str, function: str, message: str, quiet: RunOptions
) -> None:
    with pytest.raises(UsageError, match=message):
        apply(source, tmp_path / "out", f"{module}:{function}", quiet)
    if (tmp_path / "out").exists():
        with pytest.raises(InputError, match="is not complete"):
            reject_unfinished(tmp_path / "out")


def test_a_document_on_which_a_function_fails_is_set_aside(
    tmp_path: Path, quiet: RunOptions, write, read, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The others are as without it, for a function of batches, too; more than allowed fail the stage at its end."""
    name = f"poisoned_{abs(hash(str(tmp_path)))}"
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"{name}.py").write_text(
        textwrap.dedent("""
            from itertools import islice
            from pathlib import Path

            READY = Path(__file__).with_name("ready")


            def in_batches(documents):
                while batch := list(islice(documents, 4)):
                    for document in batch:
                        document.fields["share"] = 1 / (len(document.text) - 3)
                    yield from batch


            def at_last(documents):
                for document in documents:
                    if len(document.text) == 3 and not READY.exists():
                        raise OSError("not ready")
                    yield document


            def as_a_whole(documents):
                if len(list(documents)) > 3:
                    raise ValueError("too many")
                yield from ()
            """)
    )
    texts = ["a text", "bad", "more", "words", "here", "bad", "and there", "x" * 9]
    write(tmp_path / "in/book/a.jsonl", [{"text": text} for text in texts])
    write(tmp_path / "in/book/b.jsonl", [{"text": "fine"}])
    function = f"{name}:in_batches"
    said = r"apply: functions failed on 2 of 9 documents, more than --max_failed 0\.00% allows: .*in_batches failed on "
    with pytest.raises(
        UsageError, match=said + r"book/a\.jsonl@1 .* line 2\): ZeroDivisionError: .*out\.failed\.parquet"
    ):
        apply(tmp_path / "in", tmp_path / "out", function, quiet)
    before = (tmp_path / "out/book/a.jsonl").stat().st_mtime_ns
    counts = apply(tmp_path / "in", tmp_path / "out", function, quiet, max_failed=0.3)
    assert (tmp_path / "out/book/a.jsonl").stat().st_mtime_ns == before
    assert (counts.total("written").documents, counts.total("failed: in_batches").documents) == (7, 2)
    assert [document["text"] for document in read(tmp_path / "out")] == [
        *[text for text in texts if text != "bad"],
        "fine",
    ]
    rows = pq.read_table(tmp_path / "out.failed.parquet").to_pylist()
    assert [(row["file"], row["row"], row["rule"]) for row in rows] == [
        ("book/a.jsonl", 1, "failed: in_batches"), ("book/a.jsonl", 5, "failed: in_batches"),
    ]  # fmt: skip
    assert rows[0]["detail"].startswith("ZeroDivisionError: division by zero (")

    options = replace(quiet, quiet=False)
    again = f"{name}:at_last"
    apply(tmp_path / "in", tmp_path / "later", again, options, max_failed=0.3)
    (tmp_path / "ready").touch()
    assert apply(tmp_path / "in", tmp_path / "later", again, options, max_failed=0.3).total("written").documents == 7
    capfd.readouterr()
    retried = apply(tmp_path / "in", tmp_path / "later", again, replace(options, retry_failed=True, explain=True))
    assert "apply: apply: 1 of 1 task runs: documents or files failed in 1 task\n" in capfd.readouterr().err
    assert retried.total("written").documents == 9 and not pq.read_table(tmp_path / "later.failed.parquet").num_rows

    with pytest.raises(UsageError, match=r"as_a_whole failed after it was given book/a\.jsonl@7 .*too many"):
        apply(tmp_path / "in", tmp_path / "whole", f"{name}:as_a_whole", quiet, max_failed=0.9)


def test_a_function_that_fails_on_most_documents_fails_the_stage_at_once(
    tmp_path: Path, quiet: RunOptions, module: str, write
) -> None:
    write(tmp_path / "in/book/a.jsonl", [{"text": "words"}] * 50)
    with pytest.raises(UsageError, match=r"fails failed after it was given book/a\.jsonl@20 "):
        apply(tmp_path / "in", tmp_path / "out", f"{module}:fails", quiet, max_failed=0.9)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("own_filters.py:f", "expected a module's name, such as own_filters:f, got the file"),
        ("no_such_module_here:f", "there is no module 'no_such_module_here': expected no_such_module_here.py"),
        ("just_a_name", "expected module:function"),
        ("__main__:f", "expected module:function"),
        ("builtins:list", "builtins has no file: expected a function of yours"),
        ("broken:f", r"broken cannot be imported: ZeroDivisionError: .*broken\.py, line 1\)"),
        ("leaving:f", "leaving cannot be imported: SystemExit"),
        ("needy:f", "needy needs the module 'no_such_dependency'"),
    ],
)
def test_modules_that_cannot_be_imported(
    source: Path, tmp_path: Path, module: str, name: str, message: str, quiet: RunOptions
) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "leaving.py").write_text("import sys; sys.exit()\n")
    (tmp_path / "needy.py").write_text("import no_such_dependency\n")
    with pytest.raises(UsageError, match=message):
        apply(source, tmp_path / "out", name, quiet)
    assert not (tmp_path / "out").exists()


def test_the_mix_before_its_shuffle_is_no_corpus(tmp_path: Path, quiet: RunOptions) -> None:
    (tmp_path / "pass1").mkdir()
    (tmp_path / "pass1/pass1.json").write_text("{\n}")
    with pytest.raises(UsageError, match="pass1: expected a corpus, got the mix before its shuffle; try train"):
        apply(tmp_path / "pass1", tmp_path / "out", "json:loads", quiet)


def test_an_error_of_the_reader_is_not_swallowed(source: Path, tmp_path: Path, module: str, quiet: RunOptions) -> None:
    (source / "book/z.jsonl.gz").write_bytes(b"\x1f\x8b" + b"broken" * 9)
    with pytest.raises(Exception, match=r"z\.jsonl\.gz"):
        apply(source, tmp_path / "out", f"{module}:swallow", quiet)


def test_a_changed_function_runs_again_and_a_version_stands_for_the_source(
    source: Path, tmp_path: Path, module: str, read, capfd
) -> None:
    loud, path = RunOptions(workers=1), tmp_path / f"{module}.py"

    def applied() -> tuple[bool, int]:
        apply(source, tmp_path / "out", f"{module}:keep_even", loud)
        return "done already" in capfd.readouterr().err, len(read(tmp_path / "out"))

    assert applied() == (False, 6)
    assert applied() == (True, 6)
    path.write_text(path.read_text().replace("% 2 == 0", "% 2 == 1"))
    assert applied() == (False, 4)
    path.write_text(path.read_text() + "\nkeep_even.version = 7\n")
    assert applied() == (False, 4)
    path.write_text(path.read_text() + "\n# a comment\n")
    assert applied() == (True, 4)


def test_tasks_name_all_that_they_read(
    source: Path, tmp_path: Path, module: str, quiet: RunOptions, monkeypatch, digest, write
) -> None:
    monkeypatch.setattr("gristmill.io.readers.SLICE_BYTES", 300)
    write(source / "c4/large.jsonl", [{"text": "x" * (n % 7)} for n in range(100)])
    apply(source, tmp_path / "plain", f"{module}:keep_even", quiet)
    with sandboxed(source) as sandbox:
        apply(source, tmp_path / "boxed", f"{module}:keep_even", quiet)
    assert sandbox.tasks > 5
    assert digest(tmp_path / "plain") == digest(tmp_path / "boxed")


def test_killed_and_resumed_with_workers_from_the_current_folder(
    tmp_path: Path, write, start, run, read, digest
) -> None:
    (tmp_path / "my_filters.py").write_text(
        "import time\n\n\ndef slow(documents):\n    for d in documents:\n        time.sleep(0.002)\n"
        "        if d.value('n') % 3: yield d\n"
    )
    for number in range(12):
        records = [{"text": "word " * 250_000 if n == 0 else f"text {n}", "n": n} for n in range(40)]
        write(tmp_path / "in" / f"{number}.jsonl", records)  # too large to share a task
    line = ("-m", "gristmill_cli", "apply", tmp_path / "in", tmp_path / "out", "my_filters:slow", "--workers", 2)
    process, end = start(*line), time.monotonic() + patience(60)
    while len(list((tmp_path / "out").glob("*.jsonl"))) < 3 and process.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    done = run(*line)
    assert done.returncode == 0, done.stderr
    assert "480 read = 312 written + 168 dropped by slow" in done.stderr and "tasks done before" in done.stderr
    assert run(*line[:4], tmp_path / "whole", *line[5:]).returncode == 0
    assert digest(tmp_path / "out") == digest(tmp_path / "whole") and len(digest(tmp_path / "out")) == 12


PROCESSES = """
import multiprocessing
import os
import sys
from pathlib import Path

from gristmill.engine.options import RunOptions
from gristmill.errors import GristmillError
from preprocessing.apply import apply


def length(text):
    return len(text)


def uses_a_pool(documents):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        yield from (d for d in documents if pool.map(length, [d.text]))


def exits(documents):
    next(documents)
    os._exit(3)
    yield


if __name__ == "__main__":
    for name in sys.argv[2:]:
        try:
            counts = apply(Path("in"), Path(name), f"processes:{name}", RunOptions(int(sys.argv[1]), quiet=True))
            print(name, counts.total("written").documents, flush=True)
        except GristmillError as error:
            print(error, flush=True)
"""


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_function_may_use_a_pool_and_the_death_of_its_process_names_it(
    source: Path, tmp_path: Path, workers: str
) -> None:
    (tmp_path / "processes.py").write_text(PROCESSES)
    done = subprocess.run(
        [sys.executable, "processes.py", workers, "uses_a_pool", "exits"], cwd=tmp_path, capture_output=True,
        text=True, env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    pool, died = done.stdout.splitlines()
    assert pool == "uses_a_pool 10" and "a worker process died in processes:exits on " in died
    assert " row 0 or soon after (exit code 3): " in died
