"""SlimPajama's signatures, written from its README and data card: the baseline of bench_dedup.

Text in NFC, lower case, without punctuation, with single spaces; character 13-grams; a datasketch MinHash
with 128 permutations over SHA-1 hashes.
"""

import re
import string
import unicodedata
from typing import Any

import numpy as np
from numpy.typing import NDArray

WIDTH = 13
PERMUTATIONS = 128
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_RUN = re.compile(r"\s+")


def shingles(text: str) -> list[str]:
    """The 13-grams of the normalised text, in order, with repetitions.

    >>> shingles("Grain,  and FLOUR")
    ['grain and flo', 'rain and flou', 'ain and flour']
    """
    lowered = unicodedata.normalize("NFC", text).lower()
    prepared = _RUN.sub(" ", lowered.translate(_PUNCTUATION)).strip()
    return [prepared[i : i + WIDTH] for i in range(len(prepared) - WIDTH + 1)]


def sign(text: str) -> NDArray[np.uint32]:
    """The signature of one text: 128 values, each below 2^32; needs datasketch, of any version."""
    minhash = _empty_minhash()
    for shingle in shingles(text):
        minhash.update(shingle.encode("utf-8", "surrogatepass"))
    return np.asarray(minhash.hashvalues).astype(np.uint32)


def _empty_minhash() -> Any:
    from datasketch import MinHash, __version__

    scheme = {} if __version__.startswith("1.") else {"scheme": "legacy"}  # datasketch 2 has another default
    return MinHash(num_perm=PERMUTATIONS, **scheme)
