"""Step: compute the MinHash signature of each text."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dedup.minhash.signatures import Sketch, signatures
from gristmill.budget import reserve_memory
from gristmill.io.lines import MEMORY_A_BYTE
from gristmill.steps import Batch, DocumentStep, Outcome

SIGNATURE = "signature"
SHINGLES = "shingles"
_MEMORY_A_CHARACTER = 14  # bytes of memory for a character that is not ASCII: text, UTF-8, form and place


@dataclass(frozen=True)
class MinHashSignature(DocumentStep):
    """Note the signature, and the number of shingles: a text without any has no signature, one full of EMPTY."""

    name = "signature"
    libraries = ("unicode",)
    sketch: Sketch = field(default_factory=Sketch)

    @property
    def version(self) -> int:
        return 2

    @property
    def makes(self) -> dict[str, str]:
        return {SHINGLES: "int64", SIGNATURE: f"uint32[{self.sketch.permutations}]"}

    def apply(self, batch: Batch) -> Outcome:
        with reserve_memory(memory_to_sign(batch.texts), "a document"):
            values, shingles = signatures(batch.texts, self.sketch)
        return Outcome(facts={SHINGLES: shingles, SIGNATURE: values})


def memory_to_sign(texts: Sequence[str]) -> int:
    """Return the bytes that the longest text takes while it is signed; others, packed together, take little."""
    longest = max(texts, key=len, default="")
    return len(longest) * (MEMORY_A_BYTE if longest.isascii() else _MEMORY_A_CHARACTER)
