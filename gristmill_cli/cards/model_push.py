"""Pushing a trained model to the Hugging Face Hub: its export with a card that says how it was trained and scored."""

import glob
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gristmill.errors import require
from gristmill.io.files import STATE_DIR
from gristmill.paths import ObjectName
from gristmill.storage.files import is_file, read_file
from gristmill.storage.hub import hub_library
from gristmill.wording import count_of
from gristmill_cli.report.training_records import read_scores

CARD = "README.md"
_CURVE = "loss.svg"
_DATA_CARD = "data-card.md"
_OPTIONS = ("model.", "data.", "optim.")  # of run.json that the card shows


def push_model(checkpoint: Path, name: str, dry_run: bool, private: bool, tokens: Path | None) -> str:
    """Export a checkpoint with a card, and upload both as the model `name`, ORG/NAME; return what was sent.

    Raises UsageError for a model that has no export, StorageError where the Hub refuses it.
    """
    from training.hugging_face.export_hf import export_hf  # here, as it imports torch

    with tempfile.TemporaryDirectory(prefix="gristmill-") as temporary:
        folder = Path(temporary) / "model"
        said = export_hf(checkpoint, folder, tokens)
        write_card(folder, checkpoint, name, said)
        sizes = sizes_of_files(folder)
        lines = [f"{size:>16,} {file}" for file, size in sizes.items()]
        total = f"{count_of(len(sizes), 'file')}, {count_of(sum(sizes.values()), 'byte')}: {checkpoint} → hf://{name}"
        if dry_run:
            return "\n".join([*lines, f"{total}; nothing was sent"])
        with hub_library(ObjectName("hf", name, "")):
            from huggingface_hub import HfApi

            api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None)
            api.create_repo(name, private=private, exist_ok=True)
            api.upload_folder(
                repo_id=name, folder_path=folder, allow_patterns=list(map(glob.escape, sizes)),
                commit_message="Model trained with gristmill",
            )  # fmt: skip
    return total


def sizes_of_files(folder: Path) -> dict[str, int]:
    """Return the size of each file below a folder that is sent, in order, by its name there."""
    sizes = dict[str, int]()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and STATE_DIR not in path.parts:
            sizes[path.relative_to(folder).as_posix()] = path.stat().st_size
    return sizes


def write_card(folder: Path, checkpoint: Path, name: str, said: str) -> None:
    """Write the card of an exported model next to it, with the curve and the data's card where the run has them."""
    run = _run_of(checkpoint)
    summary = _read_json(run / "summary.json")
    options = _read_json(run / "run.json")
    if (run / "metrics.jsonl").is_file():
        _write_curve(run, folder)
    data_card = _data_card(options)
    if data_card is not None:
        (folder / _DATA_CARD).write_bytes(data_card)
    lines = [*_card(folder, name, said, summary, read_scores(run)), *_options_lines(options)]
    (folder / CARD).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _run_of(checkpoint: Path) -> Path:
    """Return the folder of the run that a checkpoint is of."""
    if checkpoint.name.startswith("step-"):
        checkpoint = checkpoint.parent
    if checkpoint.name == "checkpoints":
        return checkpoint.parent
    return checkpoint


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_bytes()) if path.is_file() else {}


def _write_curve(run: Path, folder: Path) -> None:
    from training.reporting.plot import draw_figure, read_curves, render_images

    curves = read_curves(run)
    (folder / _CURVE).write_bytes(render_images(draw_figure(curves, title="Loss"))[_CURVE])


def _data_card(options: Mapping[str, Any]) -> bytes | None:
    """Return the card that gristmill card wrote next to the tokens that the run read last; None if there is none."""
    starts = options.get("starts") or [{}]
    for folder in starts[-1].get("data", {}).get("train", []):
        path = Path(folder).parent / CARD
        if is_file(path):
            return read_file(path)
    return None


def _card(folder: Path, name: str, said: str, summary: Mapping[str, Any], scores: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the card, which begins as the Hub reads it."""
    yield "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- gristmill\n---\n"
    yield f"# {name.partition('/')[2]}\n"
    yield f"A {said.partition(',')[0]}, trained with Gristmill and exported for transformers.\n"
    if summary:
        yield "## Evaluation\n\n| | loss | bits per byte |\n|---|---|---|"
        rows = {"holdout": {"loss": summary.get("holdout_loss"), "bits_per_byte": summary.get("bits_per_byte")}}
        rows |= summary.get("sources") or {}
        for source, values in rows.items():
            yield f"| {source} | {_number(values.get('loss'))} | {_number(values.get('bits_per_byte'))} |"
        yield f"\nAfter {count_of(int(summary.get('steps') or 0), 'step')}; a unigram model has a loss of "
        yield f"{_number(summary.get('unigram_loss'))}.\n"
    if scores:
        yield "## Tasks\n\n| task | metric | score | items |\n|---|---|---|---|"
        for task, metrics in scores.items():
            for metric, value in metrics.items():
                if metric != "items":
                    yield f"| {task} | {metric} | {_number(value)} | {metrics['items']} |"
        yield ""
    if (folder / _CURVE).is_file():
        yield f"![Loss]({_CURVE})\n"
    if (folder / _DATA_CARD).is_file():
        yield f"## Data\n\nWhat the text is, and what was removed from it: [{_DATA_CARD}]({_DATA_CARD}).\n"


def _options_lines(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options of the run that say what the model is and how it was trained."""
    shown = {key: value for key, value in options.items() if key.startswith(_OPTIONS)}
    if shown:
        yield f"## Options\n\n```json\n{json.dumps(shown, indent=2)}\n```"


def _number(value: Any) -> str:
    if isinstance(value, int | float):
        return f"{value:.4f}"
    return "–"


def model_name(target: str) -> str:
    """Return ORG/NAME of hf://ORG/NAME, or nothing for another target.

    >>> model_name("hf://org/name"), model_name("hf:/org/name"), model_name("hf://datasets/org/name")
    ('org/name', 'org/name', '')
    """
    scheme, _, rest = target.partition(":")
    name = rest.strip("/")
    if scheme == "hf" and name.count("/") == 1 and not name.startswith("datasets/") and "@" not in name:
        return name
    return ""


def require_checkpoint(path: Path) -> None:
    """Raise UsageError for a path that is plainly no checkpoint."""
    require(
        path.is_dir(), f"{path}: expected a checkpoint, or the --out_dir of a training run, but there is no such folder"
    )
