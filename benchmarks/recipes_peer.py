"""Process of bench_recipes: judge texts by datatrove's filters or by ours.

`python recipes_peer.py datatrove|ours RECIPE TEXTS.jsonl OUT.json` writes the seconds and, of each text, the rule that
removed it (empty if kept).
"""

import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

Judge = Callable[[str], str]


def datatrove_judge(recipe: str) -> Judge:
    """The filters of datatrove, in the order of the recipe."""
    Document = import_module("datatrove.data").Document
    filters = import_module("datatrove.pipeline.filters")

    gopher: list[Any] = [filters.GopherRepetitionFilter(), filters.GopherQualityFilter()]
    steps = {
        "gopher": gopher,
        "c4": [filters.C4QualityFilter()],
        "fineweb": [*gopher, filters.C4QualityFilter(filter_no_terminal_punct=False), filters.FineWebQualityFilter()],
    }[recipe]

    def judge(text: str) -> str:
        document = Document(text=text, id="")
        for step in steps:
            found = step.filter(document)
            if found is not True:
                return str(found[1])
        return ""

    return judge


def our_judge(recipe: str) -> Judge:
    """The recipe of the package."""
    sys.path[0] = str(Path(__file__).resolve().parents[1])
    from preprocessing.quality.recipe import load_recipe
    from preprocessing.quality.words import WordSplitter

    rules, splitter = load_recipe(recipe), WordSplitter()
    return lambda text: rules.judge(text, splitter).rule


def main() -> None:
    peer, recipe, source, output = sys.argv[1:]
    judge = datatrove_judge(recipe) if peer == "datatrove" else our_judge(recipe)
    with Path(source).open(encoding="utf-8") as file:
        texts = [json.loads(line) for line in file]
    judge("Warm up. " * 60)
    start = time.process_time()
    rules = [judge(text) for text in texts]
    Path(output).write_text(json.dumps({"seconds": time.process_time() - start, "rules": rules}))


if __name__ == "__main__":
    main()
