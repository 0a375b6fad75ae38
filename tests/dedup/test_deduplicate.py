"""Deduplication in memory: which texts are kept, and which kept text each duplicate repeats."""

from collections.abc import Callable
from functools import partial
from typing import Literal

import datasets
import llvmlite.binding
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dedup import Sketch, deduplicate
from dedup.tables import as_table
from gristmill.errors import UsageError
from gristmill.text import matching_form
from tests.dedup.template_pages import template_pages


def test_the_first_of_a_cluster_is_kept(texts_of: Callable[[int, int], list[str]]) -> None:
    a, b, c = texts_of(3, 0)
    found = deduplicate([b, a, c, a.upper(), "short", b + "!", "short", a])
    assert found.duplicate_of.tolist() == [0, 1, 2, 1, 4, 0, 4, 1]
    assert found.kept.tolist() == [0, 1, 2, 4]
    assert [cluster.tolist() for cluster in found.clusters] == [[0, 5], [1, 3, 7], [4, 6]]
    assert {found.kept.dtype, found.duplicate_of.dtype, *(c.dtype for c in found.clusters)} == {np.dtype(np.int64)}


def test_a_chain_of_near_duplicates_is_one_cluster(texts_of: Callable[[int, int], list[str]]) -> None:
    words, others = (text.split() for text in texts_of(2, 0))
    chain = [" ".join(others[:i] + words[i:]) for i in range(0, 120, 2)]
    found = deduplicate(chain, verify=None)
    assert found.kept.tolist() == [0]
    assert deduplicate([chain[0], chain[-1]]).kept.tolist() == [0, 1]


@pytest.mark.parametrize("texts", [[], [""], ["some", "same", "", "."]])
def test_nothing_to_compare(texts: list[str]) -> None:
    found = deduplicate(texts)
    assert found.kept.tolist() == found.duplicate_of.tolist() == list(range(len(texts)))
    assert found.clusters == []


def test_both_families_find_the_same_copies(texts_of: Callable[[int, int], list[str]]) -> None:
    texts = [*texts_of(5, 0), *texts_of(3, 2)]
    found = [deduplicate(texts, Sketch(hash)).duplicate_of.tolist() for hash in ("xxh32", "sha1")]
    assert found == [[0, 1, 2, 3, 4, 2, 3, 4]] * 2


def test_bands_beyond_the_permutations() -> None:
    with pytest.raises(UsageError, match="64 permutations"):
        deduplicate(["a text of some length"], Sketch(permutations=64), 13, 9)


def shingles(text: str, width: int) -> set[str]:
    form = matching_form(text)
    return {form[i : i + width] for i in range(len(form) - width + 1)} or {form or text}


LIKE = Sketch(width=2, permutations=16)  # 16 bands of 1 row: whoever shares some shingles is a candidate
_WORDS = st.sampled_from(["grain", "flour", "mill", "wheel", "Water!", "каша", "a"])


@settings(max_examples=60)
@given(
    texts=st.lists(st.lists(_WORDS, max_size=8).map(" ".join), max_size=20), keep=st.sampled_from(["first", "longest"])
)
def test_verified_duplicates_are_similar_and_what_is_kept_is_not(texts: list[str], keep: str) -> None:
    found = deduplicate(texts, LIKE, 1, 16, verify="jaccard", threshold=0.6, keep=keep)
    clusters = deduplicate(texts, LIKE, 1, 16, verify=None, keep=keep).clusters
    expected = np.arange(len(texts))
    for cluster in clusters:
        kept: list[int] = []
        for i in sorted(cluster.tolist(), key=lambda i: (-len(texts[i]) if keep == "longest" else 0, i)):
            sets = [(j, shingles(texts[i], 2), shingles(texts[j], 2)) for j in kept]
            match = next(((j, len(a & b) / len(a | b)) for j, a, b in sets if len(a & b) / len(a | b) >= 0.6), None)
            if match:
                expected[i] = match[0]
                assert found.similarity[i] == match[1]
            else:
                kept.append(i)
                assert np.isnan(found.similarity[i])
    assert found.duplicate_of.tolist() == expected.tolist()


def test_nothing_but_duplicates_goes_by_default() -> None:
    """Precision by a plain program: each text that goes has a similarity of 0.8 or more to its kept one."""
    pages = template_pages(1500)
    pages += [page.replace("a", "A", 3) + "!" for page in pages[:20]]
    found = deduplicate(pages)
    removed = np.setdiff1d(np.arange(len(pages)), found.kept).tolist()
    assert removed == list(range(1500, 1520))
    for index in removed:
        one, other = shingles(pages[index], 13), shingles(pages[int(found.duplicate_of[index])], 13)
        assert len(one & other) / len(one | other) >= 0.8
    unverified = deduplicate(pages, verify=None)
    assert len(unverified.kept) < 1400 and "not measured" in repr(unverified)


def test_a_threshold_chooses_the_bands(texts_of: Callable[[int, int], list[str]]) -> None:
    texts = [text[:900] for text in texts_of(10, 0)]
    texts += [text[:780] + other[:120] for text, other in zip(texts, texts_of(10, 100), strict=True)]
    assert len(deduplicate(texts, threshold=0.9).kept) == 20
    found = deduplicate(texts, threshold=0.5)
    assert len(found.kept) == 10 and found.bands == (5, 25)
    assert "25 bands of 5 rows find 55 % of the pairs of similarity 0.5" in repr(found)
    assert deduplicate(texts, range=13, threshold=0.5).bands == (13, 9)
    with pytest.raises(UsageError, match=r"threshold 0\.5 has no effect"):
        deduplicate(texts, bands=8, threshold=0.5, verify=None)


@pytest.mark.parametrize("verify", [None, "jaccard"])
def test_identical_texts_are_duplicates_whatever_their_length(verify: Literal["jaccard"] | None) -> None:
    found = deduplicate(["So true!", "2+2", "", "so true", "!?", "?!", "", "!?", "22"], verify=verify)
    assert found.duplicate_of.tolist() == [0, 1, 2, 0, 4, 5, 2, 4, 1]


def test_a_result_prints_as_five_lines() -> None:
    text = "The mill grinds the grain."
    found = deduplicate([text, "Bread is baked from flour.", text.upper(), "short"] + ["again"] * 4)
    assert repr(found).splitlines() == [
        "texts: 8, of which 4 are kept; duplicates: 4 (50.0%)",
        "clusters: 2; texts in the largest: 4",
        "similarity to the kept text: jaccard, at least 0.8; median 1.00, least 1.00",
        "shorter than a shingle, so without a signature: 5 texts (62.5%)",
        "candidates: 9 bands of 13 rows find 40 % of the pairs of similarity 0.8, and 83 % of those from 0.8 to 1",
    ]
    assert len(str(deduplicate([])).splitlines()) == len(str(deduplicate(["a"], verify=None)).splitlines()) == 5


def test_verification_cuts_a_chain(texts_of: Callable[[int, int], list[str]]) -> None:
    words, others = (text.split() for text in texts_of(2, 0))
    chain = [" ".join(others[:i] + words[i:]) for i in range(0, 120, 2)]
    found = deduplicate(chain, verify="jaccard")
    assert 1 < len(found.kept) < 30
    removed = np.setdiff1d(np.arange(len(chain)), found.kept)
    assert (found.similarity[removed] >= 0.8).all()
    assert np.isin(found.duplicate_of, found.kept).all()
    assert [cluster[0] for cluster in found.clusters] == sorted({int(i) for i in found.duplicate_of[removed]})


def columns(texts: list[str]) -> dict[str, list]:
    return {
        "body": texts,
        "site": ["b", "a", "c", "a"],
        "year": [2001, None, 2003, 2002],
        "meta": [{"day": f"2020-01-0{i}"} for i in (4, 3, 2, 1)],
    }


@pytest.fixture
def copies(texts_of: Callable[[int, int], list[str]]) -> list[str]:
    """Four copies of a text, the second one longest."""
    (text,) = texts_of(1, 0)
    return [text, text + " !?", text.upper(), text]


FORMS: list[Callable[[dict], object]] = [
    pa.table,
    pa.RecordBatch.from_pydict,
    pd.DataFrame,
    datasets.Dataset.from_dict,
    lambda found: datasets.Dataset.from_dict(found).with_format("numpy"),
    lambda found: datasets.Dataset.from_dict({k: v[::-1] for k, v in found.items()}).select([3, 2, 1, 0]),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("keep", "kept"),
    [("first", 0), ("longest", 1), ("newest:year", 2), ("newest:meta.day", 0), ("source:site=c,a", 2),
     ("source:site=a", 1)],
)  # fmt: skip
def test_tables_and_data_sets_with_any_policy(copies: list[str], form: Callable, keep: str, kept: int) -> None:
    table = form(columns(copies))
    for verify in (None, "jaccard"):
        found = deduplicate(table, keep=keep, text="body", verify=verify)
        assert found.duplicate_of.tolist() == [kept] * 4
        assert found.clusters[0].tolist() == [kept, *(i for i in range(4) if i != kept)]
    is_set = isinstance(table, datasets.Dataset)
    chosen = table.select(found.kept) if is_set else table.take(found.kept)
    assert [str(text) for text in chosen["body"]] == [copies[kept]]


@pytest.mark.parametrize(
    "form",
    [
        tuple,
        iter,
        pa.array,
        lambda texts: pa.chunked_array([texts[:1], texts[1:]]),
        lambda texts: pa.array(texts, pa.large_string()),
        lambda texts: pa.array(texts).dictionary_encode(),
    ],
)
def test_texts_in_any_form(texts_of: Callable[[int, int], list[str]], form: Callable) -> None:
    texts = [*texts_of(300, 0), *texts_of(9, 250)]  # more than are read together
    assert deduplicate(form(texts)).duplicate_of.tolist() == [*range(300), *range(250, 259)]


@pytest.mark.parametrize("kind", [pa.string_view(), pa.run_end_encoded(pa.int32(), pa.string())])
def test_columns_that_arrow_cannot_take_rows_of(texts_of: Callable[[int, int], list[str]], kind: pa.DataType) -> None:
    (text,) = texts_of(1, 0)
    texts = pa.array([text, "flour", f"{text} !?"])
    column = pc.run_end_encode(texts) if pa.types.is_run_end_encoded(kind) else texts.cast(kind)
    for verify in (None, "jaccard"):
        assert deduplicate(pa.table({"text": column}), keep="longest", verify=verify).kept.tolist() == [1, 2]


def test_texts_of_more_than_two_gigabytes_in_many_chunks() -> None:
    chunk = pa.array(["a" + "x" * (1 << 20), "b"] * 32)
    texts = as_table(pa.table({"text": pa.chunked_array([chunk] * 70)}), "text").texts(np.array([0, 4479, 65]))
    assert [(text[:2], len(text)) for text in texts] == [("ax", (1 << 20) + 1), ("b", 1), ("b", 1)]


@pytest.mark.parametrize("kind", [pa.decimal128(20, 2), pa.float16(), pa.uint64(), pa.date32()])
def test_the_newest_by_any_number_or_date(texts_of: Callable[[int, int], list[str]], kind: pa.DataType) -> None:
    numbers = pa.array([2, 9, 1], pa.int32())
    values = numbers.cast(kind) if kind != pa.float16() else pa.array(np.array([2, 9, 1], np.float16))
    table = pa.table({"text": texts_of(1, 0) * 3, "value": values})
    assert deduplicate(table, keep="newest:value").kept.tolist() == [1]


def test_a_data_set_need_not_be_loaded_for_lists(run: Callable) -> None:
    code = "import sys; from dedup import deduplicate; deduplicate(['a']); sys.exit('datasets' in sys.modules)"
    run(f'python -c "{code}"')


def test_a_second_call_does_not_wait_for_the_compilers_lock() -> None:
    """A process forked while a thread holds it would wait for ever."""
    deduplicate(["The mill grinds the grain."] * 2, verify="jaccard")
    taken = list[str]()
    callbacks = partial(taken.append, "taken"), lambda: None
    llvmlite.binding.ffi.register_lock_callback(*callbacks)
    try:
        deduplicate(["Bread is baked from flour."] * 2, verify="jaccard")
    finally:
        llvmlite.binding.ffi.unregister_lock_callback(*callbacks)
    assert not taken


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ("one text", {}, "texts in a str: expected a list"),
        ({"a": 1}, {}, "texts in a dict: expected a list"),
        (
            datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["a"]})}),
            {},
            "in a DatasetDict: expected",
        ),
        (datasets.Dataset.from_dict({"text": ["a"]}).to_iterable_dataset(), {}, "expected one that is loaded"),
        (7, {}, "texts in a int: expected a list"),
        (np.array("one text"), {}, "texts in a ndarray: expected a list"),
        (["a", None], {}, "text 1 is null"),
        (pa.array(["a", None]), {}, "text 1 is null"),
        ([b"a"], {}, "text 0 is of type bytes"),
        (pa.table({"body": ["a"]}), {}, "no column 'text': expected one of body"),
        (pa.table({"text": ["a"]}), {"keep": "newest:year"}, "no column 'year': expected one of text"),
        (["a"], {"keep": "newest:year"}, "a list of texts has no columns"),
        (["a"], {"text": "body"}, "text='body' has no effect, as a list has no columns"),
        (["a"], {"keep": "source:a,b"}, "expected the column and its values"),
        (["a"], {"keep": "oldest"}, "--keep oldest: expected one of first"),
        (["a"], {"sketch": "xxh32"}, "sketch 'xxh32': expected a Sketch"),
        (["a"], {"range": np.int8(12), "bands": np.int8(11)}, "--range 12 × --bands 11 = 132 rows"),
        (["a"], {"verify": "cosine"}, "verify 'cosine'"),
        (["a"], {"verify": "jaccard", "threshold": 80}, "--threshold 80"),
        (["a"], {"threshold": float("nan")}, "--threshold nan"),
        (["a"], {"threshold": "a"}, "--threshold a"),
        (["a"], {"keep": None}, "keep None: expected a policy"),
        (["a"], {"bands": 1.5}, "--bands 1.5: expected integers"),
        (["a"], {"bands": True}, "--bands True: expected integers"),
        (pa.array([b"\xff"]).view(pa.string()), {}, "column 'text' has a value that Python cannot hold"),
        (pa.table([["a"], ["b"]], names=["text", "text"]), {}, "several columns 'text'"),
        (pd.DataFrame({"text": ["a", 1]}), {}, "that Arrow cannot hold"),
        (pd.DataFrame([["a", "b"]], columns=["text", "text"]), {}, "that Arrow cannot hold: Duplicate column"),
        (
            pa.table({"text": ["a mill of grain"] * 2, "d": pa.array([1, 2], pa.duration("s"))}),
            {"keep": "newest:d"},
            "none of the 2 texts in clusters has a number or a date",
        ),
        (
            pa.table({"text": ["a mill of grain"] * 2, "d": pa.array([1 << 60] * 2, pa.timestamp("s"))}),
            {"keep": "newest:d"},
            "column 'd' has a value that Python cannot hold",
        ),
    ],
)
def test_what_cannot_be_deduplicated(texts: object, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        deduplicate(texts, **options)
