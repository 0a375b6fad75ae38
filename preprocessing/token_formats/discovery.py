"""Find the files of a folder that hold tokens, and their formats."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from gristmill.errors import InputError, UsageError
from gristmill.paths import absolute
from gristmill.storage.files import exists, file_info, is_file, reject_remote, reject_unknown_scheme, walk
from preprocessing.token_formats.megatron import describe_megatron, read_megatron
from preprocessing.token_formats.mosaic import INDEX, find_mosaic_files, read_mosaic
from preprocessing.token_formats.raw_tokens import describe_raw, read_raw
from preprocessing.token_formats.token_file import Layout, TokenFile
from preprocessing.token_formats.token_stream import Chunk
from preprocessing.token_formats.token_tables import read_table

READERS: Mapping[Layout, Callable[[TokenFile], Iterator[Chunk]]] = {
    "raw": read_raw, "megatron": read_megatron, "table": read_table, "mosaic": read_mosaic,
}  # fmt: skip
_TABLES = (".arrow", ".parquet")


def find_token_files(tokens: Path, column: str, dtype: str) -> list[TokenFile]:
    """Return the token files of a folder, at any depth, in the order of their names, or the one that is given.

    Raises UsageError where there is none, InputError for one that is damaged as its header shows.
    """
    reject_unknown_scheme(tokens)
    if tokens.suffix == ".idx" and is_file(tokens):
        tokens = tokens.with_suffix(".bin")
    if not exists(tokens):
        raise UsageError(
            f"{tokens}: expected a file or folder of tokens, but there is none; a data set of the Hub is "
            "hf://datasets/ORG/NAME"
        )
    paths = [tokens]
    if not is_file(tokens):
        paths = sorted(walk(tokens), key=lambda path: path.parts)
    files = list[TokenFile]()
    for path in paths:
        files += _describe(path, _source_of(path, tokens), column, dtype)
    if not files:
        names = ", ".join(path.name for path in paths[:3]) or "no file"
        raise UsageError(
            f"{tokens}: expected .bin of nanoGPT, llm.c or Megatron, .arrow, .parquet, or MDS with its {INDEX}; got "
            f"{names}; gristmill tokenize reads text"
        )
    return files


def _source_of(path: Path, tokens: Path) -> str:
    """Return the first folder below `tokens`; of a file directly in it the folder's name, of a single file its own."""
    if path == tokens:
        return path.stem
    below = path.relative_to(tokens).parts
    if len(below) > 1:
        return below[0]
    return absolute(tokens).name


def _describe(path: Path, source: str, column: str, dtype: str) -> list[TokenFile]:
    """Return the token file at a path, or the shards that an index.json names; none if it is of another kind."""
    if path.name == INDEX:
        reject_remote(path)
        return find_mosaic_files(path, source, column, dtype)
    if path.suffix == ".idx" and not path.with_suffix(".bin").is_file():
        raise InputError(f"{path}: expected {path.with_suffix('.bin').name} beside it, but there is none")
    if path.suffix in _TABLES:
        info = file_info(path)
        return [TokenFile(path, source, "table", info.size if info else 0, column=column)]
    if path.suffix != ".bin":
        return []
    reject_remote(path)
    index = path.with_suffix(".idx")
    if index.is_file():
        return [describe_megatron(TokenFile(path, source, "megatron", path.stat().st_size, index=index))]
    return [describe_raw(TokenFile(path, source, "raw", path.stat().st_size), dtype)]
