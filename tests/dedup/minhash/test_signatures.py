"""Signatures equal datasketch's bit for bit, for every hash family, script, unit and length."""

import hashlib
import random
import re
import string
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from datasketch import MinHash
from hypothesis import given, settings
from hypothesis import strategies as st

from dedup.minhash import signatures as minhash
from dedup.minhash.matching_form import CHUNK_BYTES, MAX_WORD
from dedup.minhash.schemes import EMPTY, MERSENNE_PRIME, Hash
from dedup.minhash.signatures import DATATROVE, Sketch, jaccard, signatures
from gristmill.errors import UsageError
from gristmill.text import matching_form

SCRIPTS = [
    range(0x20, 0x7F), range(0x61, 0x7B), range(0xC0, 0x250), range(0x370, 0x400), range(0x400, 0x500),
    range(0x5D0, 0x5EB), range(0x620, 0x64B), range(0x900, 0x980), range(0xE00, 0xE5B), range(0x1200, 0x1280),
    range(0x3040, 0x3100), range(0x4E00, 0x5000), range(0xAC00, 0xAD00), range(0x10330, 0x1034B),
    range(0x1F300, 0x1F650), range(0x1E900, 0x1E944), range(0x300, 0x370),
]  # fmt: skip
SPACES = " \t\n\v\f\r\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2000\u2003\u200a\u2028\u2029\u202f\u205f\u3000"
NOT_SPACES = "\u200b\u180e\ufeff\u2060\0\x7f\x80"
ODD = [
    "", " ", "!", "a", "a" * 12, "a" * 13, "a" * 14, "abcdefghijkl", "abcdefghijklm", "abcdefghijklmn",
    "İstanbul'da İİİ bir şey İ", "ὈΔΥΣΣΕΎΣ ΤΗΣ ΟΔΟΣ. Σ ΣΑΣ", "Kelvin \u212a and Ångström \u212b, ẞ ß ﬁ ǅ",
    "nul\0in the\0middle of the text", "👩‍👩‍👧‍👦🇩🇪 emoji families 👍🏽 and flags 🏴‍☠️",
    "...!!!???" * 9, "a.b,c;d!e " * 9,
    f"a{SPACES}b" * 9, f"{SPACES}leading and trailing, beyond ASCII{SPACES}",
    f"{NOT_SPACES} are no spaces {NOT_SPACES}",
    " ".join(f"wo{space}rd" for space in SPACES + NOT_SPACES), "x" * 5000, "\U0010ffff\uffff\ue000" * 9,
]  # fmt: skip
DATASKETCH = {
    "xxh32": {"hashfunc": xxhash.xxh32_intdigest},
    "sha1": {"scheme": "legacy"},
    "sha1-affine32": {},
    "xxh32-mersenne": {"hashfunc": xxhash.xxh32_intdigest, "scheme": "legacy"},
}
FAMILIES = list(DATASKETCH)
SKETCHES = [Sketch(name) for name in FAMILIES]  # type: ignore[arg-type]


def some_texts(count: int, seed: int) -> list[str]:
    """Texts that mix scripts, spaces and punctuation, of many lengths."""
    chance = random.Random(seed)
    texts = []
    for _ in range(count):
        scripts = chance.sample(SCRIPTS, chance.randint(1, 3))
        pieces = [chr(chance.choice(chance.choice(scripts))) for _ in range(chance.choice([5, 13, 40, 200]))]
        for _ in range(len(pieces) // 6):
            pieces[chance.randrange(len(pieces))] = chance.choice(SPACES + string.punctuation + NOT_SPACES)
        texts.append("".join(pieces))
    return texts


def shingles_of(text: str, width: int, unit: str = "character") -> list[bytes]:
    form = matching_form(text)
    units, joint = (form, "") if unit == "character" else (form.split(), " ")
    if unit == "word" and sum(map(len, units)) > MAX_WORD * len(units):
        units, joint, width = form, "", 13
    return [joint.join(units[i : i + width]).encode() for i in range(len(units) - width + 1)]


@cache
def blank(sketch: Sketch) -> MinHash:
    return MinHash(sketch.permutations, seed=sketch.seed, **DATASKETCH[sketch.hash])


def assert_equal_to_datasketch(texts: list[str], sketch: Sketch) -> None:
    values, shingles = signatures(texts, sketch)
    for text, ours, count in zip(texts, values, shingles, strict=True):
        windows, peer = shingles_of(text, sketch.width, sketch.unit), blank(sketch).copy()
        if windows:
            peer.update_batch(windows)
        assert count == len(windows), text
        assert ours.tolist() == peer.hashvalues.tolist(), text


@pytest.mark.parametrize("sketch", SKETCHES, ids=str)
def test_equal_to_datasketch_in_many_scripts(sketch: Sketch) -> None:
    assert_equal_to_datasketch(ODD + some_texts(400, seed=5), sketch)


@pytest.mark.parametrize("hash", ["xxh32", "sha1"])
@pytest.mark.parametrize("width", [*range(1, 41), 55, 56, 63, 64, 65, 100])
def test_equal_to_datasketch_at_every_width(hash: str, width: int) -> None:
    assert_equal_to_datasketch(ODD + some_texts(20, seed=width), Sketch(hash, width))  # type: ignore[arg-type]


@pytest.mark.parametrize("hash", FAMILIES)
@pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 40])
def test_equal_to_datasketch_for_words(hash: str, width: int) -> None:
    chance = random.Random(width)
    texts = [" ".join(some_texts(12, seed)) for seed in range(20)]
    texts += [" ".join("w" * chance.choice([1, 3, 9, 60, 70, 300]) for _ in range(300)), "one two  three\nfour, five"]
    assert_equal_to_datasketch(ODD + texts, Sketch(hash, width, unit="word"))  # type: ignore[arg-type]


def test_the_words_of_datatrove() -> None:
    values, shingles = signatures(
        ["Five words, no MORE, here!", "five words no more here", "only four words here"], DATATROVE
    )
    assert values.shape == (3, 14 * 8)
    assert shingles.tolist() == [1, 1, 0]
    assert (values[0] == values[1]).all()


@pytest.mark.parametrize("hash", FAMILIES)
@pytest.mark.parametrize(("permutations", "seed"), [(1, 1), (7, 3), (64, 1), (129, 1), (256, 42), (4096, 1)])
def test_equal_to_datasketch_for_permutations_and_seeds(hash: str, permutations: int, seed: int) -> None:
    sketch = Sketch(hash, permutations=permutations, seed=seed)  # type: ignore[arg-type]
    assert_equal_to_datasketch(ODD + some_texts(10, seed), sketch)


@pytest.mark.parametrize("sketch", SKETCHES, ids=str)
@pytest.mark.parametrize("letters", [string.ascii_letters + "  ", "абвгдежзиклмн  ", "漢字テスト文書abc "])
def test_equal_to_datasketch_around_the_borders_of_a_block(sketch: Sketch, letters: str) -> None:
    chance = random.Random(1)
    text = matching_form("".join(chance.choices(letters, k=4000)))
    counts = [1, 7, 8, 9, 127, 128, 129, 511, 512, 513, 1023, 1024, 1025, 2049]
    texts = [text[: count + sketch.width - 2].strip() + "z" for count in counts]
    assert_equal_to_datasketch(texts, sketch)


@pytest.mark.parametrize(
    "sketch", [Sketch(), Sketch("sha1"), Sketch(width=1), Sketch(width=15), Sketch("sha1", width=20)], ids=str
)
def test_equal_to_datasketch_where_runs_of_ascii_begin_and_end(sketch: Sketch) -> None:
    chance = random.Random(4)
    letters = chance.choices(string.ascii_lowercase, k=3000)
    texts = []
    for gap in (2, 12, 13, 14, 15, 16, 27, 29, 64, 128, 300, 511, 512, 524, 525, 640, 1024, 1037, 2900):
        for wide in "é’漢👍":
            texts.append("".join(wide if i % gap == gap - 1 else letter for i, letter in enumerate(letters)))
    assert_equal_to_datasketch(texts[:: 1 if sketch.width == 13 else 3], sketch)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), max_size=4), st.sampled_from(SKETCHES))
def test_equal_to_datasketch_for_any_text(texts: list[str], sketch: Sketch) -> None:
    assert_equal_to_datasketch(texts, sketch)


def test_sha1_is_datasketch_1() -> None:
    """Golden values, and the formula of datasketch 1.x in Python's integers."""
    text = "The Quick, Brown Fox jumps over the lazy dog."
    drawn = np.random.RandomState(1)
    expected = []
    for _ in range(128):
        a = int(drawn.randint(1, MERSENNE_PRIME, dtype=np.uint64))
        b = int(drawn.randint(0, MERSENNE_PRIME, dtype=np.uint64))
        hashes = [int.from_bytes(hashlib.sha1(s).digest()[:4], "little") for s in shingles_of(text, 13)]
        expected.append(min((a * h + b) % 2**64 % MERSENNE_PRIME & 0xFFFFFFFF for h in hashes))
    assert expected[:3] + expected[-1:] == [16577316, 19445529, 41971003, 43048091]
    assert signatures([text], Sketch("sha1"))[0][0].tolist() == expected


def test_a_lone_surrogate_is_a_character_like_any_other() -> None:
    values, shingles = signatures(["\ud800" * 13, "a" * 12 + "\udfff", "é" * 13])
    assert shingles.tolist() == [1, 1, 1]
    assert len(np.unique(values[:, 0])) == 3


def test_the_matching_form_of_every_code_point() -> None:
    punctuation = re.compile(f"[{re.escape(string.punctuation)}]")
    for first in range(0, 0x110000, 256):
        text = "".join(f"A{chr(code)}b{chr(code)}{chr(code)} c" for code in range(first, first + 256))
        assert matching_form(text) == re.sub(r"\s+", " ", punctuation.sub("", text.lower())).strip(" ")


def test_a_text_without_a_shingle_has_an_empty_signature() -> None:
    values, shingles = signatures(["", "twelve chars", "a. b! c? d: e;"])
    assert shingles.tolist() == [0, 0, 0]
    assert (values == EMPTY).all()


def test_no_text_at_all() -> None:
    values, shingles = signatures([])
    assert values.shape == (0, 128)
    assert shingles.shape == (0,)


def test_a_signature_does_not_depend_on_its_neighbours() -> None:
    texts = ODD + some_texts(50, seed=2)
    together = signatures(texts)[0]
    assert (together == np.concatenate([signatures([text])[0] for text in texts])).all()


@pytest.mark.parametrize("sketch", [*SKETCHES, Sketch("fss")], ids=str)
@pytest.mark.parametrize("similarity", [0.5, 0.8, 0.95])
def test_estimates_are_close_to_exact_similarities(sketch: Sketch, similarity: float) -> None:
    chance = random.Random(3)
    exact, estimated = [], []
    for _ in range(60):
        words = ["".join(chance.choices(string.ascii_lowercase, k=6)) for _ in range(300)]
        common = int(300 * 2 * similarity / (1 + similarity))
        one, other = " ".join(words), " ".join(words[:common] + [word[::-1] for word in words[common:]])
        a, b = set(shingles_of(one, 13)), set(shingles_of(other, 13))
        exact.append(len(a & b) / len(a | b))
        estimated.append(jaccard(*signatures([one, other], sketch)[0]))
    errors = np.array(estimated) - np.array(exact)
    deviation = (similarity * (1 - similarity) / sketch.permutations) ** 0.5
    assert abs(errors.mean()) < 4 * deviation / 60**0.5
    assert (errors**2).mean() ** 0.5 < 1.5 * deviation


@pytest.mark.parametrize("hash", FAMILIES)
def test_datasketch_estimates_the_same_from_ours(hash: str) -> None:
    sketch = Sketch(hash)  # type: ignore[arg-type]
    one, other = "the mill grinds the grain of the field " * 3, "the mill grinds the grain of the garden " * 3
    theirs = [blank(sketch).copy() for _ in range(2)]
    for peer, text in zip(theirs, (one, other), strict=True):
        peer.update_batch(shingles_of(text, 13))
    values = signatures([one, other], sketch)[0]
    ours = [MinHash(hashvalues=value, scheme=theirs[0].scheme) for value in values]
    assert 0 < ours[0].jaccard(ours[1]) == theirs[0].jaccard(theirs[1]) == ours[0].jaccard(theirs[1]) < 1
    assert jaccard(*values) == ours[0].jaccard(ours[1])


def test_families_draw_different_signatures() -> None:
    values = [signatures(["some text of a few words"], Sketch(hash))[0] for hash in get_args(Hash)]
    assert len({value.tobytes() for value in values}) == len(values) == 5


def test_other_threads_run_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes the interpreter from no thread here, so another one runs only if the kernel releases it."""
    text = "".join(random.Random(1).choices(string.ascii_lowercase, k=100_000))
    kernel, begun, ended = minhash._sign_forms, threading.Event(), threading.Event()

    def watched(*arguments: Any) -> None:
        begun.set()
        kernel(*arguments)
        ended.set()

    def runs_meanwhile() -> bool:
        begun.clear()
        ended.clear()
        with ThreadPoolExecutor(1) as thread:
            thread.submit(signatures, [text], Sketch(permutations=1024))
            begun.wait()
            return not ended.is_set()

    signatures([text], Sketch(permutations=1024))  # compiled
    monkeypatch.setattr(minhash, "_sign_forms", watched)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e6)
    try:
        assert any(runs_meanwhile() for _ in range(100))  # a busy machine may wake this thread too late once
    finally:
        sys.setswitchinterval(interval)


@pytest.mark.parametrize("sketch", [Sketch(), Sketch("xxh32-mersenne")], ids=str)
def test_a_text_that_is_hashed_in_several_spans(sketch: Sketch) -> None:
    chance = random.Random(6)
    for letters in (string.ascii_lowercase, "абвгдежзиклмн "):
        text = matching_form("".join(chance.choices(letters, k=100_000)))
        halves = signatures([text[:50_012], text[50_000:], text], sketch)[0]
        assert (halves[2] == np.minimum(halves[0], halves[1])).all()
        assert (halves[2] != halves[0]).any()


def test_texts_that_are_longer_than_what_is_packed_at_a_time() -> None:
    texts = [
        "short one, but a shingle",
        "a" * 20 + "b" * CHUNK_BYTES,
        "",
        "é" * CHUNK_BYTES,
        "short one, but a shingle",
    ] * 2
    values, shingles = signatures(texts)
    assert (values == np.concatenate([signatures([text])[0] for text in texts])).all()
    assert shingles.tolist() == [11, CHUNK_BYTES + 8, 0, CHUNK_BYTES - 12, 11] * 2


@pytest.mark.parametrize(
    "bad",
    [
        {"hash": "md5"},
        {"width": 0},
        {"permutations": 0},
        {"permutations": 5000},
        {"unit": "line"},
        {"seed": -1},
        {"width": 2.5},
        {"width": "a"},
        {"permutations": True},
    ],
    ids=str,
)
def test_a_sketch_that_cannot_be(bad: dict) -> None:
    with pytest.raises(UsageError, match="expected"):
        Sketch(**bad)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("one text", "texts in a str: expected a list of strings"),
        (b"one text", "texts in a bytes"),
        (None, "texts in a NoneType"),
        (iter(["a"]), "texts in a list_iterator"),
        (np.array("one text"), "texts in a ndarray"),
        (["a", None], "text 1 is null"),
        (pa.array(["a"]), "text 0 is of type StringScalar: expected a string"),
    ],
)
def test_texts_that_cannot_be_signed(texts: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        signatures(texts)
    with pytest.raises(UsageError, match="sketch 13: expected a Sketch"):
        signatures(["a"], 13)


@pytest.mark.parametrize("other", [np.zeros(127, np.uint32), np.zeros((1, 128), np.uint32), None])
def test_what_has_no_similarity(other: object) -> None:
    with pytest.raises(UsageError, match=r"signatures of shapes \(128,\) and .*: expected two of as many slots"):
        jaccard(np.zeros(128, np.uint32), other)
    with pytest.raises(UsageError, match="expected two"):
        jaccard(np.zeros(0, np.uint32), np.zeros(0, np.uint32))


@pytest.mark.parametrize("width", [0, 10**9, 10**20])
def test_widths_that_no_text_has(width: int) -> None:
    with pytest.raises(UsageError, match=r"expected shingles of 1 to 65,535 characters"):
        Sketch(width=width)
