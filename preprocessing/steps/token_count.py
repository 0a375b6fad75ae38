"""Step: count the tokens of each text, for a mix of so many tokens of a source."""

from dataclasses import dataclass
from pathlib import Path

from gristmill.io.tokenizer_file import find_tokenizer_file
from gristmill.steps import TOKENS, Batch, DocumentStep, Outcome


@dataclass(frozen=True)
class TokenCount(DocumentStep):
    """Note how many tokens a text has, without tokens that begin and end documents."""

    name = "token count"
    removes = False
    makes = {TOKENS: "int64"}  # noqa: RUF012
    tokenizer: Path

    @classmethod
    def of(cls, tokenizer: Path) -> "TokenCount":
        """Return the step of a tokenizer's file, or of a folder that has one. Raises UsageError if there is none."""
        return cls(find_tokenizer_file(tokenizer))

    @property
    def libraries(self) -> tuple[str, ...]:
        return ("sentencepiece",) if self.tokenizer.suffix == ".model" else ("tokenizers",)

    def apply(self, batch: Batch) -> Outcome:
        from preprocessing.tokenizer.loading import count_tokens_of_each  # here, as it imports libraries of tokenizers

        return Outcome(facts={TOKENS: count_tokens_of_each(self.tokenizer, batch.texts)})
