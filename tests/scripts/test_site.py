"""The site is built without a dead link; its pages fetch nothing, and a browser shows them."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gristmill_cli.__main__ import GROUPS
from tests.gristmill_cli.documentation import DOCS, PAGES, ROOT
from tests.patience import patience

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the extra docs is not installed")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-d", out]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def test_every_page_is_in_the_navigation() -> None:
    listed = {*re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text())}
    assert listed == {page for page in PAGES if page != "README.md"}


def test_all_commands_and_functions_are_on_their_pages(site: Path) -> None:
    commands = (site / "reference/commands.html").read_text()
    assert all(f"gristmill {name}" in commands for group in GROUPS.values() for name in group)
    assert "--dedup.threshold" in commands and "--optim.weight_decay" in commands
    functions = (site / "reference/python.html").read_text()
    for name in re.findall(r"^::: ([\w.]+)", (DOCS / "reference/python.md").read_text(), re.MULTILINE):
        assert f'id="{name}"' in functions


def test_options_that_pages_name_are_those_of_commands(site: Path) -> None:
    known = {*re.findall(r"--[\w.]+", (site / "reference/commands.html").read_text())}
    named = {(page, option) for page in PAGES for option in re.findall(r"--[a-z]+\.[a-z_0-9]+", PAGES[page])}
    assert sorted((page, option) for page, option in named if option not in known) == []


def test_pages_fetch_nothing_and_are_found(site: Path) -> None:
    for page in site.rglob("*.html"):
        tags = re.findall(r'<(?:script|img|link rel="stylesheet")[^>]*>', page.read_text())
        assert not [tag for tag in tags if re.search(r'(?:src|href)="(?:https?:)?//', tag)], page
    assert "guides/coming-from/datatrove.html" in (site / "search/search_index.json").read_text()


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian's package: chromium)")
@pytest.mark.parametrize("page", ["index.html", "tutorials/first-model.html"])
def test_a_browser_shows_it(site: Path, page: str) -> None:
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom"]
    done = subprocess.run(
        [CHROMIUM, *flags, site / page], capture_output=True, text=True, check=True, timeout=patience(120)
    )
    assert "<h1" in done.stdout and "md-nav__link--active" in done.stdout
