"""The files next to a tokenizer that belong to it, and what they say of its tokens."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from gristmill.errors import UsageError
from gristmill.storage.files import is_file, names_ending, read_file

JSON = "tokenizer.json"
MODEL = "tokenizer.model"
RANKS = "tiktoken.model"  # a rank file of tiktoken in a model's folder
CONFIG = "tokenizer_config.json"  # names the special tokens
ADDED_TOKENS = "added_tokens.json"  # of transformers 4: names and ids of tokens that no tokenizer.model has
TOKENS_MAP = "special_tokens_map.json"
CHAT_TEMPLATE = "chat_template.jinja"
COMPANIONS = (CONFIG, TOKENS_MAP, ADDED_TOKENS, CHAT_TEMPLATE)
TEMPLATES = "additional_chat_templates"  # a folder of further templates, NAME.jinja


def companions_of(path: Path) -> list[Path]:
    """Return the files that belong to a tokenizer: first its tokenizer_config.json.

    A rank file of tiktoken has none but a chat template.
    A tokenizer.model next to a tokenizer.json and its tokenizer_config.json is the same tokenizer, for other programs.
    """
    folder = path.parent
    if path.suffix not in (".json", ".model"):
        if not is_file(folder / CHAT_TEMPLATE):
            return []
        return [folder / CHAT_TEMPLATE]
    companions = [folder / name for name in COMPANIONS if is_file(folder / name)]
    companions += [folder / TEMPLATES / name for name in names_ending(folder / TEMPLATES, ".jinja")]
    if path.name == JSON and folder / CONFIG in companions and is_file(folder / MODEL):
        companions.append(folder / MODEL)
    return companions


def copies_in(folder: Path, path: Path) -> dict[Path, Path]:
    """Return the paths of a tokenizer and its companions, each with the path that its copy in `folder` has."""
    return {file: folder / file.relative_to(path.parent) for file in (path, *companions_of(path))}


def read_config(companions: Sequence[Path]) -> dict[str, Any]:
    """Return the fields of the tokenizer_config.json among a tokenizer's companions; {} without one.

    Raises UsageError if it is damaged.
    """
    return _read_fields(companions, CONFIG)


def named_token(config: dict[str, Any], name: Literal["bos", "eos"]) -> str | None:
    """Return the token that a tokenizer_config.json names, or None."""
    return _content(config.get(f"{name}_token"))


def added_tokens(companions: Sequence[Path]) -> Iterator[tuple[str, int | None]]:
    """Yield the tokens that the companions add to the vocabulary, with their ids where they say them."""
    config = read_config(companions)
    for number, token in _fields(config.get("added_tokens_decoder")).items():
        content = _content(token)
        if content is not None and number.isdigit():
            yield content, int(number)
    for content, number in _read_fields(companions, ADDED_TOKENS).items():
        if isinstance(number, int):
            yield content, number
        else:
            yield content, None
    for fields in (config, _read_fields(companions, TOKENS_MAP)):
        for name in ("additional_special_tokens", "extra_special_tokens"):  # of transformers 4, and of 5
            listed = fields.get(name)
            if not isinstance(listed, list):
                continue
            for token in listed:
                content = _content(token)
                if content is not None:
                    yield content, None


def _read_fields(companions: Sequence[Path], name: str) -> dict[str, Any]:
    path = next((path for path in companions if path.name == name), None)
    if path is None:
        return {}
    try:
        return _fields(json.loads(read_file(path)))
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} is damaged ({error}): fix or remove it, and name the tokens by --bos, --eos"
        ) from error


def _fields(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        return {}
    return value


def _content(token: object) -> str | None:
    """Return the text of a token, which is written as a string or as an object."""
    if isinstance(token, dict):
        token = token.get("content")
    if not isinstance(token, str):
        return None
    return token
