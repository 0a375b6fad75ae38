"""Recordings of a training run's tensors, and where two runs first differ. Needs torch and numpy, and none of ours.

    layout = RankLayout(axes={"dp": (rank, 2)}, activations={"dp": Shard(0)})
    with record(model, "recordings/dp2", optimizer=optimizer, layout=layout):
        ...                                                # on every rank: a few steps, as you train
    for run in reference_runs("recordings/reference", "bf16"):
        with record(model, run.folder, optimizer=optimizer, perturb=run.perturb):
            ...                                            # in one process: the same steps, from the same weights
    print(compare("recordings/reference", "recordings/dp2"))

Read in this order:

    placement.py    the piece of a tensor that a rank has: sharded, replicated, or a term of a sum
    options.py      RankLayout: how ranks divide tensors; RecordOptions: what is recorded
    recorder.py     record(): hooks on a model's modules, parameters and optimizer
    perturb.py      noise of the size of a precision's rounding, for the tolerance of each tensor
    sketch.py       what is kept of every tensor: a hash, and a linear sketch that pieces add up to
    files.py        a rank's recording on disk, and the recordings of all ranks
    assemble.py     pieces put together, and compared with the reference's tensor
    reference.py    the reference's tensors, and the tolerance of each
    compare.py      compare(): tensors in order of computation, the first outside its tolerance
    evidence.py     a wrong tensor and what is expected of it, as patterns look at them
    patterns.py     what the difference looks like: a factor, a missing term, shifted, transposed, stale, noise
    moved.py, scaled_rows.py    two of them
    verdict.py      what was found, in two to five sentences

docs/guides/find-a-wrong-gradient.md begins with an example.
"""

from gristmill_parity.recording.compare import compare
from gristmill_parity.recording.files import RecordingError
from gristmill_parity.recording.options import RankLayout, RecordOptions
from gristmill_parity.recording.perturb import Perturb, reference_runs
from gristmill_parity.recording.placement import Box, Partial, Replicate, Shard
from gristmill_parity.recording.recorder import Recorder, record
from gristmill_parity.recording.verdict import Verdict

__all__ = [
    "Box",
    "Partial",
    "Perturb",
    "RankLayout",
    "RecordOptions",
    "Recorder",
    "RecordingError",
    "Replicate",
    "Shard",
    "Verdict",
    "compare",
    "record",
    "reference_runs",
]
