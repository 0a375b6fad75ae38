"""`gristmill browse`: pages of a run's tables with texts, served to this machine alone; marks that a run takes back."""

import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from queue import Queue
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import Request, urlopen

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.counts import Counts
from gristmill_cli.browse.marks import KeepMarks
from gristmill_cli.browse.pages import Pages
from gristmill_cli.browse.serve import browse
from gristmill_cli.browse.tables import RunTables
from gristmill_cli.run import run
from gristmill_cli.run_config import Decontaminate, Filter, Mix, RunConfig, Tokenizer
from tests.gristmill_cli.in_process import gristmill
from tests.gristmill_cli.pages import Numbers, driven_browser, dumped, in_a_browser, with_a_mouse
from tests.gristmill_cli.test_report import HOSTILE, write_clusters
from tests.object_store import BUCKET, object_store
from tests.patience import patience

WORDS = [f"word{number}" for number in range(90)]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A finished run with duplicates, documents that a rule removed, and items of a benchmark; texts have markup."""
    root = tmp_path_factory.mktemp("browse")
    texts = [" ".join(f"{number}{word}" for word in WORDS) for number in range(30)]
    texts += [f"{HOSTILE} {text} more" for text in texts[:25]] + [f"{HOSTILE} few"] * 3
    (root / "corpus/b&<i>").mkdir(parents=True)
    own = {row: {"id": f"<i>{row}"} for row in (1, 31, 56)}
    lines = "".join(json.dumps({"text": text} | own.get(row, {})) + "\n" for row, text in enumerate(texts))
    (root / "corpus/b&<i>/a.jsonl").write_text(lines)
    (root / "own.toml").write_text("words.min = 20\n")
    (root / "quiz.jsonl").write_text(json.dumps({"question": " ".join(texts[29].split()[5:30])}) + "\n")
    config = RunConfig(
        root / "corpus", root / "out", workers=1, recipe=str(root / "own.toml"), filter=Filter(10),
        mix=Mix(holdout=0.1), tokenizer=Tokenizer(vocab_size=400, exact=False),
        decontaminate=Decontaminate((root / "quiz.jsonl",), policy="report"),
    )  # fmt: skip
    run(config)
    return config


class _Server(ThreadingHTTPServer):
    """A server that ends soon after it is told to, and is put into the queue `started` as it begins."""

    started: Queue["_Server"]

    def serve_forever(self, poll_interval: float = 0.01) -> None:
        self.started.put(self)
        super().serve_forever(poll_interval)


@contextmanager
def served(out: Path, keep_list: Path | None = None) -> Iterator[str]:
    """The address of a server that browses a run, in a thread of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Server, "started", Queue[_Server](), raising=False)
        patch.setattr("gristmill_cli.browse.serve.ThreadingHTTPServer", _Server)
        thread = threading.Thread(target=browse, args=(out, 0, keep_list))
        thread.start()
        server = _Server.started.get(timeout=patience(60))
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        thread.join()


@contextmanager
def served_by_a_command(out: Path) -> Iterator[str]:
    """The address of a server that browses a run, as the command prints it."""
    command = [sys.executable, "-m", "gristmill_cli", "browse", str(out), "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        yield process.stderr.readline().partition(" ")[0]
    finally:
        process.terminate()
        process.wait(patience(60))
        process.stderr.close()


def read(address: str, **headers: str) -> str:
    with urlopen(Request(address, headers=headers), timeout=patience(120)) as answer:
        return answer.read().decode()


def mark(server: str, key: str, word: str, back: str = "/duplicates", **headers: str) -> str:
    form = urlencode({"key": key, "mark": word, "back": back}).encode()
    with urlopen(Request(f"{server}mark", form, headers), timeout=patience(120)) as answer:
        return answer.url


def test_tables_are_shown_with_texts_and_only_as_text(config: RunConfig) -> None:
    with served(config.out) as server:
        front, pairs, rules = (read(f"{server}{name}") for name in ("", "duplicates", "rules?rule=words"))
        spans, clusters = read(f"{server}spans?benchmark=quiz"), read(f"{server}clusters")
        cluster = read(f"{server}cluster?place=0")
        second = read(f"{server}duplicates?first=20")
        one = read(f"{server}duplicates?{urlencode({'q': 'b&<i>/a.jsonl.zst@31'})}")
        by_raw_key = read(f"{server}duplicates?{urlencode({'q': 'b&<i>/a.jsonl@31'})}")
        removed = read(f"{server}rules?{urlencode({'q': 'b&<i>/a.jsonl@56'})}")
        document = read(f"{server}document?{urlencode({'key': 'b&<i>/a.jsonl.zst@31', 'of': 'duplicates'})}")
    text = Numbers(front).text
    assert all(it in text for it in ("clusters: 25", "duplicates: 25", "removed by rules: 3", "in benchmarks: 1"))
    assert "1 to 20 of 25" in Numbers(pairs).text and "21 to 25 of 25" in Numbers(second).text
    assert "b&<i>/a.jsonl.zst@30 went for b&<i>/a.jsonl.zst@0, similarity 0.9" in Numbers(pairs).text
    assert "1 to 1 of 1" in Numbers(one).text and "1word0" in Numbers(one).text and "2word0" not in one
    said = "none of 0: search b&<i>/a.jsonl.zst@ROW, with the row that gristmill trace OUT b&<i>/a.jsonl@31 shows"
    assert said in Numbers(by_raw_key).text and "1 to 1 of 1" in Numbers(removed).text
    assert "words is 8" in Numbers(rules).text and f"{HOSTILE} few" in Numbers(rules).text
    assert "a.jsonl.zst@29 has quiz.jsonl@0 of quiz" in Numbers(spans).text
    assert Numbers(spans).text.count("29word9") >= 2
    assert "1 to 20 of 25" in Numbers(clusters).text and "2 documents" in Numbers(clusters).text
    assert "0word0" in Numbers(cluster).text and "<mark>" in cluster
    assert "a.jsonl.zst@0, not removed" in Numbers(cluster).text
    assert "a.jsonl.zst@30, removed for b&<i>/a.jsonl.zst@0" in Numbers(cluster).text
    assert "1word89 more" in Numbers(document).text
    for page in (pairs, rules, cluster, document):
        assert not {"script", "img"} & Numbers(page).tags and HOSTILE.split()[0] in Numbers(page).text


def test_documents_are_named_and_found_by_their_own_ids(config: RunConfig) -> None:
    with served(config.out) as server:
        for name, shown in (("duplicates", 1), ("clusters", 1), ("rules", 0)):
            found = read(f"{server}{name}?{urlencode({'q': '<i>31'})}")
            assert f"1 to 1 of {shown}" in found if shown else "none of 0" in found, name
        pairs, rules, cluster = (
            read(f"{server}{name}") for name in ("duplicates?q=%3Ci%3E31", "rules", "cluster?place=1")
        )
    assert all("@31 (id <i>31)" in Numbers(page).text for page in (pairs, cluster))
    assert "@1 (id <i>1)" in Numbers(pairs).text and "@56 (id <i>56)" in Numbers(rules).text


@pytest.mark.thorough
def test_a_run_in_a_bucket_is_browsed(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("", "duplicates", "rules?rule=words", "spans?benchmark=quiz", "clusters", "cluster?place=0")
    names += (f"duplicates?{urlencode({'q': 'b&<i>/a.jsonl.zst@31'})}",)
    with served(config.out) as server:
        here = [Numbers(read(f"{server}{name}")).text for name in names]
    with object_store() as store:
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        store.upload_tree(config.out, "out")
        with served(Path(f"s3://{BUCKET}/out")) as server:
            there = [Numbers(read(f"{server}{name}")).text for name in names]
    assert "1 to 20 of 25" in there[1] and there == [
        text.replace(str(config.out), f"s3://{BUCKET}/out") for text in here
    ]


def test_marks_are_a_list_that_a_run_takes_back(config: RunConfig, tmp_path: Path) -> None:
    listed, before = tmp_path / "list.txt", {path: path.stat().st_mtime_ns for path in config.out.rglob("*")}
    by_text = f"gone sha256:{32 * '0'} by request\n"
    listed.write_text(by_text)
    with served(config.out, listed) as server:
        assert mark(server, "b&<i>/a.jsonl.zst@30", "keep") == f"{server}duplicates"
        for row, word in ((2, "drop"), (3, "drop"), (3, "")):
            mark(server, f"b&<i>/a.jsonl.zst@{row}", word)
        content = f"{by_text}drop b&<i>/a.jsonl.zst@2\nkeep b&<i>/a.jsonl.zst@30\n"
        assert read(f"{server}keep_list.txt") == content == listed.read_text()
    with served(config.out, listed) as server:
        assert "2 marked: the list" in Numbers(read(server)).text
        assert re.search(r'value="keep" disabled', read(f"{server}document?key=b%26%3Ci%3E/a.jsonl.zst@30&of=clusters"))
    assert {path: path.stat().st_mtime_ns for path in config.out.rglob("*")} == before
    counts = {}
    for name, given in (("", None), ("listed", listed)):
        funnel = run(RunConfig(**{**vars(config), "out": tmp_path / f"out{name}", "keep_list": given}))
        assert funnel is not None
        counts[name] = [Counts(funnel.tallies, []).total(reason).documents for reason in ("duplicate", "in your list")]
    assert counts == {"": [25, 0], "listed": [24, 1]}


@pytest.mark.parametrize(
    "back", ["//example.com", "/\\example.com", "javascript:alert(1)", "/\r\nSet-Cookie: a=b", "/ü"]
)
def test_a_mark_leads_to_no_other_site(config: RunConfig, back: str) -> None:
    with served(config.out) as server:
        assert mark(server, "b&<i>/a.jsonl.zst@3", "", back) == server


def test_only_pages_of_the_server_may_ask(config: RunConfig) -> None:
    with served_by_a_command(config.out) as server:
        port = int(server.rstrip("/").rpartition(":")[2])
        for ask in (
            lambda: read(server, Host="example.com"),
            lambda: mark(server, "b&<i>/a.jsonl.zst@3", "drop", Origin="http://example.com"),
        ):
            with pytest.raises(HTTPError, match="403"):
                ask()
        for name, code in (("nowhere", 404), ("document?key=x", 400)):
            with pytest.raises(HTTPError, match=str(code)):
                read(f"{server}{name}")
        assert "There is no such cluster" in read(f"{server}cluster?place=99")
        assert "none of 25" in read(f"{server}duplicates?first=400")
        outside = socket.gethostbyname(socket.gethostname())
        if not outside.startswith("127."):
            with pytest.raises(OSError), socket.create_connection((outside, port), 2):
                pass
        taken = gristmill("browse", config.out, "--port", port)
        assert taken.returncode == 2 and "expected a port that is free" in taken.stderr


@pytest.mark.parametrize(("name", "said"), [("run.json", "got no run.json"), ("dup/duplicates.parquet", "is damaged")])
def test_a_folder_of_no_run_and_a_damaged_table(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "dup").mkdir()
    if name != "run.json":
        (tmp_path / "run.json").write_text('{"corpus": "corpus", "dedup": {}}')
        (tmp_path / name).write_text("no table")
    done = gristmill("browse", tmp_path)
    assert done.returncode and said in done.stderr and "Traceback" not in done.stderr


def test_a_page_of_clusters_reads_its_own_rows(config: RunConfig, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "dup").mkdir()
    (tmp_path / "run.json").write_bytes((config.out / "run.json").read_bytes())
    write_clusters(tmp_path / "dup/connected_components.parquet", 100_000)
    groups = list[int]()
    read_row_groups = pq.ParquetFile.read_row_groups

    def counted(file: pq.ParquetFile, row_groups: list[int]) -> pa.Table:
        groups.extend(row_groups)
        return read_row_groups(file, row_groups)

    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", counted)
    with RunTables(tmp_path) as tables:
        index = tables.clusters
        assert index and len(index.sizes) == 100_000 and groups == []
        page = Pages(tables, KeepMarks(None)).show("clusters", {})
    assert page and b"1 to 20 of 100,000" in page
    assert len(groups) == 20 < tables.tables["clusters"].file.num_row_groups  # the first member of each cluster shown


@pytest.mark.thorough
@in_a_browser
def test_chromium_shows_100_000_clusters(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "dup").mkdir()
    (tmp_path / "run.json").write_bytes((config.out / "run.json").read_bytes())
    write_clusters(tmp_path / "dup/connected_components.parquet", 100_000)
    assert pq.read_metadata(tmp_path / "dup/connected_components.parquet").num_rows > 600_000
    with served(tmp_path) as server:
        page = read(f"{server}clusters")
        assert Numbers(dumped(f"{server}clusters", tmp_path)).text.split() == Numbers(page).text.split()
        assert "1 to 20 of 100,000" in page and "11 documents" in page
        assert "20 of 100,000" in read(f"{server}clusters?q=web")
        assert "of 1 " in read(f"{server}clusters?q=web/a.jsonl@7")


@with_a_mouse
def test_clicks_search_open_and_mark(config: RunConfig, tmp_path: Path) -> None:
    listed = tmp_path / "list.txt"
    with served(config.out, listed) as server, driven_browser() as browser:
        browser.open(server)
        browser.click('a[href="/duplicates"]')
        assert browser.shows("1 to 20 of 25")
        browser.write('input[name="q"]', "b&<i>/a.jsonl.zst@31\n")
        assert browser.shows("1 to 1 of 1 ")
        browser.click('button[value="keep"]')
        assert browser.shows("1 marked: the list") and browser.shows("1 to 1 of 1 ")  # the same page
        assert listed.read_text() == "keep b&<i>/a.jsonl.zst@31\n"
        browser.click("h3 a")
        assert browser.shows("gristmill: document") and browser.shows("1word89 more")
        browser.click('button[value=""]')
        assert browser.shows("in benchmarks\ndocument") and listed.read_text() == ""  # no list is named any more
        browser.click('a[href="/clusters"]')
        assert browser.shows("gristmill: clusters")
        browser.click("td a")
        assert browser.shows("gristmill: cluster\n")
        browser.click("form:last-of-type button[value=drop]")
        assert browser.shows("1 marked: the list") and listed.read_text().startswith("drop b&<i>/a.jsonl.zst@")
        assert browser.shows("gristmill: cluster")  # no text of the corpus has run, and changed the title
