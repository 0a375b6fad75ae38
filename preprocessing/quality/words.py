"""Words of a text, with what rules count of each: a text is split at spaces, and each distinct piece once into words.

A piece between spaces loses signs at its ends (brackets, quotes, commas, currencies, 's), each a word of its own; a
full stop at the end stays with an abbreviation and with an initial; English contractions are two words, and hyphens
between letters are words. The rules are those of the tokenizer of spaCy for English, but for URLs, emoticons and
rare forms; WordRules are what is other in its tokenizers for other languages with spaces. Also the signs and the
ends of sentences that rules know.
"""

import re
import unicodedata
from array import array
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill.kernels import kernel
from preprocessing.quality.pieces import MAX_PIECES, UNKNOWN, WORD, PieceTable, count_pieces, find_pieces, hash_words

SENTENCE_ENDS = frozenset(".!?։؟۔܀܁܂߹।॥၊။።፧፨᙮᠃᠉‼‽⁇⁈⁉⸮⸼。꓿﹒﹖﹗！．？｡")
_SIGNS = frozenset(["Pd", "Ps", "Pe", "Pi", "Pf", "Cc"])
_MORE_SIGNS = frozenset("！：％，；？、。…►")
ALPHABETIC = 1
SYMBOL = 2
ENDS_SENTENCE = 4
PUNCTUATION = 8
STOP_WORDS = ("the", "be", "to", "of", "and", "that", "have", "with")
_STOP_BIT = {word: 1 << (8 + number) for number, word in enumerate(STOP_WORDS)}
_LONGEST_WHOLE = 64  # characters of a piece that may be one word with signs at its ends
_QUOTES = "'\"”“`‘´’‚,„»«「」『』（）〔〕【】《》〈〉"
_MARKS = "…,:;!?¿؟¡()[]{}<>_#*&。？！，、；：～·।،۔؛٪"
_CURRENCY = "$£€¥฿₽﷼₴₠₡₢₣₤₥₦₧₨₩₪₫₭₮₯₰₱₲₳₵₶₷₸₹₺₻₼₾₿"
_PREFIX = frozenset(_QUOTES + _MARKS + _CURRENCY + "§%=—–")
_SUFFIX = frozenset(_QUOTES + _MARKS + "—–")
_POSSESSIVE = ("'s", "'S", "’s", "’S")
_BEFORE_STOP = frozenset(_QUOTES + _MARKS + "%²-+0123456789")
_UNCASED = re.compile(
    "[\u0590-\u06ff\u0900-\u09ff\u0b80-\u0cff\uac00-\ud7af]"
)  # letters after which a stop ends a sentence
_UNIT = re.compile(
    r"(?:[kdcmµn]?m[²³]?|ha|yd|in|ft|[kmµ]?g|t|lb|oz|m/s|km/h|kmh|mph|hPa|Pa|mbar|mb|MB|kb|KB|gb|GB|tb|TB|T|G|M|K|%)\Z"
)
_INFIX = (
    r"\.\.+|…"
    r"|(?<=[0-9])[+\-*^](?=[0-9-])"
    r"|[°©®¦¶]"
    r"|(?<=[^\W\d_]),(?=[^\W\d_])"
    r"|(?<=[^\W_])[:<>=](?=[^\W\d_])"
    r"|\.(?=[^\W\d_\"”“`‘´’'])"
)
_SLASH = r"|(?<=[^\W_])/(?=[^\W\d_])"
_HYPHEN = r"|(?<=[^\W\d_])(?:-{1,3}|[–—~]|——)(?=[^\W\d_])"
_HYPHEN_OF_ENGLISH = r"|(?<=[^\W_])(?:-{1,3}|[–—~]|——)(?=[^\W\d_])"  # a digit may be before it
_NO_HYPHEN = r"|(?<=[^\W\d_])(?:--|[!?()\[\]“”„«»\"])(?=[^\W\d_])"
_ELISION = re.compile(r"(?<=[^\W\d_]['’])(?=[^\W\d_])")
_URL = re.compile(
    r"(?:[A-Za-z][A-Za-z0-9+.-]*://|www\.)\S+\Z|[\w.+-]+@[\w-]+(?:\.[\w-]+)+\Z"
    r"|(?:[A-Za-z0-9-]+\.)+(?:com|org|net|edu|gov|mil|int|info|biz|io|co|uk|de|fr|eu|us|ca|au|in|it|nl|ru|jp|tv|me)(?:[/:?#]\S*)?\Z"
)
_WHOLE = frozenset(
    [
        "'s", "'S", "’s", "'d", "'re", "'ll", "'em", ":)", ":-)", ":(", ":-(", ";)", ";-)", ":D", ":P",
        ":*", "):", "(:", "(;", "8)", "8-)", ":/", ":o", ":O", ":x", ":|", ":]", "<3", "^_^", "-_-",
    ]
)  # fmt: skip
_ABBREVIATIONS = frozenset(
    [
        "Adm.", "Bros.", "Co.", "Corp.", "D.C.", "Dr.", "Gen.", "Gov.", "Inc.", "Jr.", "Ltd.", "Messrs.",
        "Mr.", "Mrs.", "Ms.", "Mt.", "Ph.D.", "Prof.", "Rep.", "Rev.", "Sen.", "St.", "vs.", "v.s.", "e.g.",
        "i.e.", "a.m.", "p.m.", "E.g.", "I.e.", "Jan.", "Feb.", "Mar.", "Apr.", "Jun.", "Jul.", "Aug.",
        "Sep.", "Sept.", "Oct.", "Nov.", "Dec.", "Ala.", "Ariz.", "Ark.", "Calif.", "Colo.", "Conn.",
        "Del.", "Fla.", "Ga.", "Ia.", "Id.", "Ill.", "Ind.", "Kan.", "Kans.", "Ky.", "La.", "Mass.", "Md.",
        "Mich.", "Minn.", "Miss.", "Mo.", "Mont.", "N.C.", "N.D.", "N.H.", "N.J.", "N.M.", "N.Y.", "Neb.",
        "Nebr.", "Nev.", "Okla.", "Ore.", "Pa.", "S.C.", "Tenn.", "Va.", "Wash.", "Wis.", "o.k.", "O'clock",
        "o'clock", "ma'am", "Ma'am", "y'all", "'em", "'cause", "'bout",
    ]
)  # fmt: skip
_TWO_WORDS = {
    "cannot": 3, "gonna": 3, "gotta": 3, "im": 1, "wont": 2, "dont": 2, "hes": 2, "doesnt": 4, "didnt": 3, "cant": 2,
    "thats": 4, "whos": 3, "hed": 2, "isnt": 2, "arent": 3, "yall": 1, "theres": 5, "whats": 4, "wed": 2, "id": 1,
}  # fmt: skip
_NEGATED = ("n't", "n’t")
_ENDINGS = ("'ll", "'ve", "'re", "'m", "'d", "’ll", "’ve", "’re", "’m", "’d")
_HAVE_ENDINGS = frozenset(
    [
        "i", "you", "he", "she", "it", "we", "they", "there", "that", "this", "who", "what", "when",
        "where", "why", "how", "would", "could", "should", "might", "must", "may", "will", "ca", "does",
        "did", "had", "has",
    ]
)  # fmt: skip


def is_symbol(word: str) -> bool:
    """Whether a word has none but signs: ASCII punctuation, brackets, quotes, dashes, marks and control characters.

    >>> is_symbol("--"), is_symbol("3"), is_symbol("»")
    (True, False, True)
    """
    return all(map(_is_sign, word))


@lru_cache(1 << 12)
def _is_sign(c: str) -> bool:
    if c.isascii():
        return (not c.isalnum() and not c.isspace()) or unicodedata.category(c) == "Cc"
    return unicodedata.category(c) in _SIGNS or c in _MORE_SIGNS or c in SENTENCE_ENDS


class WordRules(NamedTuple):
    """Differences in how languages with spaces are split into words.

    Attributes:
        contracts: Contractions are two words, as don't in English.
        keeps_hyphens: A compound with a hyphen is one word, as in German.
        keeps_slashes: So is one with a slash, as in Dutch.
        elides: What is before an apostrophe is a word, as l' in French.
    """

    contracts: bool = False
    keeps_hyphens: bool = False
    keeps_slashes: bool = False
    elides: bool = False


ENGLISH = WordRules(contracts=True)


def split_piece(piece: str, rules: WordRules = ENGLISH) -> list[str]:
    """Return the words of a text without spaces, in linear time.

    >>> split_piece("(well-known,"), split_piece("don't"), split_piece("Mr."), split_piece("end."), split_piece("$5.20")
    (['(', 'well', '-', 'known', ','], ['do', "n't"], ['Mr.'], ['end', '.'], ['$', '5.20'])
    """
    if piece.isalpha():
        return _split_contractions(piece) if rules.contracts else [piece]
    start = 0
    end = len(piece)
    after: list[str] = []
    before: list[str] = []
    while start < end:
        if end - start <= _LONGEST_WHOLE and _is_one_word(piece[start:end], rules):
            break
        length = _prefix(piece, start, end)
        if length:
            before.append(piece[start : start + length])
            start += length
            continue
        length = _suffix(piece, start, end)
        if not length:
            break
        after.append(piece[end - length : end])
        end -= length
    middle = list[str]()
    if start < end:
        middle = _split_middle(piece[start:end], rules)
    return _join_pairs(before + middle + after[::-1])


def _join_pairs(words: list[str]) -> list[str]:
    """Return two signs that are one word, such as an emoticon, joined."""
    joined: list[str] = []
    for word in words:
        if joined and len(joined[-1]) + len(word) <= 4 and joined[-1] + word in _WHOLE:
            joined[-1] += word
        else:
            joined.append(word)
    return joined


def _is_one_word(word: str, rules: WordRules) -> bool:
    if rules.contracts and word in _ABBREVIATIONS:
        return True
    is_initial = len(word) == 2 and word[1] == "." and word[0].isascii() and word[0].isalpha()
    return is_initial or word in _WHOLE


def _prefix(piece: str, start: int, end: int) -> int:
    """Return the characters of the sign that begins a piece: 0 if none does."""
    first = piece[start]
    if first == "." and piece.startswith("..", start, end):
        stop = start
        while stop < end and piece[stop] == ".":
            stop += 1
        return stop - start
    if piece.startswith("''", start, end):
        return 2
    if first in _PREFIX or (first == "+" and not piece[start + 1 : start + 2].isdigit()):
        return 1
    return int(not first.isascii() and unicodedata.category(first) == "So")


def _suffix(piece: str, start: int, end: int) -> int:
    """Return the characters of the sign that ends a piece: 0 if none does."""
    last = piece[end - 1]
    if piece.endswith((*_POSSESSIVE, "''"), start, end):
        return 2
    if last in _SUFFIX:
        return 1
    previous = piece[end - 2] if end - start > 1 else ""
    if last == ".":
        if previous == ".":
            stop = end
            while stop > start and piece[stop - 1] == ".":
                stop -= 1
            return end - stop
        if previous and (previous in _BEFORE_STOP or previous.islower() or _UNCASED.match(previous)):
            return 1
        return int(previous.isupper() and end - start > 2 and piece[end - 3].isupper())
    if previous.isdigit() and (last in _CURRENCY or last == "+"):
        return 1
    if not last.isascii():
        return int(unicodedata.category(last) == "So")
    for size in (1, 2, 3, 4):
        if end - size > start and piece[end - size - 1].isdigit() and _UNIT.match(piece, end - size, end):
            return size
    return 0


def _split_middle(word: str, rules: WordRules) -> list[str]:
    """Return words of a piece without the signs at its ends: contractions, and words around hyphens and the like."""
    if rules.contracts:
        words = _split_contractions(word)
        if len(words) > 1 or word == "and/or":
            return words
        return _split_infixes(word, rules)
    words = _split_infixes(word, rules)
    if not rules.elides:
        return words
    shorter_words = list[str]()
    for longer in words:
        shorter_words += _ELISION.split(longer)
    return shorter_words


def _split_contractions(word: str) -> list[str]:
    """Return the words of an English word that may be two."""
    if word == "and/or":
        return [word]
    if word.isalpha():
        cut = _TWO_WORDS.get(word.lower(), 0) if len(word) < 8 else 0
        if not cut:
            return [word]
        return [word[:cut], word[cut:]]
    lower = word.lower()
    if lower.endswith(_NEGATED) and len(word) > 3 and word[:-3].isalpha():
        return [word[:-3], word[-3:]]
    for ending in _ENDINGS:
        if lower.endswith(ending) and lower[: -len(ending)] in _HAVE_ENDINGS:
            return [word[: -len(ending)], word[-len(ending) :]]
    return [word]


@cache
def _infix_of(rules: WordRules) -> re.Pattern[str]:
    """Return what is a word of its own within a piece."""
    hyphen = _NO_HYPHEN if rules.keeps_hyphens else _HYPHEN
    if rules.contracts:
        hyphen = _HYPHEN_OF_ENGLISH
    return re.compile(_INFIX + hyphen + _SLASH * (not rules.keeps_slashes))


def _split_infixes(word: str, rules: WordRules) -> list[str]:
    """Return the words around hyphens and the like."""
    if ("." in word or "/" in word) and len(word) <= 2048 and _URL.match(word):
        return [word]
    words = list[str]()
    done = 0
    for infix in _infix_of(rules).finditer(word):
        at, end = infix.span()
        if at == 0 or (infix[0] == "." and not _parts_words(word, at)):
            continue
        words += [word[done:at], infix[0]]
        done = end
    words.append(word[done:])
    return [infix for infix in words if infix]


def _parts_words(word: str, at: int) -> bool:
    """Return whether the full stop at a place of a piece parts words, as where a space after it is missing."""
    before = word[at - 1]
    if not before.islower() and before not in _QUOTES:
        return False
    after = word[at + 1]
    return after.isupper() or after in _QUOTES


class Words(NamedTuple):
    """The words of a text: their lengths in characters (n), flags (n), 64-bit hashes (n), and lines' numbers (n).

    Lines that are blank have no number.
    """

    length: NDArray[np.int64]
    flags: NDArray[np.int64]
    hash: NDArray[np.uint64]
    line: NDArray[np.int32]


class WordSplitter:
    """Splits texts, and remembers what pieces it has split: most of a text are a few thousand of them."""

    def __init__(self, split: Callable[[str], list[str]] = split_piece) -> None:
        """`split` takes a piece; of one of ASCII letters it makes one word, unless that is in _TWO_WORDS."""
        self._split = split
        self._forget()

    def _forget(self) -> None:
        self._pieces = PieceTable([*_TWO_WORDS, *STOP_WORDS])
        # Of each piece: the number of its first word, and how many it has.
        self._first = array("q")
        self._count = array("q")
        # Of each word of a piece:
        self._length = array("q")
        self._flags = array("q")
        self._hash = array("Q")

    def of(self, language: str) -> "WordSplitter":  # noqa: ARG002
        """Return the splitter for texts in a language."""
        return self

    def split(self, text: str) -> Words:
        """Return the words of a text, in linear time."""
        if len(self._first) > MAX_PIECES:
            self._forget()
        encoded = text.encode("utf-8", "surrogatepass")
        data = np.frombuffer(encoded, np.uint8)
        max_count = count_pieces(data)
        borders = np.empty((max_count, 2), np.uint64)
        keys = np.empty(max_count, np.uint64)
        lines = np.empty(max_count, np.int32)
        count = find_pieces(data, borders, keys, lines)
        pieces = self._pieces.find(data, borders, keys[:count])
        unknown = np.flatnonzero(pieces == UNKNOWN)
        if len(unknown):
            pieces[unknown] = self._learn([encoded[start:end] for start, end in borders[unknown].tolist()])
            self._pieces.add(keys[unknown], pieces[unknown])
        return self._gather(pieces, borders, keys, lines)

    def _learn(self, pieces: list[bytes]) -> list[int]:
        """Split pieces, some of which are the same; return their numbers."""
        distinct = dict.fromkeys(pieces, 0)
        words = list[str]()
        for piece in distinct:
            of_piece = self._split(piece.decode("utf-8", "surrogatepass"))
            distinct[piece] = len(self._first)
            self._first.append(len(self._length) + len(words))
            self._count.append(len(of_piece))
            words += of_piece
        self._length.extend(map(len, words))
        self._flags.extend(map(_flags_of, words))
        self._hash.frombytes(hash_words(words).tobytes())
        return [distinct[piece] for piece in pieces]

    def _gather(
        self,
        pieces: NDArray[np.int64],
        borders: NDArray[np.uint64],
        keys: NDArray[np.uint64],
        lines: NDArray[np.int32],
    ) -> Words:
        """Return the words of pieces, given their numbers, borders, hashes and lines."""
        tables = [_as_numpy(table, np.int64) for table in (self._first, self._count, self._length, self._flags)]
        first, count, length, flags = tables
        size = _count_words(pieces, count)
        words = Words(
            np.empty(size, np.int64), np.empty(size, np.int64), np.empty(size, np.uint64), np.empty(size, np.int32)
        )
        hashes = _as_numpy(self._hash, np.uint64)
        _gather(pieces, borders, keys, lines, first, count, length, flags, hashes, *words)
        return words


def _as_numpy(values: array, dtype: type[np.int64 | np.uint64]) -> NDArray[Any]:
    """Return numbers as an array that shares their memory; while it lives, none can be added."""
    return np.frombuffer(values, dtype) if values else np.empty(0, dtype)


@kernel
def _count_words(pieces: NDArray[np.int64], count: NDArray[np.int64]) -> int:
    """Return how many words pieces have, given the number of each."""
    total = 0
    for piece in pieces:
        total += 1 if piece == WORD else count[np.uint64(piece)]
    return total


@kernel
def _gather(
    pieces: NDArray[np.int64],
    borders: NDArray[np.uint64],
    keys: NDArray[np.uint64],
    lines: NDArray[np.int32],
    first: NDArray[np.int64],
    count: NDArray[np.int64],
    length: NDArray[np.int64],
    flags: NDArray[np.int64],
    hashes: NDArray[np.uint64],
    text_length: NDArray[np.int64],
    text_flags: NDArray[np.int64],
    text_hash: NDArray[np.uint64],
    text_line: NDArray[np.int32],
) -> None:
    """Write length, flags, hash and line of each word of a text, given the pieces of the text."""
    at = np.uint64(0)
    for i in range(len(pieces)):
        if pieces[i] == WORD:
            text_length[at] = borders[i, 1] - borders[i, 0]
            text_flags[at] = ALPHABETIC
            text_hash[at] = keys[i]
            text_line[at] = lines[i]
            at += np.uint64(1)
            continue
        start = np.uint64(first[np.uint64(pieces[i])])
        end = start + np.uint64(count[np.uint64(pieces[i])])
        for word in range(start, end):
            text_length[at] = length[word]
            text_flags[at] = flags[word]
            text_hash[at] = hashes[word]
            text_line[at] = lines[i]
            at += np.uint64(1)


def count_sentences(words: Words) -> int:
    """Return how many sentences begin within lines: with a word that is no punctuation, after a mark that ends one.

    Those that begin a line are not counted.
    """
    matters = words.flags & (ENDS_SENTENCE | PUNCTUATION) != PUNCTUATION  # others change nothing
    stops = words.flags[matters] & ENDS_SENTENCE > 0
    lines = words.line[matters]
    return int(np.count_nonzero(stops[:-1] & ~stops[1:] & (lines[:-1] == lines[1:])))


def _flags_of(word: str) -> int:
    if word.isalpha():
        return ALPHABETIC | _STOP_BIT.get(word, 0)
    return _flags_of_sign(word)


@lru_cache(1 << 12)
def _flags_of_sign(word: str) -> int:
    """Return the flags of a word that has other characters than letters."""
    ends = word in SENTENCE_ENDS
    is_punctuation = all(unicodedata.category(c).startswith("P") for c in word)
    flags = ALPHABETIC * any(map(str.isalpha, word)) | SYMBOL * is_symbol(word) | ENDS_SENTENCE * ends
    return flags | PUNCTUATION * is_punctuation | _STOP_BIT.get(word, 0)
