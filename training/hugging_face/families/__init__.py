"""Families of Hugging Face models, one file each: names of tensors, fields of config.json and their defaults."""

from training.hugging_face.families import (
    bloom,
    deepseek_v3,
    gpt2,
    gpt_neox,
    gpt_oss,
    llama,
    mistral,
    mixtral,
    olmoe,
    opt,
    qwen2,
    qwen3,
    qwen3_moe,
)
from training.hugging_face.family import ModelFamily

# by model_type; a model that several of them represent is exported as the first
_MODULES = (llama, mistral, qwen2, qwen3, mixtral, qwen3_moe, olmoe, deepseek_v3, gpt_oss, gpt2, gpt_neox, bloom, opt)
FAMILIES: dict[str, ModelFamily] = {module.FAMILY.model_type: module.FAMILY for module in _MODULES}
