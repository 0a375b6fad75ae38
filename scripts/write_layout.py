"""Write docs/layout.md: the tree of all modules, each with the first line of its docstring.

python scripts/write_layout.py
"""

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAYOUT = ROOT / "docs" / "layout.md"
PACKAGES = {
    "gristmill": "the ground: all packages import it, it imports none of them, and never torch",
    "preprocessing": "stages that decide from one document, or sample",
    "dedup": "stages that compare documents, and write the keys of those to drop",
    "training": "the trainer; the only package that imports torch",
    "gristmill_planner": "what predicts: step time and memory of a layout on a cluster; it imports the trainer",
    "gristmill_parity": "what proves that every layout equals one process, and that equals other code",
    "gristmill_cli": "the front door; it imports all the others",
    "benchmarks": "measurements; not installed",
}
HEAD = """# Layout

From the ground up: a package imports only from `gristmill`, the front door from all; a room (a folder of a package)
imports only from the rooms above it on this page, and the package's own files from all of its rooms. `lint-imports`
checks it. `preprocessing`, `dedup` and `training` meet on disk only: document files, key sets, token shards. `tests/`
mirrors these folders.

This page is written by `python scripts/write_layout.py` from the first line of each module.
"""


def first_line(path: Path) -> str:
    """The first line of a module's docstring, for a table."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return docstring.partition("\n")[0].replace("|", "\\|")


def rooms(package: str) -> list[Path]:
    """The folders of a package, from its ground up as pyproject.toml has the layers, and the package itself last."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    layers = next((contract["layers"] for contract in contracts if contract.get("containers") == [package]), [])
    names = [name.strip() for layer in reversed(layers) for name in layer.split("|")]
    found = [ROOT / package / name for name in names if (ROOT / package / name).is_dir()]
    return [*(each for room in found for each in (room, *_rooms_within(room))), ROOT / package]


def _rooms_within(room: Path) -> list[Path]:
    return sorted(path.parent for path in room.rglob("__init__.py") if path.parent != room)


def section(package: str, about: str) -> str:
    """A package as a heading and a table of rooms and modules."""
    lines = [f"\n## {package}\n\n{about[0].upper()}{about[1:]}."]
    for room in rooms(package):
        name = room.relative_to(ROOT).as_posix()
        says = "" if name == package else f" {first_line(room / '__init__.py')}"
        lines.append(f"\n**{name}/**{says}\n\n| | |\n|---|---|")
        files = (path for path in sorted(room.glob("*.py")) if path.name != "__init__.py")
        lines += [f"| `{path.name}` | {first_line(path)} |" for path in files]
    return "\n".join(lines) + "\n"


def layout() -> str:
    """The whole page."""
    return HEAD + "".join(section(package, about) for package, about in PACKAGES.items())


if __name__ == "__main__":
    LAYOUT.write_text(layout(), encoding="utf-8")
