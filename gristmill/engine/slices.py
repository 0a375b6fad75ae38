"""Cut a corpus into slices, and gather small files, so that a task reads neither too much nor too little."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gristmill.counts import Counts
from gristmill.engine.run import StageRun
from gristmill.engine.task import Result, Task
from gristmill.io.documents import CorpusFile
from gristmill.io.readers import SLICE_BYTES, Slice, find_cuts, is_cut, slices_at, whole_file

SMALL_BYTES = 1 << 20  # files below this are gathered, up to GROUP_BYTES a task
GROUP_BYTES = 16 << 20
_GROUP_FILES = 256  # on average


def cut_corpus(run: StageRun, files: Sequence[CorpusFile]) -> list[Slice]:
    """The slices of all files, in order: large .jsonl and .parquet files are cut by tasks of the step `cut`."""
    large = [file for file in files if is_cut(file)]
    tasks = [Task(file.name, _find_cuts, {"path": file.path}, size=file.size) for file in large]
    ...
