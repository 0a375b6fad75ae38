"""Recipes of quality rules beside datatrove's filters: decisions document for document, and MB/s of a core.

    python benchmarks/bench_recipes.py CORPUS --peer PYTHON

PYTHON is an interpreter with datatrove, nltk and spacy, of an environment of its own. Both sides judge the same texts
in turns, each in one process, by processor time; reading and writing are not in it.
"""

import json
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import tyro

from gristmill.io.readers import read_corpus
from gristmill.text import utf8_size

NAMES = {
    "dup_para_frac": "repeated_paragraphs", "dup_para_char_frac": "repeated_paragraph_characters",
    "dup_line_frac": "repeated_lines", "dup_line_char_frac": "repeated_line_characters",
    **{f"top_{n}_gram": f"top_{n}_gram" for n in (2, 3, 4)},
    **{f"duplicated_{n}_n_grams": f"repeated_{n}_grams" for n in range(5, 11)},
    "gopher_short_doc": "words", "gopher_long_doc": "words", "gopher_below_avg_threshold": "mean_word_length",
    "gopher_above_avg_threshold": "mean_word_length", "gopher_too_many_hashes": "hashes_per_word",
    "gopher_too_many_ellipsis": "ellipses_per_word", "gopher_too_many_bullets": "bullet_lines",
    "gopher_too_many_end_ellipsis": "ellipsis_lines", "gopher_below_alpha_threshold": "alphabetic_words",
    "gopher_enough_stop_words": "stop_words", "lorem_ipsum": "lorem_ipsum", "curly_bracket": "curly_brackets",
    "too_few_sentences": "sentences", "line_punct_ratio": "ended_lines", "short_line_ratio": "short_lines",
    "char_dup_ratio": "repeated_nonblank_characters", "list_ratio": "newlines_per_word", "": "", "empty": "words",
}  # fmt: skip


def main(
    corpus: tyro.conf.Positional[Path],
    peer: Path = Path(sys.executable),
    recipes: tuple[str, ...] = ("gopher", "c4", "fineweb"),
    rounds: int = 1,
    every: int = 1,
    show: int = 0,
) -> None:
    """Print the table of each recipe: rule, documents removed by datatrove and by us, decisions that differ, MB/s.

    Args:
        corpus: A corpus folder.
        peer: Interpreter with datatrove.
        recipes: Names of recipes of the package.
        rounds: Runs of each side, in turns; the fastest counts.
        every: Judge each n-th document.
        show: Most documents of each recipe to name whose decision differs.
    """
    documents = list(read_corpus(corpus))[::every]
    megabytes = sum(utf8_size(document.text) for document in documents) / 1e6
    print(f"{len(documents):,} documents, {megabytes:.1f} MB")
    with tempfile.TemporaryDirectory() as name:
        texts, output = Path(name) / "texts.jsonl", Path(name) / "out.json"
        texts.write_text("".join(json.dumps(document.text) + "\n" for document in documents))
        for recipe in recipes:
            seconds, rules = {"datatrove": [float("inf")], "ours": [float("inf")]}, {}
            for _ in range(rounds):
                for side, python in (("datatrove", peer), ("ours", Path(sys.executable))):
                    script = Path(__file__).with_name("recipes_peer.py")
                    subprocess.run([python, script, side, recipe, texts, output], check=True)
                    found = json.loads(output.read_text())
                    seconds[side].append(found["seconds"])
                    rules[side] = found["rules"]
            theirs, ours = [NAMES[rule] for rule in rules["datatrove"]], rules["ours"]
            print_table(recipe, theirs, ours, *(megabytes / min(seconds[side]) for side in seconds))
            differ = [n for n, pair in enumerate(zip(theirs, ours, strict=True)) if pair[0] != pair[1]]
            for n in differ[:show]:
                print(f"  {documents[n].key}: {theirs[n] or 'kept'} | {ours[n] or 'kept'}")


def print_table(recipe: str, theirs: list[str], ours: list[str], their_speed: float, our_speed: float) -> None:
    """One row for each rule, and one for all; a rule's decisions differ where one side alone has it."""
    print(f"\n| {recipe} | datatrove | ours | differ |\n|---|---|---|---|")
    there, here = Counter(theirs), Counter(ours)
    pairs = list(zip(theirs, ours, strict=True))
    for rule in [*dict.fromkeys(name for name in NAMES.values() if name and (there[name] or here[name]))]:
        differ = sum((a == rule) != (b == rule) for a, b in pairs)
        print(f"| {rule} | {there[rule]:,} | {here[rule]:,} | {differ:,} |")
    removed = [sum(map(bool, side)) for side in (theirs, ours)]
    print(f"| **removed** | {removed[0]:,} | {removed[1]:,} | {sum(bool(a) != bool(b) for a, b in pairs):,} |")
    print(f"| MB/s a core | {their_speed:.2f} | {our_speed:.1f} | {our_speed / their_speed:.0f} times |", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
