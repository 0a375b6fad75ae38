"""Training loops of others, recorded: torch's FSDP2 and tensor parallelism, megatron-core's layers, the Trainer of
Hugging Face. Each in one process, as its reference, and on ranks, with a planted fault or the fault of a public report.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gristmill_parity.recording import Partial, Perturb, RankLayout, RecordOptions, Replicate, Shard, record
from gristmill_parity.recording.options import Place

VOCABULARY, SEQUENCES, TOKENS, WIDTH = 61, 8, 10, 32
STEPS = 2


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return token ids, and labels of which the sequences have different numbers."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(VOCABULARY, (SEQUENCES, TOKENS), generator=generator)
    labels = ids.clone()
    for row in range(SEQUENCES):
        labels[row, : 1 + row] = -100
    return ids, labels


def llama() -> Any:
    """Return a small Llama of transformers', with the same weights each time."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, use_cache=False, attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config).double()


# torch: FSDP2 and tensor parallelism


def train_llama(model: Any, optimizer: torch.optim.Optimizer, rows: slice = slice(None)) -> None:
    for step in range(STEPS):
        ids, _ = batch(step)
        ids = ids[rows]
        optimizer.zero_grad()
        logits = model(input_ids=ids).logits
        nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()


def llama_reference(folder: Path, perturb: Perturb | None) -> None:
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, folder, optimizer=optimizer, perturb=perturb, options=LLAMA):
        train_llama(model, optimizer)


LLAMA = RecordOptions(names=("model.embed_tokens*", "model.layers*", "model.norm*", "lm_head*"))


def llama_place(name: str, kind: str, tensor: Tensor) -> Place:
    """Where plain tensors lie: replicas have other sequences; what tensor parallelism divides is a DTensor."""
    if kind.startswith(("input", "output")):
        # in one process modules share this input, which then has the gradients of all of them
        is_shared = kind == "input gradient" and name.endswith(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"))
        if tensor.ndim != 3 or is_shared:
            return None
        return {"dp": Shard(0), "tp": Shard(2) if name.endswith("act_fn") else Replicate()}
    return {"dp": Replicate(), "tp": Replicate()}


def fsdp_with_tp(folder: Path, fault: str = "", dp: int = 2, tp: int = 2) -> None:
    """Train with FSDP2 over "dp" and torch's tensor parallelism over "tp"."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    model = llama()
    for layer in model.model.layers:
        plan: dict[str, Any] = {}
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[name] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[name] = RowwiseParallel()
        if fault == "output not reduced":
            from torch.distributed.tensor import Partial as Terms

            plan["mlp.down_proj"] = RowwiseParallel(output_layouts=Terms())
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    if fault == "gradients not averaged":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rank = mesh["dp"].get_local_rank()
    rows = slice(rank * SEQUENCES // dp, (rank + 1) * SEQUENCES // dp)
    layout = RankLayout(axes=mesh, placements=llama_place, mean_over=["dp"])
    with record(model, folder, optimizer=optimizer, layout=layout, options=LLAMA):
        train_llama(model, optimizer, rows)


# megatron-core: a norm and an MLP with sequence parallelism


class MegatronBlock(nn.Module):
    """x + MLP(norm(x)) of tokens (T, B, D), of megatron-core's parallel linear layers; each rank has T / n tokens."""

    def __init__(self, parallel: bool) -> None:
        from megatron.core.model_parallel_config import ModelParallelConfig
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        super().__init__()
        ranks = dist.get_world_size()
        config = ModelParallelConfig(
            tensor_model_parallel_size=ranks, sequence_parallel=parallel and ranks > 1, use_cpu_initialization=True,
            params_dtype=torch.float64, gradient_accumulation_fusion=False,
        )  # fmt: skip
        linear = {"config": config, "init_method": nn.init.xavier_normal_, "bias": False, "skip_bias_add": True}
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(WIDTH, dtype=torch.float64)
        self.up = ColumnParallelLinear(WIDTH, 4 * WIDTH, gather_output=False, **linear)
        self.down = RowParallelLinear(4 * WIDTH, WIDTH, input_is_parallel=True, **linear)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.up(self.norm(x))
        output, _ = self.down(torch.tanh(hidden))
        return x + output


def megatron_place(name: str, kind: str, tensor: Tensor) -> Place:
    """Where Megatron's tensors lie: its own attribute says along which dimension a weight is divided."""
    if kind.startswith(("input", "output")):
        if name == "up" and kind.startswith("output"):
            return {"tp": Shard(2)}
        if name == "down" and kind.startswith("input"):
            return {"tp": Shard(2)}
        return {"tp": Shard(0)}  # tokens
    if name.startswith("norm"):
        return {"tp": Partial()} if kind == "own gradient" else {"tp": Replicate()}
    return {"tp": Shard({"up.weight": 0, "down.weight": 1}[name])}


def megatron(folder: Path, perturb: Perturb | None = None, fault: str = "") -> None:
    """Train on all ranks of the world; one rank alone is the reference."""
    from megatron.core import parallel_state

    ranks, rank = dist.get_world_size(), dist.get_rank()
    right = torch.cuda.current_device
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]  # where its buffers are
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=ranks)
    try:
        model = MegatronBlock(True)
        if fault != "norm not marked":
            for parameter in model.norm.parameters():
                parameter.sequence_parallel = True  # type: ignore[attr-defined]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        layout = RankLayout(axes={"tp": (rank, ranks)}, placements=megatron_place)
        with record(model, folder, optimizer=optimizer, layout=layout, perturb=perturb):
            for step in range(STEPS):
                generator = torch.Generator().manual_seed(step)
                x = torch.randn(TOKENS, SEQUENCES, WIDTH, dtype=torch.float64, generator=generator)
                optimizer.zero_grad()
                model(x.chunk(ranks)[rank].clone().requires_grad_()).square().sum().backward()
                if ranks > 1:
                    sum_as_megatron(model)
                optimizer.step()
    finally:
        parallel_state.destroy_model_parallel()
        torch.cuda.current_device = right


def sum_as_megatron(model: nn.Module) -> None:
    """Sum over tensor-parallel ranks the gradients of parameters that are marked, as Megatron does after a backward
    pass (megatron/core/distributed/finalize_model_grads.py)."""
    for parameter in model.parameters():
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(parameter.grad)


# Hugging Face: Trainer


class _Rows(torch.utils.data.Dataset[Any]):
    """The sequences of all steps, one after the other."""

    def __len__(self) -> int:
        return STEPS * SEQUENCES

    def __getitem__(self, index: int) -> Any:
        ids, labels = batch(index // SEQUENCES)
        return {"input_ids": ids[index % SEQUENCES], "labels": labels[index % SEQUENCES]}


def hugging_face(folder: Path, perturb: Perturb | None = None, fault: str = "") -> None:
    """Train with the Trainer on all ranks of the world; one rank alone is the reference."""
    from transformers import Trainer, TrainingArguments

    ranks, rank = dist.get_world_size(), dist.get_rank()
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    with tempfile.TemporaryDirectory() as out:
        arguments = TrainingArguments(
            out, use_cpu=True, per_device_train_batch_size=SEQUENCES // ranks, max_steps=STEPS, report_to=[],
            save_strategy="no", disable_tqdm=True, train_sampling_strategy="sequential", max_grad_norm=0.0,
            average_tokens_across_devices=fault != "tokens averaged per rank", logging_strategy="no",
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=_Rows(), optimizers=(optimizer, scheduler))
        layout = RankLayout(axes={"dp": (rank, ranks)}, placements=hf_place, mean_over=["dp"])
        with record(model, folder, optimizer=optimizer, layout=layout, options=LLAMA, perturb=perturb):
            trainer.train()


def hf_place(name: str, kind: str, tensor: Tensor) -> Place:
    if kind.startswith(("input", "output")):
        return {"dp": Shard(0)} if tensor.ndim == 3 else None
    return {"dp": Partial("mean") if kind == "own gradient" else Replicate()}
