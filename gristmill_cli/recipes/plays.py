"""Functions for `[apply]` of a recipe's data: documents that are too long are cut where a reader would."""

from collections.abc import Iterator

from preprocessing.apply import GivenDocument

_SPEECHES = 12  # of a document


def scenes(documents: Iterator[GivenDocument]) -> Iterator[GivenDocument]:
    """Cut plays into documents of some speeches, which empty lines part."""
    for document in documents:
        speeches = [speech for speech in document.text.split("\n\n") if speech.strip()]
        for first in range(0, len(speeches), _SPEECHES):
            yield document.part("\n\n".join(speeches[first : first + _SPEECHES]))
