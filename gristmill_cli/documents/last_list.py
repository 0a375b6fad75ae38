"""Notes the list of documents to keep or drop that a mix was made with, and warns of lines that a later run lacks."""

import sys
from collections.abc import Iterator
from pathlib import Path

from gristmill.io.files import STATE_DIR
from gristmill.storage.files import is_file, read_file, remove_files, write_file
from gristmill.wording import count_of
from gristmill_cli.run_config import RunConfig, recorded_options
from preprocessing.mixing.keep_list import DROP, KeepList

_LAST = f"{STATE_DIR}/keep_list.txt"
_WITHDRAWN = f"{STATE_DIR}/keep_list.withdrawn.txt"
_SHOWN = 3  # lines that are quoted


def note_list(config: RunConfig) -> None:
    """Note the list that the mix was made with."""
    if config.keep_list:
        write_file(config.out / _LAST, read_file(config.keep_list))
    else:
        remove_files([config.out / _LAST])


def warn_of_missing_lines(config: RunConfig) -> None:
    """Warn of documents that the list of the last mix dropped, and this run's list, if it has one, does not.

    Their lines are kept in a file of OUT, as the list may have been overwritten.
    """
    earlier = recorded_options(config.out).get("keep_list")
    last = config.out / _LAST
    lines = list(_missing_lines(last, config.keep_list))
    kept_in = ""
    if lines:
        _keep_withdrawn(config.out / _WITHDRAWN, lines)
        kept_in = f" ({config.out / _WITHDRAWN} keeps its lines)"
    if earlier and config.keep_list is None:
        _warn(
            f"the last run here had --keep_list {earlier}, and this one has none: documents that it took down are in "
            f"the mix again. Give it again, or write keep_list = {str(earlier)!r} in the file of the run{kept_in}"
        )
    elif lines:
        shown = ", ".join(f"`{line}`" for line in lines[:_SHOWN])
        if len(lines) > _SHOWN:
            shown += ", …"
        _warn(
            f"{config.keep_list} lacks {count_of(len(lines), 'line')} of the list that the last run here had: "
            f"{shown}; documents that they took down are in the mix again. To take them down again, copy the "
            f"lines from {config.out / _WITHDRAWN}"
        )


def _missing_lines(last: Path, keep_list: Path | None) -> Iterator[str]:
    """Yield the lines of a list, if it is there, that drop documents and for which another has nothing in place."""
    if not is_file(last):
        return
    earlier = KeepList.read(last)
    now = KeepList.read(keep_list) if keep_list else KeepList({}, {}, (), ())
    earlier_digests = {text.digest for text in earlier.texts}
    digests = set[bytes]()
    renewed = set[str]()
    for text in now.texts:
        digests.add(text.digest)
        if text.note and text.digest not in earlier_digests:
            renewed.add(text.note)
    for text, line in zip(earlier.texts, earlier.text_lines, strict=True):
        if text.digest not in digests and text.note not in renewed:
            yield line
    for file, rows in earlier.dropped.items():
        still_dropped = set[int]()
        if file in now.dropped:
            still_dropped.update(now.dropped[file].tolist())
        for row in rows.tolist():
            if row not in still_dropped:
                yield f"{DROP} {file}@{row}"


def _keep_withdrawn(path: Path, lines: list[str]) -> None:
    """Add the lines that a file does not have to it."""
    all_lines = dict[str, None]()  # in order
    if is_file(path):
        all_lines |= dict.fromkeys(read_file(path).decode().splitlines())
    all_lines |= dict.fromkeys(lines)
    write_file(path, "".join(f"{line}\n" for line in all_lines).encode())


def _warn(sentence: str) -> None:
    print(f"warning: {sentence}", file=sys.stderr, flush=True)
