"""gristmill card: a README.md beside the tokens whose numbers are the records', as the Hub's library reads it."""

import base64
import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import DatasetCard

from gristmill.errors import UsageError
from gristmill.io.token_shards import Manifest
from gristmill_cli.cards.data_card import card
from gristmill_cli.funnel import show_funnel
from gristmill_cli.run import run
from gristmill_cli.run_config import Mix, RunConfig, Tokenizer
from tests.gristmill_cli.corpus import write_records
from tests.gristmill_cli.in_process import gristmill


def test_the_numbers_are_those_of_the_records(finished: tuple[Path, Path, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished[1], out)
    card(out, "My mill's grain")
    text = (out / "tokens/README.md").read_text()
    read = DatasetCard(text)
    assert read.data.pretty_name == "My mill's grain" and read.data.size_categories == ["n<1K"]
    funnel, manifest = show_funnel(out), Manifest.load(out / "tokens/train")
    for source, tokens in funnel.tokens["train"].items():
        tally = funnel.tallies[source]
        row = next(line for line in text.splitlines() if line.startswith(f"| {source} |"))
        cells = [cell.strip().replace(",", "") for cell in row.strip("|").split("|")]
        assert [int(cells[at]) for at in (1, 3, 5)] == [tally["read"].documents, tally["train"].documents, tokens]
    for reason in ("short", "duplicate"):
        number = sum(tallies[reason].documents for tallies in funnel.tallies.values() if reason in tallies)
        assert f"| {reason} | {number:,} |" in text
    assert manifest.tokenizer.sha256 in text
    card(out, "My mill's grain")
    assert (out / "tokens/README.md").read_text() == text


def test_what_is_written_below_the_marker_stays(finished: tuple[Path, Path, str], tmp_path: Path) -> None:
    shutil.copytree(finished[1], tmp_path / "out")
    card(tmp_path / "out")
    path = tmp_path / "out/tokens/README.md"
    first = path.read_text()
    assert str(tmp_path) not in first and str(finished[0].parent) not in first  # no folder of this machine
    path.write_text(f"{first}\n## Licence\n\nOf the miller’s heirs.\n")
    card(tmp_path / "out", "Another name")
    again = path.read_text()
    assert again.endswith("again. -->\n\n## Licence\n\nOf the miller’s heirs.\n") and again.count("-->") == 1
    assert 'pretty_name: "Another name"' in again


def test_the_rules_of_the_recipe_are_told(tmp_path: Path) -> None:
    (tmp_path / "corpus/book").mkdir(parents=True)
    texts = [" ".join(f"{number}word{at}" for at in range(60)) for number in range(40)]
    write_records(tmp_path / "corpus/book/a.jsonl", [{"text": text} for text in [*texts, "few"]])
    recipe = tmp_path / "own.toml"
    recipe.write_text("words.min = 50\n")
    run(
        RunConfig(tmp_path / "corpus", tmp_path / "out", workers=1, recipe=str(recipe), mix=Mix(holdout=0.1),
                  tokenizer=Tokenizer(vocab_size=300, exact=False))
    )  # fmt: skip
    card(tmp_path / "out")
    text = (tmp_path / "out/tokens/README.md").read_text()
    assert "## Rules of the recipe own.toml\n\n```toml\nwords.min = 50\n```" in text
    assert "| words | 1 |" in text and str(tmp_path) not in text
    recipe.write_text("words.min = 2\n")
    card(tmp_path / "out")
    assert "has changed since the run" in (tmp_path / "out/tokens/README.md").read_text()


def test_what_is_no_finished_run_is_refused(finished: tuple[Path, Path, str], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected the --out of a gristmill run, got no run\.json"):
        card(tmp_path)
    shutil.copytree(finished[1], tmp_path / "out")
    (tmp_path / "out/tokens/README.md").write_text("# Mine\n")
    with pytest.raises(UsageError, match=r"README\.md exists, and gristmill card did not write it; move it"):
        card(tmp_path / "out")
    (tmp_path / "out/funnel.json").unlink()
    with pytest.raises(UsageError, match="that has finished"):
        card(tmp_path / "out")


class Uploads(BaseHTTPRequestHandler):
    """The part of a Hub that takes small files in a commit; the server's `repos` and `files` have what was sent."""

    server: Any

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        dataset = f"http://{self.headers['Host']}/datasets/org/grain"
        answer: dict[str, Any] = {"url": dataset, "commitUrl": f"{dataset}/commit/{'0' * 40}", "commitOid": "0" * 40}
        if self.path == "/api/repos/create":
            self.server.repos.append(json.loads(body))
        elif self.path.endswith("/preupload/main"):
            names = [it["path"] for it in json.loads(body)["files"]]
            answer = {"files": [{"path": it, "uploadMode": "regular", "shouldIgnore": False} for it in names]}
        elif self.path.endswith("/commit/main"):
            lines = [json.loads(line) for line in body.splitlines()]
            files = (line["value"] for line in lines if line["key"] == "file")
            self.server.files |= {it["path"]: base64.b64decode(it["content"]) for it in files}
        self._answer(answer)

    def do_GET(self) -> None:
        self._answer({"id": "org/grain", "sha": "0" * 40})

    def _answer(self, found: Any) -> None:
        data = json.dumps(found).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def test_a_push_uploads_the_tokens_and_the_card(finished: tuple[Path, Path, str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished[1], out)
    target = "hf://datasets/org/grain"
    missing = gristmill("push", out, target, "--dry_run", "true")
    assert missing.returncode == 2 and "write it first: gristmill card" in missing.stderr
    card(out)
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Uploads)
    server.repos, server.files = [], {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    there = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_TOKEN": "hf_x", "HF_HUB_DISABLE_XET": "1"}
    try:
        dry = gristmill("push", out, target, "--dry_run", "true", **there)
        assert dry.returncode == 0 and not server.repos and not server.files
        files = {
            path.relative_to(out / "tokens").as_posix(): path.read_bytes()
            for path in sorted((out / "tokens").rglob("*"))
            if path.is_file() and ".gristmill" not in path.parts
        }
        listed = {name: int(size.replace(",", "")) for size, name in map(str.split, dry.stdout.splitlines()[:-1])}
        assert listed == {name: len(data) for name, data in files.items()} and "README.md" in listed
        assert "nothing was sent" in dry.stdout
        done = gristmill("push", out, target, **there)
        assert done.returncode == 0, done.stderr
        assert server.files == files and server.repos[0]["name"] == "grain"
        assert (
            server.repos[0].get("private") or server.repos[0].get("visibility") == "private"
        )  # by the library's version
    finally:
        server.shutdown()
        server.server_close()
    gone = gristmill("push", out, target, **there)
    assert gone.returncode == 1 and "cannot be reached" in gone.stderr and "Traceback" not in gone.stderr
    for wrong in ("hf://datasets/grain", "s3://bucket/grain", "hf://datasets/org/grain/folder", "grain"):
        refused = gristmill("push", out, wrong)
        assert refused.returncode == 2 and "expected hf://datasets/ORG/NAME" in refused.stderr
