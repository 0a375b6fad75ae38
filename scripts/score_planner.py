"""Score the planner: fit its constants on measured steps, and print its error on rows that were held out.

    python scripts/score_planner.py DATA_FOLDER [--folds 5] [--write]

DATA_FOLDER has the three files that scripts/planner_rows.py names. Prints the mean absolute percentage error by file
and by model size, for rows that were fitted to and for rows that were not (in five random folds, and one model size at
a time), the rank correlation within a model's layouts, the noise of measured rows, constant efficiency beside it, and
the runs that were out of memory. --write writes the constants, fitted to all rows, to
gristmill_planner/fitted_constants.toml.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, median

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from rich.table import Table
from scipy.optimize import least_squares
from tyro.conf import Positional

from gristmill.command import command
from gristmill_planner.compute_time import model_flops
from gristmill_planner.fitted_constants import Constants
from gristmill_planner.run_memory import megatron_memory
from gristmill_planner.step_time import step_time
from scripts.planner_noise import print_noise, rank_correlation
from scripts.planner_rows import BLOOM, MULTI_NODE, SINGLE_NODE, MeasuredRow, read_rows

PUBLISHED = {MULTI_NODE: "14.7 %", SINGLE_NODE: "8.4 %", BLOOM: ""}  # vTrain's own (Bang et al. 2024, section 4)
_PRIOR = 0.6  # weight of a factor of _SPREAD between a constant and its typical value
_SPREAD = {
    name: math.log(1.2 if name in ("product_share", "traffic_share", "link_share", "network_share") else 2)
    for name in asdict(Constants())
}
_WEIGHTS = {MULTI_NODE: 2.5, SINGLE_NODE: 1.0, BLOOM: 0.7}  # there are few rows of many nodes; BLOOM's are noisy
_TYPICAL = Constants()
_FAR = 0.1  # share by which a row is away from what neighbouring layouts let expect


def score_planner(data_folder: Positional[Path], folds: int = 5, write: bool = False) -> Table:
    """Print the planner's error on the measured steps in `data_folder`.

    Args:
        data_folder: Folder of the three files of measured runs.
        folds: Parts of the rows, each predicted from a fit to the others.
        write: Write the constants, fitted to all rows, into the project.
    """
    rows = read_rows(data_folder)
    timed = [row for row in rows if row.seconds is not None]
    constants = fit(timed)
    print(f"constants: {constants}")
    print_memory(rows)
    if write:
        target = Path(__file__).resolve().parents[1] / "gristmill_planner/fitted_constants.toml"
        lines = [f"{name} = {value:.4g}\n" for name, value in asdict(constants).items()]
        target.write_text("# Written by scripts/score_planner.py --write\n" + "".join(lines), encoding="utf-8")
    order = np.random.default_rng(1).permutation(len(timed))
    fold = {id(timed[at]): n % folds for n, at in enumerate(order)}
    held_out = predict_held_out(timed, lambda row: fold[id(row)])
    by_size = predict_held_out(timed, lambda row: (row.file, row.run.model.width))
    print_sizes(timed, held_out)
    print_bound(timed, held_out)
    print_noise([row for row in timed if row.file == MULTI_NODE], held_out)
    return error_table(timed, {"fitted": predictions(timed, constants), "held out": held_out, "other sizes": by_size})


def fit(rows: Sequence[MeasuredRow]) -> Constants:
    """The constants with the least robust squares of log(predicted / measured), near the typical ones.

    No share is above 1.
    """
    names = list(asdict(_TYPICAL))

    def constants(x: np.ndarray) -> Constants:
        typical = asdict(_TYPICAL)
        return replace(_TYPICAL, **{name: typical[name] * math.exp(v) for name, v in zip(names, x, strict=True)})

    def residuals(x: np.ndarray) -> np.ndarray:
        at = constants(x)
        errors = [_WEIGHTS[row.file] * math.log(step_time(row.run, at).total / row.seconds) for row in rows]
        return np.concatenate([errors, _PRIOR * x / np.array([_SPREAD[name] for name in names])])

    most = [-math.log(getattr(_TYPICAL, name)) if name.endswith("_share") else math.inf for name in names]
    start, options = np.zeros(len(names)), {"loss": "soft_l1", "f_scale": 0.05, "diff_step": 1e-4, "max_nfev": 25}
    found = least_squares(residuals, start, bounds=(-math.inf, most), **options)  # type: ignore[arg-type]
    return constants(found.x)


def predictions(rows: Iterable[MeasuredRow], constants: Constants) -> dict[int, float]:
    """Seconds of each row, by its id."""
    return {id(row): step_time(row.run, constants).total for row in rows}


def predict_held_out(rows: Sequence[MeasuredRow], group: Callable[[MeasuredRow], object]) -> dict[int, float]:
    """Seconds of each row, predicted from a fit to the rows of all other groups."""
    found: dict[int, float] = {}
    for each in {group(row) for row in rows}:
        constants = fit([row for row in rows if group(row) != each])
        found |= predictions([row for row in rows if group(row) == each], constants)
    return found


def constant_efficiency(rows: Sequence[MeasuredRow]) -> dict[int, float]:
    """Seconds of each row by one efficiency per file and the bubble of equal stages."""
    ideal = {id(row): _ideal_seconds(row) for row in rows}
    share = {
        file: median(ideal[id(row)] / row.seconds for row in rows if row.file == file)
        for file in {row.file for row in rows}
    }
    return {id(row): ideal[id(row)] / share[row.file] for row in rows}


def _ideal_seconds(row: MeasuredRow) -> float:
    run, layout = row.run, row.run.layout
    flops = model_flops(run.model, run.batch, run.seq_len, run.recompute)
    bubble = 1 + (layout.pp - 1) / layout.micro_batches
    return flops / (run.cluster.devices * run.cluster.device.flops) * bubble


def mean_error(rows: Iterable[MeasuredRow], predicted: dict[int, float]) -> float:
    """Mean absolute percentage error."""
    return 100 * fmean(abs(predicted[id(row)] / row.seconds - 1) for row in rows)


def error_table(rows: Sequence[MeasuredRow], predicted: dict[str, dict[int, float]]) -> Table:
    """Errors by file."""
    title = "mean absolute percentage error of step time"
    table = Table("file", "rows", *predicted, "Spearman", "constant efficiency", "vTrain", title=title, box=None)
    constant = constant_efficiency(rows)
    for file in (MULTI_NODE, SINGLE_NODE, BLOOM):
        of_file = [row for row in rows if row.file == file]
        errors = [f"{mean_error(of_file, each):.1f} %" for each in predicted.values()]
        rank, groups = rank_correlation(of_file, predicted["held out"])
        ranks = f"{rank:.3f} ({groups} models)"
        table.add_row(
            file, str(len(of_file)), *errors, ranks, f"{mean_error(of_file, constant):.1f} %", PUBLISHED[file]
        )
    return table


def print_sizes(rows: Sequence[MeasuredRow], held_out: dict[int, float]) -> None:
    """Print held-out errors by file and model size."""
    groups = defaultdict(list)
    for row in rows:
        groups[row.file, row.run.model.width].append(row)
    for (file, width), group in sorted(groups.items()):
        rank, _ = rank_correlation(group, held_out)
        print(f"{file} width {width}: {len(group)} rows, {mean_error(group, held_out):.1f} %, Spearman {rank:.3f}")


def print_bound(rows: Sequence[MeasuredRow], held_out: dict[int, float]) -> None:
    """Print the rank correlation of an oracle: it knows the seconds of all rows but of those that are predicted badly.

    Where those rows are noise, as in layouts that differ in the micro-batch alone and are slower in no order, no model
    of the layout does better.
    """
    known = {id(row): _known(row, held_out[id(row)]) for row in rows}
    for file in (MULTI_NODE, SINGLE_NODE, BLOOM):
        of_file = [row for row in rows if row.file == file]
        far = [row for row in of_file if known[id(row)] != row.seconds]
        oracle, _ = rank_correlation(of_file, known)
        near = [row for row in of_file if known[id(row)] == row.seconds]
        without, _ = rank_correlation(near, held_out)
        print(
            f"{file}: {len(far)} rows are more than {100 * _FAR:.0f} % away; an oracle for all others has Spearman "
            f"{oracle:.3f}; on the others the model has {without:.3f} and {mean_error(near, held_out):.1f} %"
        )
        for row in far if file == MULTI_NODE else ():
            layout = row.run.layout
            shape = f"tp {layout.tp}, pp {layout.pp}, dp {layout.dp}, micro-batch {row.run.micro_batch}"
            print(f"  line {row.line}, {row.size}, {shape}: {row.seconds:.2f} s, predicted {held_out[id(row)]:.2f} s")


def _known(row: MeasuredRow, predicted: float) -> float:
    assert row.seconds is not None
    return row.seconds if abs(predicted / row.seconds - 1) <= _FAR else predicted


def print_memory(rows: Sequence[MeasuredRow]) -> None:
    """Print how well memory is predicted, and each run that was, or was predicted to be, out of it."""
    errors = []
    for row in (row for row in rows if row.memory is not None):
        predicted = megatron_memory(row.run).total / (1 << 30)
        out = predicted > row.run.cluster.device.memory / (1 << 30)
        if math.isfinite(row.memory or 0.0):
            errors.append(abs(predicted / row.memory - 1))
        if math.isinf(row.memory or 0.0) or out:
            measured = "out of memory" if math.isinf(row.memory or 0.0) else f"{row.memory} GiB"
            print(f"{row.file}, line {row.line}: predicted {predicted:.0f} GiB, measured {measured}")
    print(f"memory: mean absolute percentage error {100 * fmean(errors):.1f} % of {len(errors)} rows")


if __name__ == "__main__":
    command(score_planner)
