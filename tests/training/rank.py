"""One of the processes of `run_ranks`: calls the function that conftest.py names in `job`, and keeps its result."""

import importlib.util
import os
from typing import Any

import torch


def be_rank(job: dict[str, Any]) -> None:
    os.environ.update(job["environment"])
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("test_module", job["file"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.save(getattr(module, job["function"])(*job["arguments"]), job["result"])


if __name__ == "rank":
    be_rank(globals()["job"])
