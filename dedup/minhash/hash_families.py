"""Hash families by name: what hashes a shingle, and what makes a signature of the hashes.

    name            shingle    scheme    equals
    xxh32           XXH32      affine    datasketch 2.0: MinHash(hashfunc=xxhash.xxh32_intdigest)
    sha1            SHA-1      mersenne  datasketch 1.x, so SlimPajama's; 2.0: MinHash(scheme="legacy")
    sha1-affine32   SHA-1      affine    datasketch 2.0 as it comes: MinHash()
    xxh32-mersenne  XXH32      mersenne  datasketch 1.x with hashfunc=xxhash.xxh32_intdigest
    fss             XXH32      fss       nobody's: fast similarity sketching, the fastest

SHA-1 is its first 32 bits, little-endian. For the schemes see schemes.py.
"""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dedup.minhash.schemes import MERSENNE

Hash = Literal["xxh32", "sha1", "sha1-affine32", "xxh32-mersenne", "fss"]
XXH32, SHA1 = range(2)  # what hashes a shingle
AFFINE, MERSENNE61, FSS = range(3)  # the scheme


class Family(NamedTuple):
    """A base hash and a scheme, by the numbers that the compiled code knows them by."""

    base: int
    scheme: int


FAMILIES: dict[Hash, Family] = {
    "xxh32": Family(XXH32, AFFINE),
    "sha1": Family(SHA1, MERSENNE61),
    "sha1-affine32": Family(SHA1, AFFINE),
    "xxh32-mersenne": Family(XXH32, MERSENNE61),
    "fss": Family(XXH32, FSS),
}
Coefficients = NDArray[np.uint64]


def draw_coefficients(scheme: int, permutations: int, seed: int) -> tuple[Coefficients, Coefficients]:
    """a and b of a scheme, uint64: as datasketch draws them from the same seed; for fss, two rounds a slot."""
    random = np.random.RandomState(seed)
    if scheme == MERSENNE61:
        pairs = [
            (random.randint(1, MERSENNE, dtype=np.uint64), random.randint(0, MERSENNE, dtype=np.uint64))
            for _ in range(permutations)
        ]
        drawn = np.array(pairs, np.uint64)
        return drawn[:, 0].copy(), drawn[:, 1].copy()
    count = 2 * permutations if scheme == FSS else permutations
    a = random.randint(0, 1 << 31, count, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    b = random.randint(0, 1 << 32, count, dtype=np.uint32)
    return a.astype(np.uint64), b.astype(np.uint64)
