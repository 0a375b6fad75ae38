"""Sampler: text sampled from the model during training."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from gristmill.errors import UsageError, require
from gristmill.io.token_shards import Manifest
from gristmill.io.tokenizer_file import open_tokenizer
from training.data.text import begin_text, find_tokenizer
from training.distributed.process_group import main_only
from training.generation.sampling import SamplingOptions, draw_token
from training.parallel.parallel_model import ParallelModel
from training.reporting.reporting_config import EvalConfig


class Sampler:
    """Samples text with a fixed seed: the same model always gives the same text."""

    def __init__(
        self, folder: Path, manifest: Manifest, config: EvalConfig, seed: int, mask_documents: bool = False
    ) -> None:
        """Load the tokenizer of the token shards in `folder`, whose manifest is `manifest`, if it is to sample.

        Shards that name no tokenizer, as imported ones may, give no samples.

        Raises UsageError where it is missing or has another SHA-256.
        """
        if not manifest.tokenizer.sha256:
            config = replace(config, sample_tokens=0)
        self.config = config
        self.seed = seed
        self.mask_documents = mask_documents
        if not config.sample_tokens:
            return
        path = find_tokenizer(manifest.tokenizer, [folder])
        if path is None:
            raise UsageError(
                f"{folder} was made with the tokenizer {folder / manifest.tokenizer.path}, which is missing or has "
                "changed; "
                "restore it, run tokenize_corpus again, or try --eval.sample_tokens 0"
            )
        try:
            self.tokenizer = open_tokenizer(path)
        except UsageError as error:
            raise UsageError(f"{error}; run tokenize_corpus with one, or try --eval.sample_tokens 0") from error
        self.start = begin_text(manifest.tokenizer, mask_documents, self.tokenizer.encode(config.prompt))
        require(
            bool(self.start),
            "nothing begins a sample, as documents have neither a begin nor an end token: give --eval.prompt, or "
            "--eval.sample_tokens 0",
        )
        self.end = manifest.tokenizer.end_of_document

    def sample(self, model: ParallelModel) -> str:
        """Return the prompt and its continuation, up to the end of a document or `sample_tokens` tokens.

        Every rank calls it; rank 0 draws each token for all. Empty if there is nothing to sample.
        """
        if not self.config.sample_tokens:
            return ""
        generator = torch.Generator().manual_seed(self.seed)
        ids = list(self.start)
        for _ in range(self.config.sample_tokens):
            seen = torch.tensor([ids[-model.config.context :]])
            logits = model.next_logits(seen, self._positions(seen) if self.mask_documents else None)
            chosen = main_only(lambda: self._draw_token(logits.float().cpu(), generator))  # noqa: B023
            ids.append(chosen)
            if chosen == self.end:
                break
        return self.tokenizer.decode([i for i in ids if i != self.end])

    def _positions(self, ids: Tensor) -> Tensor:
        """Return the positions of `ids` (1, T) in their documents, which end with end-of-document: (1, T)."""
        at = torch.arange(ids.shape[1])
        starts = torch.cat([torch.tensor([True]), ids[0, :-1] == self.end])
        return (at - torch.where(starts, at, 0).cummax(0).values)[None]

    def _draw_token(self, logits: Tensor, generator: torch.Generator) -> int:
        """Draw a token from logits (V,); ids beyond the tokenizer's are never drawn."""
        known = logits[: self.tokenizer.vocab_size]  # the model's vocabulary may be padded
        if not known.isfinite().all():
            return self.end  # the run has diverged: there is nothing to sample
        options = SamplingOptions(temperature=self.config.temperature)
        return draw_token(known, [], options, generator)
