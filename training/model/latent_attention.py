"""Multi-head latent attention: all heads' keys and values are made from one compressed vector of a token."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from training.kernels.rotary import apply_rotary
from training.model.attention import Attention
from training.model.attention_mask import Mask
from training.model.documents import Documents
from training.model.dropout import Dropout
from training.model.layers import Linear, RMSNorm
from training.model.model_config import ModelConfig
from training.model.positions import SequenceTable

_EPS = 1e-6  # of the compressed vectors' norms, whatever the other norms' is: DeepSeek's published code


class LatentAttention(Attention):
    """Attention of DeepSeek-V2 and V3 (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1, equations 9 to 19).

    A head's query and key are features that are not rotated, made from compressed vectors, and then rotated ones, of
    which the key is the same for all heads. Values, which may have fewer features, are padded for attention: its
    kernels, fused ones and those across ranks, want keys and values of one width.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super(Attention, self).__init__()
        self.config = config
        self.window = config.layer_window(layer)
        self.sinks = None
        self.dropout = Dropout(config.dropout, f"blocks.{layer}.attention")
        rank = config.kv_lora_rank
        heads = config.heads
        if config.q_lora_rank:
            self.q_a = Linear(config.width, config.q_lora_rank, bias=False)
            self.q_a_norm = RMSNorm(config.q_lora_rank, _EPS)
            self.q_b = Linear(config.q_lora_rank, config.q_width, bias=False)
        else:
            self.q = Linear(config.width, config.q_width, bias=False)
        self.kv_a = Linear(config.width, rank + config.qk_rope_head_dim, bias=False)
        self.kv_a_norm = RMSNorm(rank, _EPS)
        self.kv_b = Linear(rank, heads * config.qk_nope_head_dim + config.value_width, bias=False)
        self.o = Linear(config.value_width, config.width, bias=False)
        growth = 0.1 * config.rope_mscale_all_dim * math.log(config.rope_factor) + 1
        self.score_factor = growth**2  # published code; Peng et al. 2023, equation 22, has it in the rotation

    def heads(self, x: Tensor, table: SequenceTable, documents: Documents | None) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        plain, rotated, vectors, rotated_key = self.compressed(x, table, documents)
        kv = self.kv_b(vectors).unflatten(-1, (-1, config.qk_nope_head_dim + config.v_head_dim))
        k, v = kv.split((config.qk_nope_head_dim, config.v_head_dim), -1)
        q = torch.cat((plain, rotated), -1)
        q = q if self.score_factor == 1 else q * self.score_factor
        k = torch.cat((k, rotated_key.expand(-1, -1, k.shape[2], -1)), -1)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def compressed(
        self, x: Tensor, table: SequenceTable, documents: Documents | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return what is not rotated of the queries of features (B, T, D), (B, T, H, E), and what is.

        Then the compressed vectors of keys and values, (B, T, R), and the rotated key of all heads, (B, T, 1, E). With
        documents all sequences are one of B T tokens.
        """
        config = self.config
        if config.q_lora_rank:
            compressed, shared = self.q_a.fused_with(x, self.kv_a)
            q = self.q_b(self.q_a_norm(compressed))
        else:
            q, shared = self.q.fused_with(x, self.kv_a)
        if documents is not None:
            q, shared = (y.flatten(0, 1)[None] for y in (q, shared))
        vectors, rotated_key = shared.split((config.kv_lora_rank, config.qk_rope_head_dim), -1)
        queries = q.unflatten(-1, (-1, config.head_dim))
        plain, rotated = queries.split((config.qk_nope_head_dim, config.qk_rope_head_dim), -1)
        rotated_key = self._rotate(rotated_key[:, :, None], table)
        return plain, self._rotate(rotated, table), self.kv_a_norm(vectors), rotated_key

    @staticmethod
    def _rotate(x: Tensor, table: SequenceTable) -> Tensor:
        """Return the features (B, T, H, E), all of them rotated."""
        assert isinstance(table, tuple)
        return apply_rotary(x.transpose(1, 2), table).transpose(1, 2)

    def mix(self, mask: Mask, q: Tensor, k: Tensor, v: Tensor, sample_ids: Tensor | None) -> Tensor:
        padded = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
        return super().mix(mask, q, k, padded, sample_ids)[..., : v.shape[-1]]
