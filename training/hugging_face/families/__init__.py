"""Families of Hugging Face models, one file each: names of tensors, fields of config.json and their defaults."""

from training.hugging_face.families import gpt2, llama, mistral, qwen2, qwen3
from training.hugging_face.family import Family

# by model_type; a model that several of them represent is exported as the first
FAMILIES: dict[str, Family] = {
    family.model_type: family for family in (llama.FAMILY, mistral.FAMILY, qwen2.FAMILY, qwen3.FAMILY, gpt2.FAMILY)
}
