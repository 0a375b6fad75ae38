"""Step: note what documents are compared by: the digest and size of the matching form, and the MinHash signature."""

from dataclasses import dataclass, field

import numpy as np

from dedup.minhash.matching_form import pack_forms
from dedup.minhash.shingles import count_characters, digest_forms
from dedup.minhash.signatures import Signer, Sketch, memory_to_sign
from gristmill.budget import reserve_memory
from gristmill.steps import FORM_BYTES, FORM_CHARACTERS, Batch, DocumentStep, Outcome

FORM_DIGEST = ("form_high", "form_low")  # halves of 128 bits
SHINGLES = "shingles"
SIGNATURE = "signature"


@dataclass(frozen=True)
class Fingerprint(DocumentStep):
    """Note the digest, bytes and characters of the matching form, the number of its shingles, and its signature.

    Documents of equal digests are exact copies. One without a shingle has no signature, one full of EMPTY.
    """

    name = "fingerprint"
    removes = False
    libraries = ("unicode",)
    sketch: Sketch = field(default_factory=Sketch)

    @property
    def makes(self) -> dict[str, str]:
        facts = dict.fromkeys(FORM_DIGEST, "uint64") | dict.fromkeys((FORM_CHARACTERS, FORM_BYTES, SHINGLES), "int64")
        return facts | {SIGNATURE: f"uint32[{self.sketch.permutations}]"}

    def apply(self, batch: Batch) -> Outcome:
        signer = Signer(self.sketch, len(batch))
        digests = np.empty((len(batch), 2), np.uint64)
        sizes = np.empty(len(batch), np.int64)
        characters = np.empty(len(batch), np.int64)
        with reserve_memory(memory_to_sign(batch.texts), "a document"):
            for packed in pack_forms(batch.texts):
                signer.sign(packed)
                digests[packed.texts] = digest_forms(packed)
                sizes[packed.texts] = np.diff(packed.bounds)
                characters[packed.texts] = count_characters(packed)
        high, low = digests.T
        return Outcome(
            facts={
                FORM_DIGEST[0]: high,
                FORM_DIGEST[1]: low,
                FORM_BYTES: sizes,
                FORM_CHARACTERS: characters,
                SHINGLES: signer.shingles,
                SIGNATURE: signer.values,
            }
        )
