"""The section of a report on how a sparse model's tokens fell on its experts: over time, and by layer and expert."""

from collections.abc import Sequence
from typing import Any

from gristmill_cli.report.page import Number, figure, grid, said, section, table
from gristmill_cli.report.pictures import draw_curves, draw_heat
from gristmill_cli.report.training_records import TrainingRun
from training.reporting.metrics_file import finite

_LAYERS = 8  # drawn
_MEASURES = {
    "max_load": "largest load", "min_load": "smallest load", "entropy": "entropy of the loads", "dropped": "dropped",
}  # fmt: skip


def show_experts(runs: Sequence[TrainingRun]) -> str:
    """Curves of each measure, the numbers of the last report, and a picture of all experts' loads."""
    parts = list[str]()
    for run in runs:
        records = [record for record in run.records if record["kind"] == "experts"]
        if not records:
            continue
        kinds = [kind for kind in _MEASURES if isinstance(records[-1].get(kind), dict)]
        layers = list(records[-1].get("max_load") or {})
        drawn = layers[:: -(-len(layers) // _LAYERS)] if layers else []
        pictures = [
            figure(f"{run.name} {_MEASURES[kind]}".strip(), draw_curves(_curves(records, kind, drawn), "step", ""),
                   table(["", "first", "last"], [_ends(run, records, kind, layer) for layer in layers]))
            for kind in kinds
        ]  # fmt: skip
        maps = [record for record in records if isinstance(record.get("loads"), dict)]
        heat = ""
        if maps:
            loads = maps[-1]["loads"]
            most = max(map(max, loads.values()))
            title = f"{run.name} loads by layer and expert at step {maps[-1]['step']:,}, from 0 (white) to {most:.2f}"
            picture = draw_heat(list(loads), list(loads.values()), most, "layer", "expert")
            heat = figure(title.strip(), picture, "", wide=True)
        parts.append(grid(*pictures) + heat)
    note = said(
        "Loads are tokens of an expert over the mean of its layer's experts since the report before; entropy is over "
        "that of equal loads.", "soft",
    )  # fmt: skip
    return section("Experts", note, *parts) if parts else ""


def _curves(records: Sequence[dict[str, Any]], kind: str, layers: Sequence[str]) -> dict[str, list[tuple[int, float]]]:
    return {
        f"layer {layer}": [
            (record["step"], value)
            for record in records
            if (value := finite(record.get(kind, {}).get(layer))) is not None
        ]
        for layer in layers
    }


def _ends(run: TrainingRun, records: Sequence[dict[str, Any]], kind: str, layer: str) -> list[str | Number]:
    """The layer, and what its first and last record say."""
    found = [record for record in (records[0], records[-1]) if finite(record.get(kind, {}).get(layer)) is not None]
    return [
        f"layer {layer}",
        *(
            Number(record[kind][layer], f"{record[kind][layer]:.3f}", run.where("experts", record["step"], kind, layer))
            for record in found
        ),
    ]
