"""Step: note the length of each text's matching form, and a digest: documents of equal digests are exact copies."""

from dataclasses import dataclass

from dedup.minhash.shingles import digest_forms
from gristmill.io.facts import FORM_BYTES, FORM_CHARACTERS
from gristmill.steps import Batch, DocumentStep, Outcome

FORM_DIGEST = ("form_high", "form_low")


@dataclass(frozen=True)
class FormDigest(DocumentStep):
    """Note the digest of digest_texts in two halves, and the characters and bytes of the matching form."""

    name = "digest of the matching form"
    libraries = ("unicode",)
    makes = dict.fromkeys(FORM_DIGEST, "uint64") | dict.fromkeys((FORM_CHARACTERS, FORM_BYTES), "int64")

    def apply(self, batch: Batch) -> Outcome:
        digests, sizes, characters = digest_forms(batch.texts)
        high, low = digests.T
        return Outcome(
            facts={FORM_DIGEST[0]: high, FORM_DIGEST[1]: low, FORM_CHARACTERS: characters, FORM_BYTES: sizes}
        )
