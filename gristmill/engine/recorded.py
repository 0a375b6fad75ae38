"""Files of earlier stages in a bucket, found in the ledgers that name them: their folders are not listed.

In a folder that `gristmill run` wrote in a bucket is what the ledgers there say. Only the names of its own subfolders
are asked for, as each source may have a ledger of its own. Other folders are listed, as stages may have been run into
them at any depth: those that no `gristmill run` wrote, those without a ledger or with a damaged one, and copies in
another place.
"""

import os
from collections.abc import Collection
from pathlib import Path

from gristmill.engine.ledger import OutputRecord
from gristmill.engine.lineage import FileTags
from gristmill.io.documents import CorpusFile, scan_corpus, scan_source
from gristmill.io.files import RUN_FILE, reject_marked, reject_unfinished
from gristmill.storage.files import file_info, is_folder
from gristmill.storage.names import name_of
from gristmill.storage.walking import Found
from gristmill.urls import folders_above, is_remote


def list_corpus(root: Path, prefix: str = "", text_column: str = "text") -> list[CorpusFile]:
    """The files of scan_corpus that are read; what `gristmill run` wrote in a bucket is not listed."""
    return scan_corpus(root, prefix, text_column, find=find_recorded).files


def list_source(folder: Path, source: str, text_column: str = "text") -> list[CorpusFile]:
    """The files of scan_source that are read; what `gristmill run` wrote in a bucket is not listed."""
    return scan_source(folder, source, text_column, find_recorded).files


def recorded_paths(folder: Path) -> list[Path]:
    """The files below a folder in a bucket that stages wrote; none if it has to be listed."""
    return [file.path for file in find_recorded(folder) or ()]


def is_input_folder(folder: Path) -> bool:
    """Whether there is a folder of this name."""
    return find_recorded(folder) is not None or is_folder(folder)


def reject_unfinished_inputs(folder: Path) -> None:
    """Raise InputError if a stage has not finished writing a folder."""
    if find_recorded(folder) is None:
        reject_unfinished(folder)


def find_recorded(folder: Path) -> list[Found] | None:
    """The files below a folder in a bucket that stages wrote; None if it has to be listed.

    Raises InputError if a stage has not finished writing there.
    """
    if not is_remote(folder):
        return None
    found, top = recorded_files(name_of(folder), FileTags()), len(name_of(folder)) + 1
    if found is None:
        return None
    reject_marked(folder, [folder / holder[top:] for holder in _holders(found)])
    return [Found(folder / name[top:], record.size) for name, record in sorted(found.items())]


def recorded_files(folder: str, tags: FileTags) -> dict[str, OutputRecord] | None:
    """The records of the files below a folder, by absolute name; None if it has to be listed."""
    if not is_remote(folder) or not _is_of_run(folder):
        return None
    found = _named_in(folder, tags)
    if folder not in _holders(found):
        if tags.has_files(folder):
            return None
        for name in tags.folders_in(folder):
            inside = _named_in(f"{folder}/{name}", tags)
            if not inside:
                return None
            found |= inside
    for holder in _holders(found):
        found |= _named_in(holder, tags)
    return found if found and all(tags.is_placed(name) for name in found) else None


def ledger_folders(folder: str, files: Collection[str], tags: FileTags) -> list[str]:
    """A folder, those of `files` below it, and those directly in it without any of these: where ledgers may be."""
    found = recorded_files(folder, tags)
    if found is not None:
        return sorted({folder, *_holders(found), *map(os.path.dirname, files)})
    holders = {folder, *map(os.path.dirname, files)}
    in_use = {name[len(folder) :].lstrip("/").partition("/")[0] for name in holders}
    others = (os.path.join(folder, name) for name in tags.folders_in(folder) if name not in in_use)
    return sorted(holders.union(others))


def _is_of_run(folder: str) -> bool:
    """Whether a folder in a bucket is in that of a `gristmill run`."""
    return any(file_info(above / RUN_FILE) for above in folders_above(Path(folder)))


def _named_in(folder: str, tags: FileTags) -> dict[str, OutputRecord]:
    """The files at any depth that the ledgers of a folder and its parents name."""
    return {name: record for each in tags.producers(folder) for name, record in each.below(folder)}


def _holders(names: Collection[str]) -> set[str]:
    """The folders that hold the files."""
    return set(map(os.path.dirname, names))
