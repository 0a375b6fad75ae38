"""Digests of texts are equal exactly where the texts, or their matching forms, are; empty forms by the text."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dedup.minhash.shingles import digest_texts
from gristmill.text import matching_form


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("aA\u0130iı \u00a0\u2003\u3000ßẞΣσς,!\x1c\n\u0301é東", max_size=5), max_size=12))
def test_equal_digests_are_equal_forms(texts: list[str]) -> None:
    for on, same in (("matching_form", matching_form), ("bytes", str)):
        keys = [tuple(row) for row in digest_texts(texts, on).tolist()]  # type: ignore[arg-type]
        forms = [same(text) or text for text in texts]
        assert [[a == b for b in keys] for a in keys] == [[a == b for b in forms] for a in forms]
