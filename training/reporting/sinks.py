"""Sinks of metrics: what every record of a run goes to, besides the terminal."""

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gristmill.errors import UsageError
from gristmill.storage.local import atomic_write_bytes
from training.reporting.metrics_file import read_metrics


def named_values(kind: str, values: dict[str, Any]) -> Iterator[tuple[str, int | float | str]]:
    """Yield the numbers and texts of a record by names such as eval/sources/web/loss.

    >>> list(named_values("eval", {"loss": 2.5, "text": "", "mfu": None, "sources": {"web": {"loss": 3}}}))
    [('eval/loss', 2.5), ('eval/text', ''), ('eval/sources/web/loss', 3)]
    """
    for name, value in values.items():
        path = f"{kind}/{name}" if kind else name
        if isinstance(value, dict):
            yield from named_values(path, value)
        elif isinstance(value, int | float | str):
            yield path, value
        elif isinstance(value, Path | tuple):
            yield path, str(value)


class JsonLines:
    """A file with a JSON object a line; a resumed run drops the records after the step that it resumes from.

    Of each start of its processes a record "run" stays, after which steps were taken.

    `path`, as of all sinks, is for error messages. Methods raise OSError where it is full.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        kept = []
        for record in read_metrics(path):
            starts_again = record["kind"] == "run" and record["step"] == step
            if record["step"] <= step and not starts_again:
                kept.append(json.dumps(record) + "\n")
        atomic_write_bytes(path, "".join(kept).encode())
        self.file = path.open("a", encoding="utf-8")

    def record(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Keep a record of a kind (run, step, eval, …); values are numbers, text, None, or dictionaries of them."""
        self.file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class TensorBoard:
    """TensorBoard event files in a folder; a resumed run tells TensorBoard to drop what comes after its step."""

    def __init__(self, path: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import, not needed on every rank

        self.path = path
        self.board = SummaryWriter(str(path), purge_step=step + 1)

    def record(self, kind: str, step: int, values: dict[str, Any]) -> None:
        for name, value in named_values(kind, values):
            add = self.board.add_text if isinstance(value, str) else self.board.add_scalar
            add(name, value, step)

    def close(self) -> None:
        self.board.close()


class WeightsAndBiases:
    """A run of Weights & Biases in a folder: offline unless WANDB_MODE says otherwise; `wandb sync` uploads it.

    Its project is WANDB_PROJECT, or gristmill. A resumed run continues the one whose id is kept in the folder, or
    WANDB_RUN_ID.
    """

    def __init__(self, path: Path, step: int, group: str, options: Mapping[str, Any]) -> None:
        import wandb

        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        given = os.environ
        kept = path / "run_id"
        run_id = given.get("WANDB_RUN_ID") or _kept_id(kept, step) or secrets.token_hex(4)
        atomic_write_bytes(kept, run_id.encode())
        self.run = wandb.init(  # whose arguments would win over the environment
            project=given.get("WANDB_PROJECT", "gristmill"), dir=str(path), mode=given.get("WANDB_MODE", "offline"),
            group=given.get("WANDB_RUN_GROUP") or group, name=given.get("WANDB_NAME") or group, id=run_id,
            resume="allow", config=dict(named_values("", {**options, "resumed_after": step})),
            settings=wandb.Settings(silent=True),
        )  # fmt: skip

    def record(self, kind: str, step: int, values: dict[str, Any]) -> None:
        self.run.log(dict(named_values(kind, values)), step=step)

    def close(self) -> None:
        self.run.finish()


class MLflow:
    """A run of MLflow, in a folder unless MLFLOW_TRACKING_URI says otherwise; text is a tag of the run.

    Its experiment is MLFLOW_EXPERIMENT_ID or MLFLOW_EXPERIMENT_NAME, or gristmill. A resumed run continues the one
    whose id is kept next to `path`.
    """

    def __init__(self, path: Path, step: int, group: str, options: Mapping[str, Any]) -> None:
        # of a folder of ours, which MLflow deprecates in favour of databases, that a machine without a server lacks
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        store = os.environ.get("MLFLOW_TRACKING_URI") or path.absolute().as_uri()
        self._client = MlflowClient(store)
        kept = path.with_name("mlflow_run_id")
        self._run = _kept_id(kept, step)
        if self._run:
            try:
                self._client.update_run(self._run, "RUNNING")
            except MlflowException as error:
                raise UsageError(
                    f"MLflow cannot continue run {self._run} of {kept} at {store} ({error}); set MLFLOW_TRACKING_URI "
                    f"to the server that has it, or remove {kept} to begin another run of MLflow"
                ) from error
        else:
            self._run = self._client.create_run(self._experiment(), run_name=group).info.run_id
            atomic_write_bytes(kept, self._run.encode())
            for option, value in named_values("", dict(options)):
                self._client.log_param(self._run, option, value)
        self._client.set_tag(self._run, "resumed_after", str(step))

    def record(self, kind: str, step: int, values: dict[str, Any]) -> None:
        for name, value in named_values(kind, values):
            if isinstance(value, str):
                self._client.set_tag(self._run, name, value[:5000])
            else:
                self._client.log_metric(self._run, name, float(value), step=step)

    def close(self) -> None:
        self._client.set_terminated(self._run)

    def _experiment(self) -> str:
        """Return the id of the experiment that the environment names; one that there is not is made."""
        if given := os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return given
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "gristmill")
        experiment = self._client.get_experiment_by_name(name)
        return experiment.experiment_id if experiment else self._client.create_experiment(name)


MetricSink = JsonLines | TensorBoard | WeightsAndBiases | MLflow


def _kept_id(path: Path, step: int) -> str:
    """Return the id in a file, of a run that continues after `step`; empty for one that begins."""
    return path.read_text() if step and path.is_file() else ""
