"""Tokenizers behind one interface: SentencePiece models, tokenizer.json of Hugging Face, rank files of tiktoken.

A rank file is read as the tokenizer.json that it stands for (`read_json`), by the pattern and special tokens that its
publisher uses with it (`tiktoken_ranks.py`).
"""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, Protocol

import sentencepiece

from gristmill.errors import UsageError
from gristmill.io.tiktoken_ranks import is_ranks, ranks_to_json
from gristmill.paths import is_remote
from gristmill.storage.files import is_file, read_file

Kind = Literal["sentencepiece", "tokenizer.json", "tiktoken"]
JSON = "tokenizer.json"
CONFIG = "tokenizer_config.json"  # beside a tokenizer.json: names its special tokens
COMPANIONS = (CONFIG, "special_tokens_map.json", "chat_template.jinja")
_NAMES = (JSON, "tokenizer.model", "tiktoken.model")  # looked for in a folder, in this order
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(?:@[\w./-]+)?")
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|end▁of▁sentence|>", "<|eot_id|>", "<|im_end|>")
_BEGINS = ("<|begin_of_text|>", "<s>", "<bos>", "<|begin▁of▁sentence|>")


class AnyTokenizer(Protocol):
    """What every kind can do. `vocab_size` is one more than the largest id, added tokens included."""

    kind: Kind
    vocab_size: int

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without tokens that begin or end a document."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; special tokens are left out."""

    def id_of(self, token: str) -> int:
        """The id of a token, or -1."""

    def special(self, config: dict[str, Any], name: Literal["bos", "eos"]) -> int:
        """The id of the token that begins or ends a document, as the model or its tokenizer_config.json say; or -1."""


class SentencePieceTokenizer:
    """A SentencePiece model; `model` is the processor."""

    kind: Kind = "sentencepiece"

    def __init__(self, data: bytes) -> None:
        self.model = sentencepiece.SentencePieceProcessor()
        self.model.LoadFromSerializedProto(data)
        self.vocab_size = self.model.vocab_size()

    def encode(self, text: str) -> list[int]:
        found: list[int] = self.model.encode(text)
        return found

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.model.decode(list(ids))
        return text

    def id_of(self, token: str) -> int:
        found: int = self.model.piece_to_id(token)
        return found if self.model.id_to_piece(found) == token else -1

    def special(self, config: dict[str, Any], name: Literal["bos", "eos"]) -> int:  # noqa: ARG002
        found: int = self.model.bos_id() if name == "bos" else self.model.eos_id()
        return found


class JsonTokenizer:
    """A tokenizer.json, or what is read as one, by the library tokenizers; `content` is its text."""

    def __init__(self, data: str, kind: Kind) -> None:
        from tokenizers import Tokenizer as HuggingFace

        self.kind, self.content = kind, data
        self.model = HuggingFace.from_str(data)
        self.model.no_truncation()
        self.model.no_padding()
        if getattr(self.model.model, "dropout", None):
            self.model.model.dropout = None  # a text has the same ids every time
        self._vocabulary: dict[str, int] = self.model.get_vocab(with_added_tokens=True)
        self.vocab_size = max(self._vocabulary.values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.model.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.model.decode(list(ids), skip_special_tokens=True)
        return text

    def id_of(self, token: str) -> int:
        return self._vocabulary.get(token, -1)

    def special(self, config: dict[str, Any], name: Literal["bos", "eos"]) -> int:
        named = config.get(f"{name}_token")
        named = named.get("content") if isinstance(named, dict) else named
        if isinstance(named, str):
            return self.id_of(named)
        usual = _BEGINS if name == "bos" else _ENDS
        return next((found for token in usual if (found := self.id_of(token)) >= 0), -1)


def open_tokenizer(path: Path) -> SentencePieceTokenizer | JsonTokenizer:
    """The tokenizer in a file of any of the kinds. Raises UsageError where it is none of them."""
    data = read_file(path)
    try:
        if (text := read_json(path, data)) is not None:
            require_tokenizers(str(path))
            return JsonTokenizer(text, "tiktoken" if is_ranks(data) else "tokenizer.json")
        return SentencePieceTokenizer(data)
    except (UsageError, MemoryError):
        raise
    except Exception as error:  # tokenizers and SentencePiece raise plain ones
        raise UsageError(
            f"{path} is no tokenizer ({error}): expected a tokenizer.json, a SentencePiece model, or a rank file of "
            "tiktoken"
        ) from error


def require_tokenizers(what: str) -> None:
    """Raise UsageError where the library tokenizers, which `what` needs, is not installed."""
    if find_spec("tokenizers") is None:
        raise UsageError(f"{what} needs the library tokenizers: pip install 'gristmill[tokenizers]'")


def read_json(path: Path, data: bytes) -> str | None:
    """The tokenizer.json that a file is or, as a rank file of tiktoken, stands for; None for a SentencePiece model."""
    if is_ranks(data):
        return json.dumps(ranks_to_json(path, data), ensure_ascii=False)
    return data.decode() if data[:64].lstrip()[:1] == b"{" else None


def read_config(companions: Sequence[Path]) -> dict[str, Any]:
    """The fields of the tokenizer_config.json among a tokenizer's companions; {} without one. UsageError if damaged."""
    path = next((path for path in companions if path.name == CONFIG), None)
    if path is None:
        return {}
    try:
        found = json.loads(read_file(path))
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{path} is damaged ({error}): mend or remove it, and name the tokens by --bos, --eos"
        ) from error
    return found if isinstance(found, dict) else {}


def special_id(
    tokenizer: AnyTokenizer, path: Path, config: dict[str, Any], name: Literal["bos", "eos"], asked: str
) -> int:
    """The id of the token that begins ("bos") or ends ("eos") each document, or -1 for none.

    `asked` is a token, "model" for what the tokenizer names, or "none". Raises UsageError where there is none such.
    """
    if asked == "none":
        return -1
    found = tokenizer.special(config, name) if asked == "model" else tokenizer.id_of(asked)
    if found < 0:
        what = f"no {name} token is named by it" if asked == "model" else f"{asked!r} is not in its vocabulary"
        raise UsageError(f"{path}: {what}; give --{name} TOKEN, such as '<|endoftext|>', or --{name} none")
    return found


def find_ends(path: Path, bos: str, eos: str) -> tuple[int, int]:
    """The ids of the tokens that begin and end each document; see special_id."""
    tokenizer, config = open_tokenizer(path), read_config(companions_of(path))
    return special_id(tokenizer, path, config, "bos", bos), special_id(tokenizer, path, config, "eos", eos)


def companions_of(path: Path) -> list[Path]:
    """The files next to a tokenizer.json that belong to it: first its tokenizer_config.json, where there is one."""
    return [found for name in COMPANIONS if path.suffix == ".json" and is_file(found := path.with_name(name))]


def find_tokenizer_file(given: Path) -> Path:
    """The file of a tokenizer, given as a file, a folder of a model, or a repository ORG/NAME[@REVISION] of the Hub.

    Raises UsageError where there is none.
    """
    if is_file(given):
        return given
    for name in _NAMES:
        if is_file(given / name):
            return given / name
    if not is_remote(given) and not given.exists() and _REPOSITORY.fullmatch(str(given)):
        return _download(str(given))
    raise UsageError(
        f"{given}: expected a tokenizer, and there is no such file: give a tokenizer.json, a SentencePiece model, a "
        "rank file of tiktoken, a folder with one, or a repository ORG/NAME of the Hub; or train one with "
        "train_tokenizer"
    )


def _download(repository: str) -> Path:
    """The tokenizer of a repository of the Hub, in the cache of huggingface_hub, with its tokenizer_config.json."""
    try:
        from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
        from huggingface_hub.errors import (
            EntryNotFoundError,
            HfHubHTTPError,
            HTTPError,
            LocalEntryNotFoundError,
            OfflineModeIsEnabled,
        )
    except ImportError as error:
        raise UsageError(
            f"{repository}: there is no such file; to read it from the Hub: pip install 'gristmill[hub]'"
        ) from error
    name, _, revision = repository.partition("@")
    unreachable = ""  # why; then only the cache is looked in, as a download would be tried for half a minute
    try:
        get_hf_file_metadata(hf_hub_url(name, JSON, revision=revision or None))
    except (HfHubHTTPError, ValueError):
        pass  # the download says it
    except (HTTPError, OfflineModeIsEnabled) as error:
        unreachable = _first_line(error)
    for file in _NAMES:
        try:
            found = Path(hf_hub_download(name, file, revision=revision or None, local_files_only=bool(unreachable)))
        except LocalEntryNotFoundError as error:
            cause = unreachable or _first_line(error.__cause__ or error)
            raise UsageError(f"{repository}: there is no such file, and the Hub cannot be reached ({cause})") from error
        except EntryNotFoundError:
            continue
        except (HfHubHTTPError, ValueError) as error:
            raise UsageError(
                f"{repository}: there is no such file, nor repository of the Hub ({_first_line(error)})"
            ) from error
        for companion in COMPANIONS if file == JSON else ():
            with suppress(EntryNotFoundError):
                hf_hub_download(name, companion, revision=revision or None, local_files_only=bool(unreachable))
        return found
    raise UsageError(f"{repository}: the repository has no {', '.join(_NAMES)}")


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]
