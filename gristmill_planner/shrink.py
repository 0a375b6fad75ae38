"""Shrink: a published run made small enough to train in 8 processes: its architecture and its layout's shape."""

from typing import Any

from gristmill_planner.published_runs import PublishedRun
from training.experimental.parallel_config import ParallelConfig
from training.memory.memory_config import MemoryConfig
from training.model.model_config import ModelConfig

PROCESSES = 8
_HEAD_DIM, _VOCABULARY, _SEQ_LEN, _STEPS = 8, 1024, 64, 20


def shrunk_config(each: PublishedRun) -> str:
    """A configuration of training in TOML, of 20 steps; it needs data.train, data.holdout and out_dir beside it."""
    layout = shrunk_layout(each.run.layout)
    sections: dict[str, dict[str, Any]] = {
        "model": _model(each, layout),
        "data": {"seq_len": _SEQ_LEN, "batch_size": layout.dp * layout.micro_batches * min(2, each.run.micro_batch)},
        "optim": {"steps": _STEPS, "warmup_steps": 2},
        "parallel": _parallel(layout),
        "memory": _changed(MemoryConfig(each.run.recompute), MemoryConfig()),
        "eval": {"sequences": 16, "sample_tokens": 0},
    }
    lines = [
        f"# {each.name}, shrunk: {layout.describe()} instead of {each.run.layout.describe()}",
        f"# torchrun --nproc_per_node={PROCESSES} training/train.py --config THIS_FILE --data.train TOKENS/train "
        "--data.holdout TOKENS/holdout --out_dir RUN",
        'device = "cpu"',
    ]
    for name, options in sections.items():
        lines += ["", f"[{name}]", *(f"{key} = {_toml(value)}" for key, value in options.items())]
    return "\n".join(lines)


def shrunk_layout(layout: ParallelConfig) -> ParallelConfig:
    """The layout's shape with 8 ranks: each degree above 1 becomes 2, and what is left goes to the largest."""
    degrees = {name: getattr(layout, name) for name in ("dp", "tp", "pp")}
    small = {name: min(degree, 2) for name, degree in degrees.items()}
    while small["dp"] * small["tp"] * small["pp"] < PROCESSES:
        small[max(small, key=lambda name: degrees[name] / small[name])] *= 2
    per_rank = 2 if small["pp"] > 1 else 1
    return ParallelConfig(
        **small,
        zero=layout.zero,
        zero_group=small["dp"] if layout.zero else 1,
        sequence_parallel=layout.sequence_parallel,
        schedule=layout.schedule,
        virtual_stages=layout.virtual_stages,
        micro_batches=min(layout.micro_batches, per_rank * small["pp"] if small["pp"] > 1 else 2),
    )


def _model(each: PublishedRun, layout: ParallelConfig) -> dict[str, Any]:
    """Sizes beside the preset's parts: heads as odd as the published ones, an MLP as wide in proportion."""
    model = each.run.model
    heads = _shrunk_heads(model, layout.tp)
    width = heads * _HEAD_DIM
    unit = 8 * layout.tp
    return {
        "preset": each.preset,
        "layers": max(4, layout.stages * (1 if layout.virtual_stages > 1 else 2)),
        "width": width,
        "heads": heads,
        "ffn_width": -(-width * model.ffn_width // (model.width * unit)) * unit,
        "vocab_size": _VOCABULARY,
        "context": _SEQ_LEN,
    }


def _shrunk_heads(model: ModelConfig, tp: int) -> int:
    """Heads halved while 4 or more are left, which tp divides: BLOOM's 112 become 14."""
    heads = model.heads
    while heads % (2 * tp) == 0 and heads >= 8:
        heads //= 2
    return heads


def _parallel(layout: ParallelConfig) -> dict[str, Any]:
    """Options of the layout; training fills in the others."""
    given = _changed(layout, ParallelConfig())
    return {key: value for key, value in given.items() if key != "zero_group" and (key, value) != ("virtual_stages", 1)}


def _changed(options: Any, defaults: Any) -> dict[str, Any]:
    """The fields that are not at their defaults."""
    return {key: value for key, value in vars(options).items() if value != getattr(defaults, key)}


def _toml(value: Any) -> str:
    """A value in TOML; strings are names of options."""
    return str(value).lower() if isinstance(value, (bool, int)) else f'"{value}"'
