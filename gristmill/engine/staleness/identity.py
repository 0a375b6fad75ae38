"""Identity: all that the outputs of a task depend on, by name, without the folders that its files are in."""

import hashlib
from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from gristmill.engine.task import PLAIN_TYPES, FileSet, Task, fields_of

_LONG = 100  # characters; longer values are hashed


def identify(task: Task, stage: dict[str, str], tag_of: Callable[[Path | FileSet], str]) -> dict[str, str]:
    """Return all that outputs depend on, by name: `stage` (versions), arguments, names of outputs, tags of inputs.

    Contains no folder: an input is its name in its corpus, or its file name, and its content tag, an output its file
    name.
    """
    numbers: dict[Path | FileSet, str] = {path: f"output {i}" for i, path in enumerate(task.outputs)}
    identity = stage | {"function": task.function.__qualname__}
    for number, (files, corpus_name) in enumerate(task.names.items()):
        numbers[files] = f"input {number}"
        if isinstance(files, FileSet):
            name = f"{len(files):,} files"
        else:
            name = corpus_name or files.name
        identity[f"input {number} ({name})"] = tag_of(files)
    for name, value in task.arguments.items():
        text = msgspec.json.encode(_canonical(value, numbers)).decode()
        if len(text) > _LONG:
            text = _sha256(text)
        identity[f"argument {name}"] = text
    identity["outputs"] = _sha256("\0".join(path.name for path in task.outputs))
    return identity


def _canonical(value: Any, numbers: dict[Path | FileSet, str]) -> Any:
    """Return a value as JSON builtins, with each file replaced by its number."""
    if type(value) in PLAIN_TYPES:
        return value
    if isinstance(value, Path | FileSet):
        return numbers[value]
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, str | int):  # of subclasses, such as enumerations
        return value
    if isinstance(value, dict):
        return [[_canonical(key, numbers), _canonical(item, numbers)] for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return sorted(_canonical(item, numbers) for item in value)
    if isinstance(value, list | tuple):
        return [item if type(item) in PLAIN_TYPES else _canonical(item, numbers) for item in value]
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.shape, hashlib.sha256(np.ascontiguousarray(value).data).hexdigest()]
    named_items = fields_of(value)
    assert named_items or is_dataclass(value) or isinstance(value, msgspec.Struct), f"{value!r} cannot be fingerprinted"
    canonical = list[Any]([type(value).__name__])
    for name, item in named_items:
        canonical.append([name, item if type(item) in PLAIN_TYPES else _canonical(item, numbers)])
    return canonical


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
