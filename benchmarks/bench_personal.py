"""Precision, recall and speed of the rules for personal data, on generated text with numbers that only look like some.

    python benchmarks/bench_personal.py --documents 2000

Each document has words, one number or address of each kind, and one of each look-alike. Recall is the share of those
planted that are replaced; precision is the share of replacements that are of those planted.
"""

import argparse
import random
import string
import time

from stdnum import iban, luhn

from preprocessing.quality.personal import REPLACEMENTS, PersonalRules

WORDS = ("the", "mill", "grinds", "grain", "and", "sells", "flour", "to", "bakers", "every", "morning", "old", "town")
CARDS = ("4###############", "5[1-5]##############", "34#############", "37#############", "6011############")
ACCOUNTS = {"DE": 18, "GB": "NWBK##############", "FR": 23, "NL": "ABNA##########", "ES": 20, "CH": 17, "PL": 24}
PHONES = (
    "+1 212 555 0###", "+1 (415) 555-2###", "+44 20 7946 0###", "+49 30 901820##", "+33 1 42 68 53 ##",
    "+91 98765 43###",
    "+81 3-3264-1###", "+55 11 91234-5###", "+61 2 9374 4###", "+39 06 6982 1###",
)  # fmt: skip
KEYS = {"AKIA": 16, "ghp_": 36, "AIza": 35, "hf_": 34, "glpat-": 20, "npm_": 36}  # characters after the beginning
ALIKE = (
    "2026-11-29 12:30:45", "978-3-16-148410-#", "v10.#.12.3-rc1", "order 1234-5678-####",
    "52.5200#, 13.4050#",
    "1,234,567,8##", "550e8400-e29b-41d4-a716-44665544000#", "10.0.0.#", "user@localhost", "4111 1111 1111 111#0",
    "DE89 3704 0044 0532 0130 0#1", "+1 23# 45", "sha256:9f86d081884c7d659a2f#",
    "AKIA-EXAMPLE-#", "ISO 9001:201#", "page 1000-1##0", "1.2.3.4.#", "EUR 1 000 000.##", "tel 911",
    "12345678901#######",
)  # fmt: skip


def fill(pattern: str, chance: random.Random) -> str:
    """Return a pattern with a digit for each #, and for [1-5] one of these."""
    pattern = pattern.replace("[1-5]", str(chance.randrange(1, 6)))
    return "".join(chance.choice(string.digits) if sign == "#" else sign for sign in pattern)


def make_item(kind: str, chance: random.Random) -> str:
    """Return an address, number or key of a kind, valid by its own rules."""
    if kind == "mail":
        name = "".join(chance.choices(string.ascii_lowercase, k=7))
        domain = chance.choice(("mail.org", "web.de", "post.co.uk"))
        return f"{name}.{chance.choice(WORDS)}@{domain}"
    if kind == "ip":
        return f"8.{chance.randrange(256)}.{chance.randrange(256)}.{chance.randrange(1, 255)}"
    if kind == "card":
        digits = fill(chance.choice(CARDS), chance)[:-1]
        digits += luhn.calc_check_digit(digits)
        return " ".join(digits[at : at + 4] for at in range(0, len(digits), 4)) if chance.random() < 0.5 else digits
    if kind == "iban":
        return _account(chance)
    if kind == "phone":
        return fill(chance.choice(PHONES), chance)
    beginning = chance.choice(list(KEYS))
    letters = string.ascii_uppercase if beginning == "AKIA" else string.ascii_letters
    return beginning + "".join(chance.choices(letters, k=KEYS[beginning]))


def _account(chance: random.Random) -> str:
    """Return an account with valid check digits, national ones included where they are checked."""
    while True:
        country = chance.choice(list(ACCOUNTS))
        body = ACCOUNTS[country]
        national = fill("#" * body if isinstance(body, int) else body, chance)
        number = country + iban.calc_check_digits(f"{country}00{national}") + national
        if iban.is_valid(number):
            spaced = " ".join(number[at : at + 4] for at in range(0, len(number), 4))
            return spaced if chance.random() < 0.5 else number


def measure(documents: int, seed: int = 1) -> dict[str, tuple[float, float, float]]:
    """Return recall, precision and MB/s of each kind."""
    chance = random.Random(seed)
    found = dict[str, tuple[float, float, float]]()
    for kind, replacement in REPLACEMENTS.items():
        rules = PersonalRules(**{kind: True})
        planted = hits = replaced = size = 0
        seconds = 0.0
        for _ in range(documents):
            items = {name: make_item(name, chance) for name in REPLACEMENTS}
            pieces = [*items.values(), *(fill(pattern, chance) for pattern in ALIKE)]
            chance.shuffle(pieces)
            text = " ".join(f"{' '.join(chance.choices(WORDS, k=12))} {piece}," for piece in pieces)
            began = time.perf_counter()
            rewritten, counts = rules.rewrite(text)
            seconds += time.perf_counter() - began
            planted += 1
            size += len(text)
            replaced += counts.get(kind, 0)
            hits += items[kind] not in rewritten and replacement in rewritten
        found[kind] = (hits / planted, hits / max(replaced, 1), size / 1e6 / seconds)
    return found


def main() -> None:
    """Print a row for each kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=2000)
    for kind, (recall, precision, speed) in measure(parser.parse_args().documents).items():
        print(f"{kind:6} recall {recall:7.2%} precision {precision:7.2%} {speed:8.1f} MB/s")


if __name__ == "__main__":
    main()
