"""Small models, ours and transformers', to export and import."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
import transformers
from torch import Tensor

from gristmill.io.token_shards import TokenizerRecord
from training.checkpoint.checkpoint import CheckpointManager, CheckpointRecord, load_model
from training.checkpoint.checkpoint_group import single_process_group
from training.checkpoint.shard_storage import model_state
from training.model.decoder import Decoder
from training.model.model_config import ModelConfig
from training.parallel.initialize import init_shard
from training.sharding.shard_spec import ShardSpec
from training.sharding.sharded_parameter import ShardedParameter

SIZES = ModelConfig(layers=2, width=24, heads=4, ffn_width=40, init_std=0.3, norm_eps=1e-4)
LATENT = replace(
    SIZES, kv_lora_rank=14, experts=6, expert_width=12, shared_experts=1, router="sigmoid", router_scale=2.5,
    expert_groups=3, groups_per_token=2, dense_layers=1, balance="bias",
)  # fmt: skip
MODELS = {
    "llama": replace(SIZES, preset="llama"),
    "llama, grouped": replace(SIZES, preset="llama", kv_heads=2, rope_base=500.0),
    "llama, tied, biases": replace(SIZES, preset="llama", tied=True, bias=True),
    "llama, scaled": replace(
        SIZES, rope_scaling="llama3", rope_factor=4.0, rope_original_context=64, head_dim=8, rope_base=500.0
    ),
    "llama, yarn": replace(
        SIZES, rope_scaling="yarn", rope_factor=4.0, rope_original_context=32, qkv_bias=True, out_bias=True
    ),
    "mistral": replace(SIZES, kv_heads=2, window=5),
    "qwen2": replace(SIZES, kv_heads=2, qkv_bias=True, tied=True),
    "qwen2, window": replace(SIZES, qkv_bias=True, window=4, rope_scaling="linear", rope_factor=2.0),
    "qwen3": replace(SIZES, kv_heads=2, head_dim=8, qk_norm=True, tied=True),
    "mixtral": replace(SIZES, kv_heads=2, experts=4),
    "qwen3_moe": replace(
        SIZES, head_dim=8, qk_norm=True, experts=5, expert_width=12, dense_layers=1, router_normalize=False
    ),
    "olmoe": replace(SIZES, qk_norm=True, qk_norm_joint=True, experts=6, experts_per_token=3, balance="switch"),
    "deepseek_v3": replace(
        LATENT,
        q_lora_rank=10,
        qk_nope_head_dim=5,
        qk_rope_head_dim=4,
        v_head_dim=3,
        rope_attention_factor=1.0,
        rope_scaling="yarn",
        rope_factor=4.0,
        rope_original_context=8,
        rope_mscale_all_dim=1.0,
    ),
    "deepseek_v3, without a bias": replace(LATENT, balance="sequence", shared_experts=2, dense_layers=0),
    "gpt_oss": replace(
        SIZES,
        kv_heads=2,
        sinks=True,
        window=3,
        full_attention_every=2,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        mlp="swiglu-clamped",
        experts=5,
        router_bias=True,
        rope_scaling="yarn",
        rope_factor=4.0,
        rope_truncate=False,
        rope_original_context=8,
    ),
    "gpt2": replace(SIZES, preset="gpt2"),
    "gpt2, untied": replace(SIZES, preset="gpt2", tied=False),
    "gpt_neox": replace(SIZES, preset="gpt-neox", rope_fraction=0.34),
    "gpt_neox, tied, in sequence": replace(
        SIZES, preset="gpt-neox", tied=True, residual="pre-norm", rope_fraction=0.67
    ),
    "bloom": replace(SIZES, preset="bloom", ffn_width=96),
    "bloom, 3 heads": replace(SIZES, preset="bloom", ffn_width=96, heads=3),
    "opt": replace(SIZES, preset="opt", norm_eps=1e-5),
}
LLAMA = {
    "vocab_size": 50, "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 12, "initializer_range": 0.3, "rms_norm_eps": 1e-4,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
NEOX = {key: value for key, value in LLAMA.items() if key != "rms_norm_eps"} | {"hidden_act": "gelu"}
BLOOM = {
    "vocab_size": 50, "hidden_size": 24, "n_layer": 2, "n_head": 6, "initializer_range": 0.3, "seq_length": 12,
}  # fmt: skip
OPT = {
    "vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 40,
    "max_position_embeddings": 12, "init_std": 0.3, "word_embed_proj_dim": 24, "pad_token_id": None,
}  # fmt: skip
GPT2 = {"vocab_size": 50, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 12, "initializer_range": 0.3}
DEEPSEEK = LLAMA | {
    "num_key_value_heads": 4, "q_lora_rank": 10, "kv_lora_rank": 14, "qk_nope_head_dim": 5, "qk_rope_head_dim": 4,
    "v_head_dim": 3, "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_group": 3,
    "topk_group": 2, "first_k_dense_replace": 1, "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 8, "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
}  # fmt: skip
END = 7


def ids(rows: int = 3, length: int = 12) -> Tensor:
    return torch.randint(50, (rows, length), generator=torch.Generator().manual_seed(3))


def build(config: ModelConfig) -> Decoder:
    """A model with random norms and biases, instead of ones and zeros."""
    with torch.device("meta"):
        model = Decoder(config.resolve(50, 12))
    model.to_empty(device="cpu")
    model.tie()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            init_shard(parameter, name, ShardSpec.whole(tuple(parameter.shape)), model.config, 1)
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        for buffer in model.buffers():
            buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
    return model.eval()


def weights(model: Decoder) -> list[ShardedParameter]:
    return [ShardedParameter(name, p, p, ShardSpec.whole(tuple(p.shape)), True) for name, p in model.named_parameters()]


def save(model: Decoder, folder: Path, tokenizer: TokenizerRecord | None = None) -> Path:
    record = CheckpointRecord(
        step=5,
        updates=5,
        processes=1,
        layout={},
        stability={},
        unigram_loss=1.5,
        model=asdict(model.config),
        tokenizer=tokenizer or TokenizerRecord("t.model", "0", 50, END),
    )
    with single_process_group() as group:
        CheckpointManager(folder / "checkpoints", 1, group.world, print).save(
            record, model_state(weights(model), buffers=dict(model.named_buffers()))
        )
    return folder


def load_ours(folder: Path) -> Decoder:
    """Build the model that the checkpoint in `folder` describes."""
    with single_process_group() as group:
        model = build(ModelConfig.from_record(json.loads(next(folder.glob("step-*/record.json")).read_text())["model"]))
        assert (
            load_model(folder, model_state(weights(model), buffers=dict(model.named_buffers())), group, print).step == 0
        )
    return model


def load_theirs(folder: Path) -> transformers.PreTrainedModel:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report  # nothing missing, nothing unused
    return model.eval()


THEIRS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)),
    "llama, grouped": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**LLAMA, num_key_value_heads=2, rope_theta=500.0, tie_word_embeddings=True)
    ),
    "llama, biases": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**LLAMA, attention_bias=True, mlp_bias=True)
    ),
    "llama, scaled": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA, rope_parameters=LLAMA3)),
    "mistral": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**LLAMA, num_key_value_heads=2, sliding_window=5)
    ),
    "mistral, no window": lambda: transformers.MistralForCausalLM(
        transformers.MistralConfig(**LLAMA, num_key_value_heads=2, sliding_window=None, head_dim=8)
    ),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**LLAMA, num_key_value_heads=2, tie_word_embeddings=True)
    ),
    "qwen2, window": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            **LLAMA, num_key_value_heads=4, use_sliding_window=True, sliding_window=4, max_window_layers=0
        )
    ),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**LLAMA, num_key_value_heads=2, head_dim=8)
    ),
    "qwen3, biases": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**LLAMA, num_key_value_heads=2, head_dim=6, attention_bias=True)
    ),
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**LLAMA, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2)
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            **LLAMA,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=12,
            decoder_sparse_step=2,
            norm_topk_prob=True,
        )
    ),
    "olmoe": lambda: transformers.OlmoeForCausalLM(
        transformers.OlmoeConfig(**LLAMA, num_experts=6, num_experts_per_tok=3)
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**DEEPSEEK)),
    "deepseek_v3, no vector of queries": lambda: transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(**DEEPSEEK | {"q_lora_rank": None, "first_k_dense_replace": 0})
    ),
    "gpt_oss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            **LLAMA, head_dim=8, num_key_value_heads=2, num_local_experts=5, num_experts_per_tok=2, sliding_window=3
        )
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
    "gpt2, untied": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**GPT2, n_inner=40, tie_word_embeddings=False)
    ),
    "gpt_neox": lambda: transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(**NEOX, rope_parameters={"rope_theta": 500.0, "partial_rotary_factor": 0.67})
    ),
    "gpt_neox, sequential": lambda: transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            **{**NEOX, "hidden_act": "gelu_fast"},
            use_parallel_residual=False,
            attention_bias=False,
            tie_word_embeddings=True,
            rope_parameters={"rope_theta": 500.0, "partial_rotary_factor": 1.0},
        )
    ),
    "bloom": lambda: transformers.BloomForCausalLM(transformers.BloomConfig(**BLOOM)),
    "opt": lambda: transformers.OPTForCausalLM(transformers.OPTConfig(**OPT)),
}


def build_theirs(name: str, folder: Path, **sizes: int) -> transformers.PreTrainedModel:
    torch.manual_seed(4)
    config = THEIRS[name]().config
    for key in sizes.keys() & config.to_dict().keys():
        setattr(config, key, sizes[key])
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):
                buffer += 0.1 * torch.randn(buffer.shape)
    model.save_pretrained(folder)
    return model
