"""Mixed precision: what is in 16 bits (copies of weights, activations, traffic), what is not, and what is kept."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import training.parallel.data.grad_reducer
from gristmill.errors import UsageError
from training.config import TrainConfig
from training.experimental.parallel_config import ParallelConfig
from training.model.batch import TokenBatch
from training.model.decoder import meta_decoder
from training.model.model_config import ModelConfig
from training.parallel.mesh import build_world
from training.parallel.parallel_model import ParallelModel
from training.parallel.parallelize import parallelize
from training.parallel.traffic_counter import TrafficCounter
from training.parallel.traffic_inputs import Traffic

RunRanks = Callable[..., list[Any]]
VOCABULARY, TOKENS = 32, 8


def build(
    layout: ParallelConfig, precision: str, preset: Any = "llama", layers: int = 4, width: int = 32
) -> ParallelModel:
    config = ModelConfig(preset=preset, layers=layers, width=width, heads=4, init_std=0.1).resolve(VOCABULARY, TOKENS)
    layout = layout.resolve(dist.get_world_size(), config, TOKENS)
    return parallelize(meta_decoder(config), layout, build_world(layout, torch.device("cpu")), 1, precision)


def batch(model: ParallelModel, sequences: int = 4) -> TokenBatch:
    """This replica's of some sequences."""
    tokens = torch.randint(VOCABULARY, (sequences, TOKENS + 1), generator=torch.Generator().manual_seed(1))
    mine = slice(model.world.dp_rank, None, model.world.dp_size)
    return TokenBatch(tokens[mine, :-1], tokens[mine, 1:], torch.arange(sequences)[mine])


def step(model: ParallelModel, sequences: int = 4) -> None:
    """Compute gradients, and publish parameters that have not changed."""
    model.forward_backward(batch(model, sequences), 1 / (4 * TOKENS))
    model.all_gather_params()
    drop_gradients(model)


def drop_gradients(model: ParallelModel) -> None:
    for param in model.params:
        param.local.grad = param.module_param.grad = None


TRAFFIC = {
    "ddp": ParallelConfig(),
    "zero1": ParallelConfig(zero=1, micro_batches=2),
    "zero2": ParallelConfig(zero=2, micro_batches=2),
    "zero3": ParallelConfig(zero=3, micro_batches=2),
    "tensor": ParallelConfig(tp=2),
    "sequence": ParallelConfig(tp=2, sequence_parallel=True),
    "pipeline": ParallelConfig(pp=2),
}


def traffic(precision: str, reduce_bf16: bool) -> dict[str, Traffic]:
    found = {}
    for name, layout in TRAFFIC.items():
        model = build(replace(layout, reduce_bf16=reduce_bf16), precision)
        step(model)  # torch's pipelines send shapes in the first step
        with TrafficCounter(model.world) as counter:
            step(model)
        found[name] = counter.traffic
    return found


@pytest.mark.thorough
def test_activations_and_parameters_travel_in_16_bits_and_gradients_in_32(run_ranks: RunRanks) -> None:
    (wide, _), (low, _), (lowest, _) = (
        run_ranks(2, traffic, *each) for each in (("fp32", False), ("bf16", False), ("bf16", True))
    )
    logits = 3 * 4 * TOKENS * 4  # of the loss: three float32 numbers per token
    for name, volumes in wide.items():
        assert volumes.keys() == low[name].keys() == lowest[name].keys()
        for key, volume in volumes.items():
            axis, operation = key
            assert volume.calls == low[name][key].calls
            found = [volume.bytes, low[name][key].bytes, lowest[name][key].bytes]
            if name == "tensor":
                found = [size - logits for size in found]
            gradients = operation in ("reduce-scatter", "all-reduce") and axis != "tp"
            if name == "sequence" and operation == "all-reduce":  # of the loss and of the norms' gradients
                assert found[0] == found[1] == found[2]
            else:
                assert found == [found[0], found[0] // (1 if gradients else 2), found[0] // 2], (name, key)
    assert set(low["zero3"]) == {("shard", "all-gather"), ("shard", "reduce-scatter")}


def activation_dtypes(preset: str, layout: ParallelConfig) -> set[str]:
    """The kinds and dtypes of what goes into and comes out of norms, blocks and their projections."""
    model, seen = build(layout, "bf16", preset), set[str]()

    def look(module: torch.nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        kind = type(module).__name__
        seen.update(
            f"{kind} {t.dtype}" for t in (*arguments, output) if isinstance(t, Tensor) and t.is_floating_point()
        )
        if kind.endswith("Block") and arguments[1] is not None:
            seen.update(f"angles {t.dtype}" for t in arguments[1])

    for part in model.parts:
        for module in part.modules():
            if type(module).__name__.endswith(("Norm", "Block", "Linear")):
                module.register_forward_hook(look)
    step(model)
    return seen


@pytest.mark.parametrize("layout", [ParallelConfig(zero=3), ParallelConfig(tp=2, sequence_parallel=True)])
def test_the_residual_stream_is_16_bits_and_angles_are_float32(run_ranks: RunRanks, layout: ParallelConfig) -> None:
    for preset, norm in (("llama", "RMSNorm"), ("gpt2", "LayerNorm")):
        for seen in run_ranks(2, activation_dtypes, preset, layout):
            seen = {kind.removeprefix("FSDP") for kind in seen}
            assert {f"{norm} torch.bfloat16", "Block torch.bfloat16", "Linear torch.bfloat16"} <= seen
            others = {kind for kind in seen if "bfloat16" not in kind}
            assert others == ({"angles torch.float32"} if preset == "llama" else set())


def kept_bytes(precision: str, layers: int) -> tuple[int, int]:
    """Bytes of what a forward pass keeps for the backward pass, and elements of the whole model; with ZeRO-3."""
    model = build(ParallelConfig(zero=3), precision, layers=layers, width=64)
    saved: dict[int, torch.UntypedStorage] = {}

    def keep(t: Tensor) -> Tensor:
        saved[t.untyped_storage()._cdata] = t.untyped_storage()
        return t

    some = batch(model)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        loss = model.parts[0](some.ids[:1], some.targets[:1], some.sample_ids[:1])
        kept = sum(storage.nbytes() for storage in saved.values())
    loss.sum().backward()
    return kept, sum(p.numel() for p in model.parts[0].parameters())


def test_zero_3_keeps_no_replica_of_the_weights(run_ranks: RunRanks) -> None:
    """A second forward pass would gather what the first one freed."""
    (kept, size), _ = run_ranks(2, kept_bytes, "bf16", 8)
    (few, small), _ = run_ranks(2, kept_bytes, "bf16", 4)
    activations = 8 * TOKENS * 64 * 2 * 32  # 32 vectors of the width per token and layer, generously
    assert kept < 0.2 * 2 * size and kept - few < activations and size > 1.9 * small


class Held(TorchDispatchMode):
    """Counts the bytes of operations' results that are alive, other than those of given tensors."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.known, self.made = {t.untyped_storage()._cdata for t in known}, dict[int, StorageWeakRef]()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for t in tree_leaves(result):
            if isinstance(t, Tensor) and not isinstance(t, DTensor):
                self.made.setdefault(t.untyped_storage()._cdata, StorageWeakRef(t.untyped_storage()))
        return result

    def total(self) -> int:
        references = [reference.cdata for key, reference in self.made.items() if key not in self.known]
        alive = [torch.UntypedStorage._new_with_weak_ptr(reference) for reference in references]
        return sum(storage.nbytes() for storage in alive if storage is not None)


def held_between_micro_batches(layout: ParallelConfig, precision: str) -> float:
    """Largest number of bytes held at the start of a later micro-batch, per parameter of this rank's stages.

    Counted are results of operations of this step: gradients, and what was forgotten.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training.parallel.data.grad_reducer, "BUCKET_BYTES", 20_000)
        model = build(replace(layout, micro_batches=4), precision, layers=8, width=64)
    step(model, 8)
    some, amounts = batch(model, 8), list[int]()
    with torch.no_grad():
        known = [p.to_local() if isinstance(p, DTensor) else p for part in model.parts for p in part.parameters()]
    held = Held([*known, *(p.local for p in model.params)])
    for part in model.parts:
        part.register_forward_pre_hook(lambda *_: amounts.append(held.total()))
    with held:
        model.forward_backward(some, 1.0)
    return max(amounts) / sum(p.numel() for part in model.parts for p in part.parameters())


@pytest.mark.every(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_zero_2_and_3_hold_sharded_gradients_between_micro_batches(run_ranks: RunRanks, precision: str) -> None:
    for zero in (2, 3):
        for held in run_ranks(2, held_between_micro_batches, ParallelConfig(zero=zero), precision):
            assert held < 4 / 2 * 1.1, zero
    for held in run_ranks(2, held_between_micro_batches, ParallelConfig(zero=1), precision):
        assert held > 3.9


@pytest.mark.thorough
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_zero_2_and_3_hold_them_so_in_pipelines(run_ranks: RunRanks, precision: str) -> None:
    for zero in (2, 3):
        # also alive are activations, the block that is being sent, and with ZeRO-3 parameters, gathered once a step
        gathered = {2: 0, 3: 4 if precision == "fp32" else 2}[zero]
        for held in run_ranks(4, held_between_micro_batches, ParallelConfig(zero=zero, pp=2), precision):
            assert held - gathered < 4, zero


def norm_gradients(layout: ParallelConfig, precision: str) -> dict[str, Tensor]:
    torch.set_num_threads(2)  # torch's operators instead of our loops
    model = build(layout, precision)
    model.forward_backward(batch(model), 1 / (4 * TOKENS))
    torch.set_num_threads(1)
    return {p.name: p.local.grad.clone() for p in model.params if "norm" in p.name and p.local.grad is not None}


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_norm_gradients_under_pipelines_are_those_of_one_process(run_ranks: RunRanks, schedule: Any) -> None:
    (expected,) = run_ranks(1, norm_gradients, ParallelConfig(micro_batches=4), "bf16")
    found: dict[str, Tensor] = {}
    for part in run_ranks(2, norm_gradients, ParallelConfig(pp=2, schedule=schedule, micro_batches=4), "bf16"):
        found |= part
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32
        assert (gradient - expected[name]).norm() < 1e-6 * expected[name].norm(), name


def accumulation_error(layout: ParallelConfig, copies: int) -> float:
    """Largest relative difference of a gradient of so many equal micro-batches from one's times their number."""
    gradients = []
    for count in (copies, 1):
        model = build(replace(layout, micro_batches=count), "bf16", layers=1)
        one = batch(model, model.world.dp_size)
        parts = (x.repeat(count, *[1] * (x.ndim - 1)) for x in (one.ids, one.targets, one.sample_ids))
        model.forward_backward(TokenBatch(*parts), 1 / TOKENS)
        gradients.append([p.local.grad * copies / count for p in model.params if p.local.grad is not None])
    return max(float((a - b).norm() / b.norm()) for a, b in zip(*gradients, strict=True))


@pytest.mark.every(2)
@pytest.mark.parametrize(("size", "zero"), [(1, 0), (2, 0), (2, 1), (2, 3)])
def test_gradients_of_micro_batches_are_accumulated_in_float32(run_ranks: RunRanks, size: int, zero: Any) -> None:
    assert max(run_ranks(size, accumulation_error, ParallelConfig(zero=zero), 40)) < 1e-5  # in bf16 1e-2


def test_only_bf16_gradients_are_reduced_in_bf16(config: TrainConfig) -> None:
    replace(config, precision="bf16", parallel=ParallelConfig(reduce_bf16=True)).check()
    with pytest.raises(UsageError, match=r"reduce_bf16 and precision fp16: .* try --precision bf16"):
        replace(config, precision="fp16", parallel=ParallelConfig(reduce_bf16=True)).check()
