"""lm-eval's task files: which records a benchmark has, and which of their fields its prompts are made of.

A task is YAML: `dataset_path` and what narrows it down (`dataset_name`, `test_split`, `dataset_kwargs.data_files`), and
Jinja templates `doc_to_text`, `doc_to_choice`, `doc_to_target`. Each field that a template names is a text to look for.
Templates are parsed, never run, and a task that is made by code (`!function`) is refused.
Source: lm-evaluation-harness, docs/task_guide.md.
"""

import re
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from gristmill.errors import InputError, UsageError, require
from gristmill.io.corpus import list_corpus
from gristmill.io.documents import CorpusFile
from gristmill.storage.files import exists, file_info, is_file, is_folder, read_file, walk
from preprocessing.contamination.benchmarks import ALL_FIELDS, EACH

_SUFFIXES = (".yaml", ".yml")
_TEMPLATES = ("doc_to_text", "doc_to_choice", "doc_to_target")
_FORMATS = ("json", "parquet", "arrow")  # names of load_dataset for local files
_SPLITS = ("test_split", "validation_split", "training_split")  # the first that a task has is the one it evaluates
_SHOWN = 6  # names of files in a message


class _Code(str):
    """Code that a tag names, which is not plain YAML."""


def is_task_file(path: Path) -> bool:
    """Return whether a path is named as a task."""
    return path.suffix in _SUFFIXES


def task_files_in(folder: Path) -> list[Path]:
    """Return the tasks in a folder or below, by name; not tasks that others include (_NAME), nor groups."""
    tasks = list[Path]()
    for path in walk(folder):
        is_included = path.name.startswith("_")
        if is_task_file(path) and not is_included and "group" not in _read(path):
            tasks.append(path)
    return sorted(tasks)


def list_task(path: Path, template: str = ALL_FIELDS) -> list[CorpusFile]:
    """Return the files of a task's records, named by the task; their text is each field that its templates name.

    Another `template` than ALL_FIELDS takes the place of the task's. Raises UsageError for a task that is made by code,
    whose data are not found, or which names no field; InputError if the file cannot be read.
    """
    task = _read(path)
    name = str(task.get("task") or path.stem)
    texts = template
    if template == ALL_FIELDS:
        for key in (*_TEMPLATES, "process_docs", "custom_dataset"):
            if isinstance(task.get(key), _Code):
                raise UsageError(
                    f"--against {path}: expected templates of plain fields, got the code {task[key]} as {key}, "
                    "which is not run; name the fields of its records, as in --template '{question} {choices}'"
                )
        fields = list[str]()
        for key in _TEMPLATES:
            fields += _fields(path, key, task.get(key))
        if not fields:
            raise UsageError(
                f"--against {path}: expected fields in {', '.join(_TEMPLATES)}, got none; name the fields of its "
                "records, as in --template '{question} {choices}'"
            )
        texts = EACH.join(f"{{{field}}}" for field in dict.fromkeys(fields))
    files = _data_files(path, task)
    named = list[CorpusFile]()
    for file in files:
        file_name = f"{name}{_suffixes(file.name)}"
        if len(files) > 1:
            file_name = f"{name}/{file.name}"
        named.append(CorpusFile(file.path, file_name, file.size, texts))
    return named


def _read(path: Path) -> dict[str, Any]:
    """Return the fields of a task and of the tasks that it includes, its own first."""
    try:
        import yaml
    except ImportError as error:
        raise UsageError(f"--against {path}: a task file needs PyYAML: pip install pyyaml jinja2") from error

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("!", lambda _, tag, node: _Code(f"!{tag} {node.value}"))
    try:
        task = yaml.load(read_file(path), Loader)
    except yaml.YAMLError as error:
        raise InputError(f"--against {path}: expected a task file of lm-eval, got broken YAML: {error}") from error
    if not isinstance(task, dict):
        raise InputError(f"--against {path}: expected a task file of lm-eval, got {type(task).__name__} in YAML")
    for other in _listed(task.get("include") or []):
        task = _read(path.parent / other) | task
    return task


def _fields(path: Path, key: str, template: Any) -> list[str]:
    """Return the fields that a template names, such as `choices.text`; a name alone is a field, words are none."""
    try:
        from jinja2 import Environment, TemplateSyntaxError, meta, nodes
    except ImportError as error:
        raise UsageError(f"--against {path}: a task file needs Jinja: pip install pyyaml jinja2") from error
    if not isinstance(template, str):
        return []
    if template.isidentifier():
        return [template]
    if "{" not in template:
        return []
    environment = Environment(autoescape=True)
    try:
        tree = environment.parse(template)
    except TemplateSyntaxError as error:
        raise InputError(f"--against {path}: {key} is no Jinja template: {error}") from error
    named = meta.find_undeclared_variables(tree) - environment.globals.keys()
    called = [call.node for call in tree.find_all(nodes.Call)]
    within = list[str]()
    parents = list[nodes.Node]()
    for attribute in tree.find_all(nodes.Getattr):
        parent = attribute.node
        if attribute in called or not isinstance(parent, nodes.Name):
            continue
        parents.append(parent)
        if parent.name in named:
            within.append(f"{parent.name}.{attribute.attr}")
    whole = list[str]()
    for variable in tree.find_all(nodes.Name):
        is_parent = any(variable is parent for parent in parents)
        if variable.name in named and not is_parent:
            whole.append(variable.name)
    return [*whole, *within]


def _data_files(path: Path, task: dict[str, Any]) -> Sequence[CorpusFile]:
    where = str(task.get("dataset_path") or "")
    options = task.get("dataset_kwargs") or {}
    given_splits = [str(task[key]) for key in _SPLITS if task.get(key)]
    split = ""
    if given_splits:
        split = given_splits[0].partition("[")[0]
    if not where:
        raise UsageError(f"--against {path}: expected a task with a dataset_path, got none; give its tasks' files")
    if where in _FORMATS:
        given = options.get("data_files") or []
        if isinstance(given, dict):
            given = given.get(split) or list(chain.from_iterable(map(_listed, given.values())))
        local_files = [_local(path, name) for name in _listed(given)]
        require(bool(local_files), f"--against {path}: expected dataset_kwargs.data_files, got none")
        return local_files
    if is_folder(path.parent / where):
        root = path.parent / where
    elif is_folder(Path(where)):
        root = Path(where)
    else:
        revision = options.get("revision") or task.get("revision")
        if revision:
            where += f"@{revision}"
        root = Path(f"hf://datasets/{where}")
    files = list_corpus(root)
    config = str(task.get("dataset_name") or "")
    chosen = [file for file in files if _has(file.name, config) and _has(file.name, split)]
    if not chosen:
        names = ", ".join(file.name for file in files[:_SHOWN])
        if len(files) > _SHOWN:
            names += ", …"
        raise UsageError(
            f"--against {path}: expected files of {' '.join(filter(None, (config, split)))} in {root}, got {names}; "
            f"try --against {root}/FOLDER --template '{{question}} {{choices}}'"
        )
    return chosen


def _listed(names: Any) -> list[str]:
    if isinstance(names, str):
        return [names]
    return list(names)


def _local(path: Path, name: str) -> CorpusFile:
    """Return a file that a task names: from the working directory, as lm-eval takes it, or else next to the task."""
    for candidate in (Path(name), path.parent / name):
        if exists(candidate) and is_file(candidate):
            info = file_info(candidate)
            assert info is not None
            return CorpusFile(candidate, candidate.name, info.size)
    raise UsageError(f"--against {path}: expected its data file {name}, but there is none of that name")


def _has(name: str, part: str) -> bool:
    """Return whether a file's name has a part: `test` is in test-00000-of-00001.parquet, and not in latest.parquet."""
    return re.search(rf"(^|[/_.-]){re.escape(part)}([/_.-]|$)", name) is not None or not part


def _suffixes(name: str) -> str:
    """Return the suffixes by which a file is read: .jsonl.zst."""
    _, dot, suffixes = name.rpartition("/")[2].partition(".")
    return f"{dot}{suffixes}"
