"""Dry run: one rank's modules and a step of them on the meta device, by the trainer's own code."""

from dataclasses import dataclass, replace

import torch
from torch.distributed.tensor import DTensor

from gristmill.errors import require
from gristmill_planner.cost.planned_run import PlannedRun
from gristmill_planner.dry_run.fake_world import FakeCollectives, StepOnMeta, fake_world
from gristmill_planner.memory import LOGIT_CHUNK_BYTES
from training.config import Precision
from training.memory.memory_config import MemoryConfig
from training.model.batch import Batch
from training.model.decoder import meta_decoder
from training.optim.build_optimizer import build_optimizer
from training.optim.optim_config import OptimConfig
from training.parallel.parallel_model import ParallelModel
from training.parallel.parallelize import parallelize
from training.parallel.traffic import expected_traffic
from training.parallel.traffic_counter import traffic_inputs
from training.parallel.traffic_inputs import Traffic

_ANY_DECAY = 0.999  # an average takes as much memory with any


@dataclass(frozen=True)
class DryRun:
    """What a rank holds, as it was built, and what it sends in a step, as it was run and by the formulas."""

    rank: int
    place: dict[str, tuple[int, int]]
    """Index of the rank, and number of ranks, by axis of the mesh."""
    layers: dict[int, range]
    """Of each of its pipeline stages."""
    parameters: int
    """That its modules compute with, before ZeRO-3 shards them; of two tied copies on one rank one."""
    built: dict[str, int]
    """Bytes of weights, of float32 masters, and of the optimizer's moments with an average of the weights."""
    sent: Traffic
    expected_sent: Traffic

    @property
    def agrees(self) -> bool:
        """True if the formulas of traffic are right to the byte."""
        return self.sent == self.expected_sent


def try_rank(run: PlannedRun, rank: int, precision: Precision = "bf16") -> DryRun:
    """Build rank `rank` of `run`, and run one step of it, without memory and without the other ranks.

    The step is that of the trainer but for the update, with what Muon gathers for it, and the sum of loss and gradient
    norm over all ranks. Raises UsageError for a rank that there is not, a layout that the trainer refuses, or moments
    that are not on the device.
    """
    layout, devices = run.layout, run.cluster.devices
    require(0 <= rank < devices, f"--rank is {rank}; wanted 0 to {devices - 1}, as {devices} GPUs have")
    layout.check(devices, run.model, run.seq_len)
    states, memory = run.states, MemoryConfig(run.recompute)
    require(
        states.moments == "device",
        f"--dry_run with memory.optimizer {states.moments}: a dry run builds the optimizer's states on the device "
        "alone; try memory.optimizer device, or no --dry_run",
    )
    optim = OptimConfig(name=states.name, ema_decay=_ANY_DECAY if states.ema else 0.0)
    with fake_world(layout, rank) as world:
        with FakeCollectives():
            model = parallelize(meta_decoder(run.model), layout, world, 1, precision, memory, seq_len=run.seq_len)
            optimizer = build_optimizer(model.params, optim, memory)
        sequences = run.batch // layout.dp
        if model.pipeline is not None:
            # torch keeps the state of the random numbers of a stage's device, and the meta device has none
            model.pipeline.device = torch.device("cpu")
            model.pipeline.fix_shapes(sequences // layout.micro_batches, run.seq_len)
            if torch.__version__ < "2.13":  # whose first step also connects a stage with its neighbours
                with StepOnMeta(world):
                    _step(model, sequences, run.seq_len)
        with StepOnMeta(world) as traffic:
            _step(model, sequences, run.seq_len)
        inputs = traffic_inputs(model, sequences, run.seq_len, precision, run.recompute)
        inputs = replace(inputs, chunk_bytes=LOGIT_CHUNK_BYTES["cuda"])
        moments = [values for states in optimizer.moments().values() for values in states.values()]
        place = {name: (axis.rank, axis.size) for name, axis in world.axes.items()}
        return DryRun(
            rank,
            place,
            {stage: inputs.stage_layers[stage] for stage in inputs.stages},
            _parameters(model),
            {**_weights(model), "moments": _storage_bytes(moments)},
            traffic.traffic,
            expected_traffic(inputs),
        )


def _step(model: ParallelModel, sequences: int, seq_len: int) -> None:
    tokens, samples = (torch.empty(shape, dtype=torch.int64) for shape in ((sequences, seq_len), (sequences,)))
    model.forward_backward(Batch(tokens, tokens, samples), 1.0)
    model.all_gather_params()


def _parameters(model: ParallelModel) -> int:
    """Elements of the modules' parameters; FSDP's are DTensors, which have the shapes of the whole."""
    found = {id(param.module_param): param.module_param.numel() for param in model.params}
    return sum(found.values())


def _weights(model: ParallelModel) -> dict[str, int]:
    """Bytes of the modules' parameters, and of those that the optimizer updates, where they are others."""
    modules = [p for part in model.parts for p in part.parameters() if not isinstance(p, DTensor)]
    own = {p.untyped_storage()._cdata for p in modules}
    masters = [p.local for p in model.params if p.local.untyped_storage()._cdata not in own]
    return {"weights": _storage_bytes(modules), "master": sum({id(p): p.nbytes for p in masters}.values())}


def _storage_bytes(tensors: list[torch.Tensor] | list[torch.nn.Parameter]) -> int:
    """Bytes of the memory that the tensors are in, each counted once; on the meta device memory has no address."""
    storages = [t.untyped_storage() for t in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())
