"""Step: note the size of each text, and its SHA-256, by which copies are known without their text."""

import hashlib
from dataclasses import dataclass

import numpy as np

from gristmill.steps import Batch, DocumentStep, Outcome

TEXT_DIGEST = ("sha256_high", "sha256_low")
CHARACTERS = "characters"


@dataclass(frozen=True)
class TextDigest(DocumentStep):
    """Note the number of characters, and the first 128 bits of the SHA-256 of the text in UTF-8, in two halves."""

    name = "digest of the text"
    makes = {CHARACTERS: "int64"} | dict.fromkeys(TEXT_DIGEST, "uint64")

    def apply(self, batch: Batch) -> Outcome:
        digests = b"".join(hashlib.sha256(text.encode()).digest()[:16] for text in batch.texts)
        high, low = np.frombuffer(digests, "<u8").reshape(-1, 2).T
        lengths = [len(text) for text in batch.texts]
        return Outcome(facts={CHARACTERS: lengths, TEXT_DIGEST[0]: high, TEXT_DIGEST[1]: low})
