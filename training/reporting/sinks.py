"""Sinks of metrics: what every record of a run goes to, besides the terminal."""

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from gristmill.errors import UsageError
from gristmill.storage.local import atomic_write_bytes
from training.reporting.metrics_file import read_metrics


class MetricSink(Protocol):
    """Something that keeps records; `path` is where, for error messages. Methods raise OSError where it is full."""

    path: Path

    def record(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Keep a record of a kind (run, step, eval, …); values are numbers, text, None, or dictionaries of them."""

    def close(self) -> None:
        """Keep what is not kept yet."""


def named_values(kind: str, values: dict[str, Any]) -> Iterator[tuple[str, int | float | str]]:
    """The numbers and texts of a record by names such as eval/sources/web/loss.

    >>> list(named_values("eval", {"loss": 2.5, "text": "", "mfu": None, "sources": {"web": {"loss": 3}}}))
    [('eval/loss', 2.5), ('eval/text', ''), ('eval/sources/web/loss', 3)]
    """
    for name, value in values.items():
        if isinstance(value, dict):
            yield from named_values(f"{kind}/{name}", value)
        elif isinstance(value, int | float | str):
            yield f"{kind}/{name}", value


class JsonLines:
    """A file with a JSON object a line; a resumed run drops the records after the step that it resumes from."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        kept = [json.dumps(record) + "\n" for record in read_metrics(path) if 0 < record["step"] <= step]
        atomic_write_bytes(path, "".join(kept).encode())
        self.file = path.open("a", encoding="utf-8")

    def record(self, kind: str, step: int, values: dict[str, Any]) -> None:
        self.file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    """TensorBoard event files in a folder; a resumed run tells TensorBoard to drop what comes after its step."""

    def __init__(self, path: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import, not needed on every rank

        self.path, self.board = path, SummaryWriter(str(path), purge_step=step + 1)

    def record(self, kind: str, step: int, values: dict[str, Any]) -> None:
        for name, value in named_values(kind, values):
            add = self.board.add_text if isinstance(value, str) else self.board.add_scalar
            add(name, value, step)

    def close(self) -> None:
        self.board.close()


class WeightsAndBiases:
    """A run of Weights & Biases in a folder: offline unless WANDB_MODE says otherwise; `wandb sync` uploads it.

    A resumed run is another run of the same group, as an offline one cannot be continued.
    """

    def __init__(self, path: Path, step: int, group: str) -> None:
        import wandb

        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        mode = os.environ.get("WANDB_MODE", "offline")
        self.run = wandb.init(
            project="gristmill", dir=str(path), mode=mode, group=group, config={"resumed_after": step},
            settings=wandb.Settings(silent=True),
        )  # fmt: skip

    def record(self, kind: str, step: int, values: dict[str, Any]) -> None:
        self.run.log(dict(named_values(kind, values)), step=step)

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """A run of MLflow, in a folder unless MLFLOW_TRACKING_URI says otherwise; text is a tag of the run."""

    def __init__(self, path: Path, step: int, group: str) -> None:
        # of a folder of ours, which MLflow deprecates in favour of databases, that a machine without a server lacks
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient

        self.path = path
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or path.absolute().as_uri())
        found = self._client.get_experiment_by_name("gristmill")
        experiment = found.experiment_id if found else self._client.create_experiment("gristmill")
        self._run = self._client.create_run(experiment, run_name=group, tags={"resumed_after": str(step)}).info.run_id

    def record(self, kind: str, step: int, values: dict[str, Any]) -> None:
        for name, value in named_values(kind, values):
            if isinstance(value, str):
                self._client.set_tag(self._run, name, value[:5000])
            else:
                self._client.log_metric(self._run, name, float(value), step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run)


def require_installed(module: str, option: str, extra: str) -> None:
    """Raise UsageError where a library that an option needs is not installed."""
    if importlib.util.find_spec(module) is None:
        raise UsageError(f"{option} needs {module}, which is not installed: pip install 'gristmill[{extra}]'")
