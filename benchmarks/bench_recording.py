"""Benchmark: what a recording costs: CPU time of a step with and without it, and bytes of its sketches.

    python benchmarks/bench_recording.py --width 256 --seq_len 128

Trains a Llama of two layers on random tokens: one copy plainly, one with sketches recorded, one with values kept. Their
steps alternate, so that all meet the same disturbances. Activations are the inputs and outputs of modules and their
gradients; the list of a recording (hashes, sketches, placements) is what it keeps of them and of all else.
"""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import torch
import tyro

from benchmarks.dedup_tables import markdown
from gristmill.command import run_with_exit_code
from gristmill_parity.recording import RecordOptions, record
from gristmill_parity.recording.files import RankRecording, Recording
from gristmill_parity.recording.recorder import ACTIVATIONS
from training.model.decoder import Decoder
from training.model.model_config import ModelConfig

_KEPT = {"sketches": "nothing", "values kept": "all"}
_FIRST = 3
"""Steps that are not counted: the optimizer makes its moments, caches fill."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of a recording."""

    activations: int
    """What the tensors that pass between modules have in memory, of all steps."""
    tensors: int
    """The same of all that was recorded: also weights, gradients of weights, moments."""
    sketches: int
    """The list of tensors on disk."""

    @property
    def share(self) -> float:
        return self.sketches / self.activations


def bench_recording(
    layers: int = 2,
    width: int = 256,
    heads: int = 4,
    vocab_size: int = 1024,
    batch_size: int = 2,
    seq_len: int = 128,
    steps: int = 20,
    threads: int = 1,
    device: str = "cpu",
) -> str:
    """Time steps without and with recording, and return a table.

    Args:
        layers: Blocks of the model.
        width: Width of its residual stream.
        heads: Attention heads.
        vocab_size: Size of its vocabulary.
        batch_size: Sequences per step.
        seq_len: Tokens per sequence.
        steps: Steps of each kind that are timed.
        threads: Threads of torch.
        device: Where the model is.
    """
    torch.set_num_threads(threads)
    model = ModelConfig(preset="llama", layers=layers, width=width, heads=heads).resolve(vocab_size, seq_len)
    ids = torch.randint(vocab_size, (batch_size, seq_len + 1), generator=torch.Generator().manual_seed(0)).to(device)
    times = {"plain": list[float](), **{name: list[float]() for name in _KEPT}}
    with TemporaryDirectory() as folder:
        with ExitStack() as stack:
            run_steps = {"plain": _trainer(model, ids, None, None, stack)}
            for name, keep in _KEPT.items():
                run_steps[name] = _trainer(model, ids, Path(folder) / name, keep, stack)
            for number in range(_FIRST + steps):
                for name, run_step in run_steps.items():
                    seconds = _cpu_seconds(run_step, ids.device)
                    if number >= _FIRST:
                        times[name].append(seconds)
        sizes = measured_sizes(Recording(Path(folder) / "sketches"))
    plain = median(times["plain"])
    rows = [[name, f"{1000 * median(each):.1f}", f"{median(each) / plain:.2f}"] for name, each in times.items()]
    return markdown(
        "A recorded step",
        ["step", "CPU ms", "of a plain step"],
        rows,
        [
            f"Activations {sizes.activations / 1e6:.1f} MB, all tensors {sizes.tensors / 1e6:.1f} MB; the list of "
            f"hashes and sketches {sizes.sketches / 1e6:.3f} MB: {sizes.share:.2%} of the activations."
        ],
    )


def _trainer(
    config: object, ids: torch.Tensor, folder: Path | None, keep: str | None, stack: ExitStack
) -> Callable[[], None]:
    """Return a function that trains a model of its own for a step."""
    torch.manual_seed(0)
    model = Decoder(config).to(ids.device)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    if folder is not None:
        stack.enter_context(record(model, folder, optimizer=optimizer, options=RecordOptions(keep=keep)))  # type: ignore[arg-type]
    inputs = ids[:, :-1].contiguous()
    targets = ids[:, 1:].contiguous()

    def run_step() -> None:
        optimizer.zero_grad()
        loss = model(inputs, targets).sum() / targets.numel()
        loss.backward()
        optimizer.step()

    return run_step


def _cpu_seconds(action: Callable[[], None], device: torch.device) -> float:
    """Return the CPU seconds of this process in `action`, of all threads; on a GPU the seconds that pass."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    start = clock()
    action()
    if device.type != "cpu":
        torch.cuda.synchronize(device)
    return clock() - start


def measured_sizes(recording: Recording) -> Sizes:
    """Return the bytes of a recording of one rank."""
    (rank,) = recording.ranks
    tensors = [(entry.key.kind, _bytes_of(entry.dtype, entry.shape)) for entry in rank.entries]
    activations = sum(size for kind, size in tensors if kind.startswith(ACTIVATIONS))
    return Sizes(activations, sum(size for _, size in tensors), _list_bytes(rank))


def _list_bytes(rank: RankRecording) -> int:
    return sum(path.stat().st_size for path in rank.folder.glob("rank-*.json"))


def _bytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    return torch.empty(shape, dtype=getattr(torch, dtype), device="meta").nbytes


if __name__ == "__main__":
    sys.exit(run_with_exit_code(lambda: print(tyro.cli(bench_recording))))
