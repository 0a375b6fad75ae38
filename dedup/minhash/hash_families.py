"""Hash families by name: the hash of a shingle, and the scheme that turns hashes into a signature.

    name            shingle hash  scheme    equals
    xxh32           XXH32         affine    datasketch 2.0: MinHash(hashfunc=xxhash.xxh32_intdigest)
    sha1            SHA-1         mersenne  datasketch 1.x, so SlimPajama; 2.0: MinHash(scheme="legacy")
    sha1-affine32   SHA-1         affine    datasketch 2.0's defaults: MinHash()
    xxh32-mersenne  XXH32         mersenne  datasketch 1.x with hashfunc=xxhash.xxh32_intdigest
    fss             XXH32         fss       no other library; fast similarity sketching, the fastest

Of SHA-1 the first 32 bits are used, little-endian. The schemes' formulas are in schemes.py.
"""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dedup.minhash.schemes import MERSENNE_PRIME

Hash = Literal["xxh32", "sha1", "sha1-affine32", "xxh32-mersenne", "fss"]
XXH32, SHA1 = range(2)  # shingle hashes
AFFINE, MERSENNE, FSS = range(3)  # schemes


class HashFamily(NamedTuple):
    """A shingle hash and a scheme, as the integers that compiled code branches on."""

    shingle_hash: int
    scheme: int


HASH_FAMILIES: dict[Hash, HashFamily] = {
    "xxh32": HashFamily(XXH32, AFFINE),
    "sha1": HashFamily(SHA1, MERSENNE),
    "sha1-affine32": HashFamily(SHA1, AFFINE),
    "xxh32-mersenne": HashFamily(XXH32, MERSENNE),
    "fss": HashFamily(XXH32, FSS),
}
Coefficients = NDArray[np.uint64]


def draw_coefficients(scheme: int, permutations: int, seed: int) -> tuple[Coefficients, Coefficients]:
    """Coefficients a and b of a scheme's hash functions, uint64, drawn from `seed` as datasketch draws them.

    One pair per permutation; for fss two, as it has up to two rounds per slot.
    """
    random = np.random.RandomState(seed)
    if scheme == MERSENNE:
        pairs = [
            (random.randint(1, MERSENNE_PRIME, dtype=np.uint64), random.randint(0, MERSENNE_PRIME, dtype=np.uint64))
            for _ in range(permutations)
        ]
        drawn = np.array(pairs, np.uint64)
        return drawn[:, 0].copy(), drawn[:, 1].copy()
    count = 2 * permutations if scheme == FSS else permutations
    a = random.randint(0, 1 << 31, count, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    b = random.randint(0, 1 << 32, count, dtype=np.uint32)
    return a.astype(np.uint64), b.astype(np.uint64)
