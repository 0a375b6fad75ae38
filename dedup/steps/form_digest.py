"""Step: note a digest of each text's matching form: documents of equal digests are exact copies."""

from dataclasses import dataclass

from dedup.minhash.shingles import MatchOn, digest_texts
from gristmill.steps import Batch, DocumentStep, Outcome

FORM_DIGEST = ("form_high", "form_low")


@dataclass(frozen=True)
class FormDigest(DocumentStep):
    """Note the digest of digest_texts, in two halves."""

    name = "digest of the matching form"
    libraries = ("unicode",)
    makes = dict.fromkeys(FORM_DIGEST, "uint64")
    on: MatchOn = "matching_form"

    def apply(self, batch: Batch) -> Outcome:
        high, low = digest_texts(batch.texts, self.on).T
        return Outcome(facts={FORM_DIGEST[0]: high, FORM_DIGEST[1]: low})
