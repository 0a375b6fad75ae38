"""Text drawn from the model, with the tokenizer that lies beside the token shards."""

from pathlib import Path

import sentencepiece
import torch
from torch import Tensor

from gristmill.errors import UsageError
from gristmill.io.files import sha256_file
from gristmill.io.token_shards import Manifest
from training.parallel.parallel_model import ParallelModel
from training.reporting.evaluate import EvalConfig


class Sampler:
    """Draws text; the same text from the same model, whatever else was drawn before."""

    def __init__(self, folder: Path, manifest: Manifest, config: EvalConfig, seed: int) -> None:
        """Raises UsageError where the tokenizer is missing or is not the one that made the tokens."""
        path = folder / manifest.tokenizer.path
        if not path.is_file() or sha256_file(path) != manifest.tokenizer.sha256:
            raise UsageError(
                f"{folder} names the tokenizer {path}, which is missing or is not the one that made its tokens; "
                "put it back, run tokenize_corpus again, or try --eval.sample_tokens 0"
            )
        self.tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(path))
        self.start = [manifest.tokenizer.end_of_document, *self.tokenizer.encode(config.prompt)]
        self.end, self.config, self.seed = manifest.tokenizer.end_of_document, config, seed

    def text(self, model: ParallelModel) -> str:
        """The prompt, continued until the end of the document or for `sample_tokens` tokens; every rank calls it."""
        generator = torch.Generator().manual_seed(self.seed)
        ids = list(self.start)
        for _ in range(self.config.sample_tokens):
            logits = model.next_logits(torch.tensor([ids[-model.config.context :]]))
            chosen = model.world.main_only(lambda: self._choose(logits.float().cpu(), generator))  # noqa: B023
            ids.append(chosen)
            if chosen == self.end:
                break
        return self.tokenizer.decode([i for i in ids if i != self.end])

    def _choose(self, logits: Tensor, generator: torch.Generator) -> int:
        known = logits[: self.tokenizer.vocab_size()]  # the model's vocabulary may be larger
        if self.config.temperature == 0:
            return int(known.argmax())
        return int(torch.multinomial((known / self.config.temperature).softmax(-1), 1, generator=generator))
