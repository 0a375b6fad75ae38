"""Pages of HTML in tests: the numbers in them, beside the records that they name, and as Chromium has them."""

import json
import re
import shutil
import subprocess
import time
from base64 import b64decode
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.patience import patience

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian's package: chromium)")


class Numbers(HTMLParser):
    """The elements of a page with numbers, its tags, and its text."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.found: list[dict[str, str | None]] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if "data-value" in dict(attrs):
            self.found.append(dict(attrs))

    def handle_data(self, data: str) -> None:
        self.text += data


class Elements(HTMLParser):
    """All elements of a page with their attributes, and its text."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def dumped(page: Path | str, profile: Path | None = None) -> str:
    """The page, a file or an address, as Chromium has it after loading; its profile is kept in a folder."""
    folder = profile or Path(page).parent
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile"]
    address = page.as_uri() if isinstance(page, Path) else page
    done = subprocess.run(
        [*command, "--dump-dom", address], capture_output=True, text=True, check=True, timeout=patience(120)
    )
    return done.stdout


def recorded(out: Path, where: str) -> Any:
    """The number that a page names: in a file of JSON, or in the last line of metrics of a kind and a step."""
    file, _, path = where.partition("#/")
    names = path.split("/")
    if file.endswith(".jsonl"):
        records = [json.loads(line) for line in (out / file).read_text().splitlines()]
        value = next(it for it in reversed(records) if [it["kind"], str(it["step"])] == names[:2])
        names = names[2:]
    else:
        value = json.loads((out / file).read_text())
    for name in names:
        value = value[int(name) if isinstance(value, list) else name.replace("~1", "/").replace("~0", "~")]
    return value


def check_recorded(out: Path, page: str) -> set[str]:
    """Each number of a page that names its record equals it; the records that are named."""
    found = [it for it in Numbers(page).found if it.get("data-record")]
    for it in found:
        assert float(it["data-value"] or "nan") == recorded(out, it["data-record"] or ""), it
    return {str(it["data-record"]) for it in found}


DRIVER = shutil.which("chromedriver")
with_a_mouse = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="no chromedriver is installed (Debian's package: chromium-driver)"
)


class Browser:
    """Chromium that is driven: it opens addresses, writes into fields and clicks on what a CSS selector finds."""

    def __init__(self, driver: str) -> None:
        self.driver = driver
        arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        options = {"goog:chromeOptions": {"binary": str(CHROMIUM), "args": arguments}}
        self.session = f"/session/{self._ask('/session', {'capabilities': {'alwaysMatch': options}})['sessionId']}"

    def open(self, address: str) -> None:
        self._ask(f"{self.session}/url", {"url": address})

    def click(self, selector: str) -> None:
        self._ask(f"{self.session}/element/{self._find(selector)}/click", {})

    def write(self, selector: str, text: str) -> None:
        self._ask(f"{self.session}/element/{self._find(selector)}/value", {"text": text})

    def shows(self, text: str) -> bool:
        """Whether the page's text has this in it, in the end: a click does not wait for the page that it leads to."""
        deadline = time.monotonic() + patience(60)
        while text not in (found := Numbers(str(self._ask(f"{self.session}/source"))).text):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return bool(found)

    def resize(self, width: int, media: str = "screen") -> None:
        """Lay the page out anew, this many pixels wide, for a screen or for print."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self._tell("Emulation.setDeviceMetricsOverride", size)
        self._tell("Emulation.setEmulatedMedia", {"media": media})

    def find(self, script: str) -> Any:
        """What a function's body in JavaScript returns; of the test, not of the page."""
        return self._ask(f"{self.session}/execute/sync", {"script": script, "args": []})

    def printed(self) -> bytes:
        """The page as a PDF."""
        return b64decode(self._ask(f"{self.session}/print", {}))

    def _tell(self, command: str, parameters: dict[str, Any]) -> None:
        self._ask(f"{self.session}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def close(self) -> None:
        self._ask(self.session, method="DELETE")

    def _find(self, selector: str) -> str:
        found = self._ask(f"{self.session}/element", {"using": "css selector", "value": selector})
        return str(next(iter(found.values())))

    def _ask(self, path: str, body: dict[str, Any] | None = None, method: str | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        with urlopen(Request(f"{self.driver}{path}", data, method=method), timeout=patience(120)) as answer:
            return json.loads(answer.read())["value"]


@contextmanager
def driven_browser() -> Iterator[Browser]:
    """A Chromium that a test drives."""
    process = subprocess.Popen([str(DRIVER), "--port=0"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        port = next(int(found[1]) for line in process.stdout if (found := re.search(r"on port (\d+)\.", line)))
        browser = Browser(f"http://127.0.0.1:{port}")
        try:
            yield browser
        finally:
            browser.close()
    finally:
        process.terminate()
        process.wait(patience(60))
        process.stdout.close()
