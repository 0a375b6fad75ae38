"""Check of the whole configuration of `gristmill run`, before any stage writes a file."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dedup.candidates.input_shards import check_index, reject_own_index
from dedup.clustering.keep_policy import check_sources, parse_keep
from dedup.clustering.lsh import check_bands
from dedup.clustering.similarity import SimilarityCheck
from gristmill.engine.options import parse_size
from gristmill.errors import UsageError, wrap_write_errors
from gristmill.io.documents import list_corpus
from gristmill.storage.files import reject_read_only, reject_unknown_scheme
from gristmill.urls import is_remote
from gristmill_cli.run_config import RunConfig
from preprocessing.datasets import source_weights
from preprocessing.filter import check_threshold
from preprocessing.mixing.sampling import check_seed
from preprocessing.normalize_text import check_ftfy
from preprocessing.shuffle_holdout import check_holdout
from preprocessing.train_tokenizer import check_options
from preprocessing.user_function import version_of


def check_config(config: RunConfig, sources: set[str] | None = None) -> None:
    """Raise the error of the first option that a stage would refuse; writes nothing.

    Lists the corpus, for its `sources` if they are not given, and reads the header of one signature shard of each
    index; reads no document.
    """
    _check_folders(config.corpus, config.out)
    _reject_scratch_in_corpus(config)
    config.run_options.check()
    config.run_options.check_scratch(config)
    check_seed(config.seed)
    if sources is None:
        with _section("normalize"):
            files = list_corpus(config.corpus, text_column=config.text_column, read_also=config.normalize.read_also)
        sources = {file.source for file in files}
    with _section("normalize"):
        if config.normalize.ftfy:
            check_ftfy()
    with _section("apply"):
        if config.apply.function:
            version_of(config.apply.function)
    with _section("filter"):
        check_threshold(config.filter.threshold)
    with _section("dedup"):
        _check_dedup(config, sources)
    with _section("mix"):
        source_weights(config.mix.weights, sources)
        check_holdout(config.mix.holdout)
        check_seed(config.mix_seed)
    with _section("tokenizer"):
        spec = config.tokenizer
        check_options(spec.vocab_size, spec.model_type, spec.sample, spec.exact, config.tokenizer_seed)
        parse_size(spec.shard_size, "--shard_size")


def _check_dedup(config: RunConfig, sources: set[str]) -> None:
    spec, sketch = config.dedup, config.sketch
    check_bands(spec.range, spec.bands, sketch.permutations)
    check_sources(parse_keep(spec.keep), sources)
    compared = sketch if spec.verify and spec.index else None
    SimilarityCheck(spec.verify or "jaccard", spec.threshold, spec.width, spec.unit, compared)
    reject_own_index(spec.index, config.signatures)
    check_index(spec.index, sketch)


def _check_folders(corpus: Path, out: Path) -> None:
    """Raise UsageError if a folder lies in the other, OutputError if nothing can be written to `out`."""
    reject_read_only([out])
    for path in (corpus, out):
        reject_unknown_scheme(path)
    for inner, outer in ((out, corpus), (corpus, out)):
        if inner.resolve().is_relative_to(outer.resolve()):
            raise UsageError(
                f"--corpus {corpus} --out {out}: {inner} is {outer} or lies in it, and what is written would be read "
                "as input: give an --out next to the corpus"
            )
    if is_remote(out):
        return
    with wrap_write_errors(out):
        existing = next(path for path in (out, *out.absolute().parents) if path.exists() or path.is_symlink())
        if not existing.is_dir():
            code = errno.EEXIST if existing == out else errno.ENOTDIR
            raise OSError(code, os.strerror(code))
        if not os.access(existing, os.W_OK | os.X_OK):
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))


def _reject_scratch_in_corpus(config: RunConfig) -> None:
    """Raise UsageError if another run of the corpus would take the copies that tasks work on for documents."""
    scratch, corpus = config.scratch, config.corpus
    if scratch and not is_remote(corpus) and scratch.resolve().is_relative_to(corpus.resolve()):
        raise UsageError(
            f"--scratch {scratch} lies in --corpus {corpus}, and copies there would be read as documents: give a "
            "folder next to the corpus"
        )


@contextmanager
def _section(name: str) -> Iterator[None]:
    """Context: begin the message of a UsageError with the section of the configuration."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"[{name}] {error}") from error
