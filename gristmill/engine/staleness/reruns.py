"""Why tasks of a step run again, in words: files and sources that are new, changed or gone, arguments, versions."""

import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError

from gristmill.engine.staleness.records import DoneRecord
from gristmill.engine.task import LIBRARIES, OWN_VERSION, library_version
from gristmill.wording import count_of, verb_for

Identity = Mapping[str, str]  # see identify
_INPUT = re.compile(r"input \d+ \((.*)\)", re.DOTALL)
_SET = re.compile(r"[\d,]+ files")  # the name of an input that is a FileSet
_HASH = re.compile(r"[0-9a-f]{64}")
_NAMED = 3  # files that a line names
_ARGUMENT = "argument "
_OTHER_NAMES = "outputs"
_FAILED = "documents or files failed"  # and are tried again


def differing_versions(before: Identity, now: Identity) -> dict[str, tuple[str, str]] | None:
    """Return what has other versions in two identities, libraries or code of ours; None if something else differs, too.

    >>> differing_versions({"pyarrow": "23", "outputs": "a"}, {"pyarrow": "24", "outputs": "a"})
    {'pyarrow': ('23', '24')}
    """
    versions = dict[str, tuple[str, str]]()
    for name in _differing(before, now):
        if name not in LIBRARIES and not name.startswith(OWN_VERSION):
            return None
        versions[name] = (before.get(name, "none"), now.get(name, "none"))
    return versions


def outdated_versions(identity: Identity, own_versions: Identity) -> dict[str, tuple[str, str]]:
    """Return what has another version now than a task was made with: then and now, by name.

    `own_versions` are the versions of Gristmill's own code: see Stage.
    """
    versions = dict[str, tuple[str, str]]()
    for name, now in own_versions.items():
        then = identity.get(name)
        if then is not None and then != now:
            versions[name] = (then, now)
    for name in LIBRARIES:
        then = identity.get(name)
        if then is None:
            continue
        try:
            now = library_version(name)
        except PackageNotFoundError:
            now = "not installed"
        if now != then:
            versions[name] = (then, now)
    return versions


def changed_steps(identity: Identity, own_versions: Identity) -> list[str]:
    """Return in words which steps a task did not run that it runs now, and which it ran that are gone.

    `own_versions` are the versions of Gristmill's own code: see Stage. A task that runs no steps has none.

    >>> steps = {"argument steps": "[…]", "version of the step 'a'": "1"}
    >>> changed_steps(steps, {"version of the step 'a'": "1", "version of the step 'b'": "1"})
    ["the step 'b' is new"]
    """
    if f"{_ARGUMENT}steps" not in identity:
        return []
    before = {name for name in identity if name.startswith(OWN_VERSION)}
    changes = list[str]()
    for name in own_versions:
        if name not in before:
            changes.append(f"{name.removeprefix(OWN_VERSION)} is new")
    for name in sorted(before - set(own_versions)):
        changes.append(f"{name.removeprefix(OWN_VERSION)} is gone")
    return changes


def spell_versions(versions: Mapping[str, tuple[str, str]]) -> str:
    """Return versions then and now in words.

    >>> spell_versions({"pyarrow": ("23", "24"), "version of the stage": ("3", "4")})
    'pyarrow 23 → 24, version of the stage 3 → 4'
    """
    return ", ".join(f"{name} {then} → {now}" for name, (then, now) in versions.items())


def spell_version(name: str, version: str) -> str:
    """Return one version in words.

    >>> spell_version("version of the stage", "3")
    'version 3 of the stage'
    """
    if name.startswith(OWN_VERSION):
        return f"version {version} of {name.removeprefix(OWN_VERSION)}"
    return f"{name} {version}"


def note_outdated(step: str, tasks: Iterable[tuple[DoneRecord, Identity]], count: int) -> None:
    """Print which versions make tasks of a step run again, if they alone do, and what that costs.

    `tasks` are the records of the tasks that run, with their identities of today; `count` is the number of all.
    """
    outdated = dict[str, tuple[str, str]]()
    costs = list[float]()
    for record, identity in tasks:
        versions = differing_versions(record.identity, identity)
        if versions:
            outdated |= versions
            costs.append(record.core_seconds)
    if not outdated:
        return
    verb = verb_for(len(costs), "runs", "run")
    print(
        f"note: {spell_versions(outdated)}: {len(costs):,} of {count_of(count, 'task')} of {step} {verb} again, which "
        f"took {sum(costs):,.1f} core seconds; --accept_versions keeps what is there",
        file=sys.stderr, flush=True,
    )  # fmt: skip


def note_kept(stage: str, versions: Mapping[str, tuple[str, str]]) -> None:
    """Print the earlier versions that made what --accept_versions keeps."""
    if versions:
        names = ", ".join(f"{spell_version(name, then)} (now {now})" for name, (then, now) in versions.items())
        print(f"{stage}: kept what was made with {names}, by --accept_versions", file=sys.stderr, flush=True)


def explain(
    stage: str,
    step: str,
    tasks: Mapping[str, Identity],
    before: Mapping[str, Identity],
    todo: Sequence[str],
    retried: Collection[str],
    details: bool,
) -> None:
    """Print why the tasks `todo` of a step run: with `details` each on a line, else all that differs on one line.

    `tasks` and `before` are the identities of all tasks, by name, of this run and of the one before; `retried` are
    tasks in which something failed before.
    """
    if details:
        for task in todo:
            reason = rerun_reason(tasks[task], before.get(task), task in retried)
            print(f"{stage}: {task}: {reason}", file=sys.stderr, flush=True)
        return
    reasons = _summarise(tasks, before, todo, retried)
    if reasons and (tasks or before):
        count = f"{len(todo):,} of {count_of(len(tasks), 'task')} {verb_for(len(todo), 'runs', 'run')}"
        print(f"{stage}: {step}: {count}: {', '.join(reasons)}", file=sys.stderr, flush=True)


def rerun_reason(now: Identity, before: Identity | None, is_retried: bool = False) -> str:
    """Return why a task runs: it is new, its identity differs from its record, or an output was changed.

    Or it `is_retried`: documents or files failed in it.
    """
    if before is None:
        return "no earlier run finished it"
    reasons = list[str]()
    files_now = _files_of([now])
    files_before = _files_of([before])
    for name in files_now | files_before:
        if name not in files_before:
            reasons.append(f"{name} new")
        elif name not in files_now:
            reasons.append(f"{name} gone")
        elif files_now[name] != files_before[name]:
            reasons.append(f"{name} changed")
    reasons += _other_reasons(now, before)
    otherwise = f"{_FAILED} in it" if is_retried else "its output was removed or changed"
    return ", ".join(reasons) or otherwise


def _summarise(
    tasks: Mapping[str, Identity], before: Mapping[str, Identity], todo: Sequence[str], retried: Collection[str]
) -> list[str]:
    """Return what differs between all tasks of a step and the tasks before, with the number of files."""
    if not before:
        return ["no earlier run finished them"]
    files_now = _files_of(tasks.values())
    files_before = _files_of(before.values())
    reasons = _group_files(files_now.keys() - files_before.keys(), files_before, "new")
    reasons += _group_files(files_before.keys() - files_now.keys(), files_now, "gone")
    changed = list[str]()
    for name in sorted(files_now.keys() & files_before.keys()):
        if files_now[name] != files_before[name]:
            changed.append(name)
    if changed:
        reasons.append(_spell_files(changed, "changed"))
    others = Counter[str]()
    unexplained = 0
    for task in todo:
        earlier = before.get(task)
        if earlier is None:
            continue
        reasons_of_task = _other_reasons(tasks[task], earlier)
        others.update(reasons_of_task)
        if not reasons_of_task and _files_of([tasks[task]]) == _files_of([earlier]) and task not in retried:
            unexplained += 1
    reasons += list(others)
    if retried:
        reasons.append(f"{_FAILED} in {count_of(len(retried), 'task')}")
    if unexplained:
        reasons.append(f"outputs of {count_of(unexplained, 'task')} were removed or changed")
    if todo and not reasons:
        reasons.append("no earlier run finished them")
    return reasons


def _differing(before: Identity, now: Identity) -> list[str]:
    return [name for name in {**now, **before} if now.get(name) != before.get(name)]


def _files_of(identities: Iterable[Identity]) -> dict[str, set[str]]:
    """Return the tags of the single files that tasks read, by name."""
    files = dict[str, set[str]]()
    for identity in identities:
        for name, tag in identity.items():
            match = _INPUT.fullmatch(name)
            if match and not _SET.fullmatch(match[1]):
                files.setdefault(match[1], set()).add(tag)
    return files


def _other_reasons(now: Identity, before: Identity) -> list[str]:
    """Return what differs in a task but for single files: versions, arguments, sets of files."""
    reasons = list[str]()
    for name in _differing(before, now):
        match = _INPUT.fullmatch(name)
        if match and not _SET.fullmatch(match[1]):
            continue
        if match:
            if name in now:
                reasons.append(f"{match[1]} that it reads changed")
        elif name == _OTHER_NAMES:
            reasons.append("names of outputs changed")
        else:
            reasons.append(_spell_change(name, before.get(name, "none"), now.get(name, "none")))
    return reasons


def _spell_change(name: str, before: str, now: str) -> str:
    name = name.removeprefix(_ARGUMENT)
    if _HASH.fullmatch(before) or _HASH.fullmatch(now):
        return f"{name} changed"
    return f"{name} {before} → {now}"


def _group_files(names: Iterable[str], others: Iterable[str], what: str) -> list[str]:
    """Return how many files are new or gone, by source where all files of a source are."""
    other_sources = set(map(_source_of, others))
    whole = Counter[str]()
    single = list[str]()
    for name in sorted(names):
        source = _source_of(name)
        if source and source not in other_sources:
            whole[source] += 1
        else:
            single.append(name)
    reasons = [f"source {source} {what} ({count_of(count, 'file')})" for source, count in whole.items()]
    if single:
        reasons.append(_spell_files(single, what))
    return reasons


def _source_of(name: str) -> str:
    """Return the first folder in the name of a file in its corpus, '' for a file that is not in one."""
    if "/" not in name:
        return ""
    return name.partition("/")[0]


def _spell_files(names: Sequence[str], what: str) -> str:
    named = ", ".join(names[:_NAMED])
    if len(names) > _NAMED:
        named += ", …"
    return f"{count_of(len(names), 'file')} {what} ({named})"
