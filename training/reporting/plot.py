"""Draw a run's loss curve, in the terminal and as loss.svg: `python -m training.reporting.plot RUN_DIR`."""

from collections.abc import Sequence
from pathlib import Path

from tyro.conf import Positional

from gristmill.errors import UsageError
from gristmill.io.files import atomic_write_bytes
from training.reporting.metrics import METRICS, read_metrics

Curve = list[tuple[int, float]]  # steps done and loss, nats a token
_WIDTH, _HEIGHT, _MARGIN = 720, 400, 48  # of the drawing, in pixels
_COLOURS = {"train": "#9aa7b5", "holdout": "#b5532a", "unigram": "#4c7a4c"}
_SIGNS = {"train": "·", "holdout": "o", "unigram": "-"}


def plot(run_dir: Positional[Path]) -> Path:
    """Print the curves of `run_dir`/metrics.jsonl and write them to `run_dir`/loss.svg, whose path is returned.

    Raises UsageError where no step was recorded.
    """
    curves = read_curves(run_dir)
    print(drawing(curves))
    path = run_dir / "loss.svg"
    atomic_write_bytes(path, svg(curves).encode())
    return path


def read_curves(run_dir: Path) -> dict[str, Curve]:
    """Loss by step: of the training batches, of the holdout, and of the unigram model as a level line."""
    records = list(read_metrics(run_dir / METRICS))
    train = [(r["step"], r["loss"]) for r in records if r["kind"] == "step"]
    if not train:
        raise UsageError(f"{run_dir / METRICS} records no step; give the --out_dir of a training run")
    curves = {"train": train, "holdout": [(r["step"], r["loss"]) for r in records if r["kind"] == "eval"]}
    unigram = [r["unigram_loss"] for r in records if r["kind"] == "run"][-1:]
    curves["unigram"] = [(step, loss) for loss in unigram for step in (train[0][0], train[-1][0])]
    return {name: curve for name, curve in curves.items() if curve}


def svg(curves: dict[str, Curve]) -> str:
    """The curves as a small SVG document."""
    points = [point for curve in curves.values() for point in curve]
    (first, last), (low, high) = (_extent([p[i] for p in points]) for i in (0, 1))

    def x(step: float) -> float:
        return _MARGIN + (step - first) / (last - first) * (_WIDTH - 2 * _MARGIN)

    def y(loss: float) -> float:
        return _HEIGHT - _MARGIN - (loss - low) / (high - low) * (_HEIGHT - 2 * _MARGIN)

    def text(left: float, top: float, words: str, colour: str = "#444") -> str:
        return f'<text x="{left:.0f}" y="{top:.0f}" fill="{colour}">{words}</text>'

    marks = [text(6, y(loss) + 4, f"{loss:.2f}") for loss in _ticks(low, high)]
    marks += [text(x(step) - 8, _HEIGHT - _MARGIN + 20, f"{step:.0f}") for step in _ticks(first, last)]
    marks.append(text(_WIDTH / 2 - 12, _HEIGHT - 8, "step"))
    for row, (name, curve) in enumerate(curves.items()):
        line = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in curve)
        marks.append(f'<polyline points="{line}" fill="none" stroke="{_COLOURS[name]}" stroke-width="1.5"/>')
        marks.append(text(_WIDTH - _MARGIN - 130, _MARGIN + 18 * row, f"{name} {curve[-1][1]:.3f}", _COLOURS[name]))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}" '
        'font-family="sans-serif" font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(marks)
        + "\n</svg>\n"
    )


def _extent(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low, low + 1)


def _ticks(low: float, high: float) -> list[float]:
    return [low + (high - low) * i / 4 for i in range(5)]


def drawing(curves: dict[str, Curve], width: int = 72, height: int = 18) -> str:
    """The curves as lines of text, `width` x `height` characters without the axes."""
    points = [point for curve in curves.values() for point in curve]
    (first, last), (low, high) = (_extent([p[i] for p in points]) for i in (0, 1))
    grid = [[" "] * width for _ in range(height)]
    for name, curve in sorted(curves.items(), key=lambda item: -len(item[1])):
        level = name == "unigram"
        for step, loss in [(first + i * (last - first) / width, curve[0][1]) for i in range(width)] if level else curve:
            column, row = (step - first) / (last - first), (high - loss) / (high - low)
            grid[round(row * (height - 1))][round(column * (width - 1))] = _SIGNS[name]
    labels = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
    lines = [f"{labels.get(i, ''):>7} │{''.join(row)}" for i, row in enumerate(grid)]
    legend = "   ".join(f"{_SIGNS[name]} {name} {curve[-1][1]:.3f}" for name, curve in curves.items())
    foot = f"{first:<{width // 2}.0f}{last:>{width // 2}.0f}"
    return "\n".join([*lines, " " * 8 + "└" + "─" * width, " " * 9 + foot, " " * 9 + legend])
