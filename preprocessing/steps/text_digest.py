"""Step: note the size of each text, and its SHA-256, by which copies are known without their text."""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from gristmill.steps import Batch, DocumentStep, Outcome

if TYPE_CHECKING:
    import pyarrow as pa

DIGEST = np.dtype("S16")  # the first half of a text's SHA-256
_DIGEST_HALVES = np.dtype([("high", "<u8"), ("low", "<u8")])
TEXT_DIGEST = ("sha256_high", "sha256_low")
CHARACTERS = "characters"


@dataclass(frozen=True)
class TextDigest(DocumentStep):
    """Note the number of characters, and the first 128 bits of the SHA-256 of the text in UTF-8, in two halves."""

    name = "digest of the text"
    removes = False
    makes = {CHARACTERS: "int64"} | dict.fromkeys(TEXT_DIGEST, "uint64")

    def apply(self, batch: Batch) -> Outcome:
        digests = b"".join(hashlib.sha256(text.encode()).digest()[:16] for text in batch.texts)
        high, low = np.frombuffer(digests, "<u8").reshape(-1, 2).T
        lengths = [len(text) for text in batch.texts]
        return Outcome(facts={CHARACTERS: lengths, TEXT_DIGEST[0]: high, TEXT_DIGEST[1]: low})


def text_digests(facts: "pa.Table") -> NDArray[np.bytes_]:
    """Return the digests (n) of the texts of documents, given a table of facts (n) that this step noted."""
    halves = np.empty(facts.num_rows, _DIGEST_HALVES)
    halves["high"] = facts.column(TEXT_DIGEST[0]).to_numpy()
    halves["low"] = facts.column(TEXT_DIGEST[1]).to_numpy()
    return halves.view(DIGEST)
