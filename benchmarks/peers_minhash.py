"""Contenders of bench_dedup's signature table: ours and other libraries.

A peer is imported when it is set up, so that this file loads without it. Peers whose requirements
conflict with ours run under another Python (bench_dedup --python).
"""

import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from benchmarks import slimpajama
from gristmill.text import matching_form

Features = Literal["13 characters", "words"]
BENCH_EXTRA = "pip install gristmill[bench]"
SEPARATE_ENVIRONMENT = "pip install {} into another environment, and give --python ENVIRONMENT/bin/python"
DATATROVE = SEPARATE_ENVIRONMENT.format("datatrove 'xxhash<4' regex nltk spacy tokenizers")
TEXT_DEDUP = SEPARATE_ENVIRONMENT.format("text-dedup")
XXHASH_3 = {"xxhash": 3}  # datatrove passes str, which xxhash 4 rejects
WIDTH, PERMUTATIONS, BANDS, ROWS = 13, 128, 9, 13


class Engine(NamedTuple):
    """A contender that is set up: `sign` is timed; `estimate` gives the similarity of each pair of texts."""

    sign: Callable[[Sequence[str]], Any]
    estimate: Callable[[Sequence[str], Sequence[str]], Sequence[float]]


class Contender(NamedTuple):
    """A row of the table. `shingles` gives the set whose Jaccard similarity is estimated."""

    name: str
    package: str
    make: Callable[[], Engine]
    features: Features = "13 characters"
    shingles: Callable[[str], set] = lambda text: set(character_shingles(text))
    majors: dict[str, int] = {}  # noqa: RUF012  required major versions
    hint: str = BENCH_EXTRA

    def installed(self) -> str | None:
        """Version of its package in this Python; None if it is missing or of another major version."""
        try:
            fits = all(int(version(package).split(".")[0]) == major for package, major in self.majors.items())
            return version(self.package) if fits else None
        except PackageNotFoundError:
            return None


def character_shingles(text: str) -> list[str]:
    """Character 13-grams of the matching form."""
    form = matching_form(text)
    return [form[i : i + WIDTH] for i in range(len(form) - WIDTH + 1)]


def slot_engine(sign: Callable[[Sequence[str]], Any], to_rows: Callable[[Any], Any] = np.asarray) -> Engine:
    """Build an engine that estimates similarity as the fraction of equal slots of two signatures."""

    def estimate(ones: Sequence[str], others: Sequence[str]) -> list[float]:
        one, other = np.asarray(to_rows(sign(ones))), np.asarray(to_rows(sign(others)))
        return np.mean(one == other, axis=1).tolist()

    return Engine(sign, estimate)


def ours(**sketch: Any) -> Engine:
    from dedup import Sketch, signatures

    made = Sketch(**sketch)

    return slot_engine(lambda texts: signatures(texts, made)[0])


def datasketch(hash_name: str, scheme: str | None) -> Engine:
    """datasketch by its fastest bulk path: `MinHash.generator`, one `update_batch` per document."""
    from datasketch import MinHash

    options: dict[str, Any] = {"num_perm": PERMUTATIONS} | ({"scheme": scheme} if scheme else {})
    if hash_name == "xxh32":
        import xxhash

        options["hashfunc"] = xxhash.xxh32_intdigest

    def sign(texts: Sequence[str]) -> list[Any]:
        return [made.hashvalues for made in MinHash.generator(map(byte_shingles, texts), **options)]

    return slot_engine(sign)


def byte_shingles(text: str) -> list[bytes]:
    """13-grams of characters in UTF-8; ASCII text is encoded once and sliced, which is faster."""
    form = matching_form(text)
    if form.isascii():
        data = form.encode()
        return [data[i : i + WIDTH] for i in range(len(data) - WIDTH + 1)]
    return [form[i : i + WIDTH].encode("utf-8", "surrogatepass") for i in range(len(form) - WIDTH + 1)]


def slimpajama_engine() -> Engine:
    return slot_engine(lambda texts: [slimpajama.sign(text) for text in texts])


def rensa_r(shingles: Callable[[str], list[str]]) -> Engine:
    from rensa import RMinHash

    def sign(texts: Sequence[str]) -> Any:
        return RMinHash.digest_matrix_from_token_sets(map(shingles, texts), PERMUTATIONS, 1)

    return slot_engine(sign, lambda matrix: matrix.to_rows())


def rensa_c(shingles: Callable[[str], list[str]]) -> Engine:
    from rensa import CMinHash

    return slot_engine(lambda texts: CMinHash.digests_from_token_sets(map(shingles, texts), PERMUTATIONS, 1))


def fast_sketch() -> Engine:
    from FastSketchLSH import FastSimilaritySketch

    sketch = FastSimilaritySketch(PERMUTATIONS, 1)
    return slot_engine(lambda texts: sketch.batch([character_shingles(text) for text in texts], num_threads=1))


def gaoya() -> Engine:
    """gaoya: shingles, signature and insertion into its index in Rust; similarities come from index queries."""
    from gaoya.minhash import MinHashStringIndex

    def index(bands: int, rows: int, **options: Any) -> Any:
        return MinHashStringIndex(32, 0.0, bands, rows, None, id_container="vec", **options)

    def sign(texts: Sequence[str]) -> Any:
        made = index(BANDS, ROWS, analyzer="char", lowercase=False, ngram_range=(WIDTH, WIDTH))
        made.par_bulk_insert_docs(list(range(len(texts))), [matching_form(text) for text in texts])
        return made

    def estimate(ones: Sequence[str], others: Sequence[str]) -> list[float]:
        found = []
        for one, other in zip(ones, others, strict=True):
            made = index(PERMUTATIONS, 1, analyzer="char", lowercase=False, ngram_range=(WIDTH, WIDTH))
            made.insert_document(0, matching_form(one))
            found.append(dict(made.query(matching_form(other), True)).get(0, 0.0))
        return found

    return Engine(sign, estimate)


def datatrove(by_word: bool) -> Engine:
    """datatrove: shingles and signature of its stage 1, without writing files."""
    from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupSignature
    from datatrove.utils.text import TextNormConfig

    if by_word:
        stage = MinhashDedupSignature(".", MinhashConfig())
    else:
        untouched = TextNormConfig(*[False] * len(TextNormConfig.__dataclass_fields__))
        stage = MinhashDedupSignature(".", MinhashConfig(WIDTH, BANDS, ROWS, norm_config=untouched))
        stage.word_tokenizer = _Characters()

    def sign_one(text: str) -> list[int]:
        shingles = stage.get_shingles(text)
        bands = stage.get_signature(shingles) if len(shingles) else [[0] * stage.num_hashes]
        return [value for band in bands for value in band]

    return slot_engine(lambda texts: [sign_one(text) for text in texts])


class _Characters:
    """A word tokenizer that returns characters, to get character shingles from peers that shingle words."""

    def word_tokenize(self, text: str) -> list[str]:
        return list(matching_form(text))

    split = word_tokenize


def text_dedup(by_word: bool) -> Engine:
    """text-dedup: `embed_func` with its faster options (XXH3, 32 bits), without `datasets`."""
    from text_dedup import minhash

    width, permutations, bands = (5, 250, 25) if by_word else (WIDTH, PERMUTATIONS, 1)
    if not by_word:
        minhash.NON_ALPHA = _Characters()
    prime, rows = np.uint32((1 << 32) - 5), permutations // bands
    random = np.random.RandomState(42)
    drawn = [random.randint(low, prime, permutations, dtype=np.uint32) for low in (1, 0)]
    options = {"num_perm": permutations, "ngram_size": width, "min_length": 0, "permutations": tuple(drawn),
               "hashranges": [(i * rows, (i + 1) * rows) for i in range(bands)], "dtype": np.uint32,
               "hash_func": minhash.xxh3_32hash, "max_hash": np.uint32(0xFFFFFFFF), "modulo_prime": prime}  # fmt: skip

    def sign(texts: Sequence[str]) -> list[list[bytes]]:
        return [minhash.embed_func(text, 0, **options)["__signatures__"] for text in texts]

    return slot_engine(sign, lambda found: [np.frombuffer(b"".join(bands), np.uint32) for bands in found])


def word_shingles(text: str, width: int = 5) -> set[str]:
    """5-grams of the words of the matching form."""
    words = matching_form(text).split()
    return {" ".join(words[i : i + width]) for i in range(len(words) - width + 1)}


def _alphanumeric_shingles(text: str) -> set[str]:
    words = re.split(r"\W", text.lower())
    return {" ".join(words[i : i + 5]) for i in range(max(1, len(words) - 4))}


def _spacy_shingles(text: str) -> set[str]:
    from datatrove.utils.text import ngrams, simplify_text
    from datatrove.utils.word_tokenizers import load_word_tokenizer

    return {" ".join(words) for words in ngrams(load_word_tokenizer("eng").word_tokenize(simplify_text(text)), 5)}


def contenders() -> list[Contender]:
    """All contenders, SlimPajama's first."""
    return [
        *_slimpajama_contenders(),
        *_our_contenders(),
        *_datasketch_contenders(),
        *_other_contenders(),
        *_word_contenders(),
    ]


def _slimpajama_contenders() -> list[Contender]:
    """SlimPajama's algorithm, with datasketch 1 (for which it was written) and datasketch 2."""
    return [
        Contender(f"SlimPajama's algorithm (datasketch {major})", "datasketch", slimpajama_engine,
                  shingles=lambda text: set(slimpajama.shingles(text)), majors={"datasketch": major}, hint=hint)
        for major, hint in ((1, SEPARATE_ENVIRONMENT.format("'datasketch<2'")), (2, BENCH_EXTRA))
    ]  # fmt: skip


def _datasketch_contenders() -> list[Contender]:
    ways = [("sha1", "legacy"), ("sha1", None), ("xxh32", "legacy"), ("xxh32", None)]
    return [
        Contender(f"datasketch 2, {name}, {scheme or 'its default'}", "datasketch",
                  partial(datasketch, name, scheme), majors={"datasketch": 2})
        for name, scheme in ways
    ]  # fmt: skip


def _other_contenders() -> list[Contender]:
    return [
        Contender("rensa R", "rensa", lambda: rensa_r(character_shingles)),
        Contender("rensa C", "rensa", lambda: rensa_c(character_shingles)),
        Contender("FastSketchLSH", "FastSketchLSH", fast_sketch),
        Contender("gaoya, with its index", "gaoya", gaoya),
        Contender("datatrove, adapted", "datatrove", lambda: datatrove(False), majors=XXHASH_3, hint=DATATROVE),
        Contender("text-dedup, adapted", "text-dedup", lambda: text_dedup(False), hint=TEXT_DEDUP),
    ]


def _word_contenders() -> list[Contender]:
    return [
        Contender("datatrove, 5 words, 14 × 8", "datatrove", lambda: datatrove(True), "words", _spacy_shingles,
                  majors=XXHASH_3, hint=DATATROVE),
        Contender("text-dedup, 5 words, 250 slots", "text-dedup", lambda: text_dedup(True), "words",
                  _alphanumeric_shingles, hint=TEXT_DEDUP),
        Contender("rensa R, single words", "rensa", lambda: rensa_r(str.split), "words",
                  lambda text: set(text.split())),
    ]  # fmt: skip


def _our_contenders() -> list[Contender]:
    """Each of our hash families, if our package can be imported in this Python."""
    try:
        from dedup.minhash.signatures import Hash
    except ImportError:
        return []
    by_character = [Contender(f"ours, {name}", "numba", partial(ours, hash=name)) for name in get_args(Hash)]
    return [
        *by_character,
        Contender("ours, 5 words", "numba", lambda: ours(unit="word", width=5), "words", word_shingles),
    ]


def assert_equal_to_datasketch(texts: Sequence[str]) -> list[str]:
    """Assert that our signatures equal those of datasketch and of SlimPajama's algorithm; name the families checked."""
    composed = [unicodedata.normalize("NFC", text) for text in texts]
    pairs = {"sha1": "legacy", "xxh32": None, "sha1-affine32": None, "xxh32-mersenne": "legacy"}
    checked = []
    for contender in _our_contenders():
        family = contender.name.removeprefix("ours, ")
        if family in pairs:
            theirs = datasketch(family.split("-")[0], pairs[family])
            assert np.array_equal(contender.make().sign(composed), np.array(theirs.sign(composed))), family
            checked.append(family)
    assert np.array_equal(ours(hash="sha1").sign(composed), slimpajama_engine().sign(composed)), (
        "SlimPajama's algorithm"
    )
    return [f"{family} with datasketch 2" for family in checked] + ["sha1 with SlimPajama's algorithm"]
