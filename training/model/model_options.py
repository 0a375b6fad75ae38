"""ModelOptions: the decoder's sizes and the variants of its layers, and what follows from them."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from gristmill.config import Range

GATED = ("swiglu", "swiglu-clamped", "geglu")
MLPS = (*GATED, "gelu", "gelu-exact", "gelu-fast", "relu", None)


@dataclass(frozen=True)
class ModelOptions:
    """The options of a decoder, which `ModelConfig` fills in and checks, and what follows from them when it has."""

    RANGES: ClassVar[dict[str, Range]] = {
        **dict.fromkeys(("layers", "heads", "kv_heads", "head_dim"), Range(0, 10_000)),
        **dict.fromkeys(("width", "ffn_width"), Range(0, 10_000_000)),
        **dict.fromkeys(("vocab_size", "context", "window", "rope_original_context"), Range(0, 2**31 - 1)),
        "dropout": Range(0, 1),
        **dict.fromkeys(("rope_base", "rope_factor", "rope_low", "rope_high"), Range(0)),
        **dict.fromkeys(("rope_attention_factor", "rope_mscale_all_dim"), Range(0)),
        "rope_fraction": Range(0, 1),
        "position_offset": Range(0, 1000),
        **dict.fromkeys(("norm_eps", "init_std"), Range(0)),
        **dict.fromkeys(("experts", "experts_per_token", "shared_experts", "dense_layers"), Range(0, 10_000)),
        **dict.fromkeys(
            ("full_attention_every", "sparse_every", "expert_groups", "groups_per_token"), Range(0, 10_000)
        ),
        **dict.fromkeys(("expert_width", "q_lora_rank", "kv_lora_rank"), Range(0, 10_000_000)),
        **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), Range(0, 10_000)),
        **dict.fromkeys(("router_scale", "router_z_loss", "balance_loss", "balance_rate"), Range(0)),
        "capacity_factor": Range(0),
    }

    preset: str = "llama"
    """Sets the defaults of the other options: a family such as llama, or a published model such as gpt2-124m; an
    unknown name is an error that lists them."""
    layers: int = 0
    """Number of decoder blocks; 0: the preset's (4 for llama and gpt2)."""
    width: int = 0
    """Features of the residual stream (d_model); 0: the preset's (256 for llama and gpt2)."""
    heads: int = 0
    """Query heads; 0: the preset's (4 for llama and gpt2)."""
    kv_heads: int = 0
    """Key and value heads, each shared by heads / kv_heads query heads (grouped-query attention); 0: the preset's, or
    heads."""
    head_dim: int = 0
    """Features of each head; 0: the preset's, or width / heads."""
    ffn_width: int = 0
    """Features inside the MLP (d_ff); 0: the preset's, or 4 x width, for swiglu 8/3 x width rounded up to a multiple
    of 32."""
    vocab_size: int = 0
    """Size of the vocabulary; 0: the preset's, or the tokenizer's."""
    context: int = 0
    """Longest sequence that learned positions can encode; 0: the preset's, or data.seq_len."""
    norm: Literal["rms", "layer"] | None = None
    """RMSNorm or LayerNorm, before each sublayer and before the output matrix (pre-norm)."""
    positions: Literal["rope", "learned", "alibi"] | None = None
    """Rotary position embeddings, a learned embedding per position, or attention biased by distance (ALiBi)."""
    position_offset: int | None = None
    """Number of unused rows before the first learned position; by default the preset's (OPT: 2)."""
    mlp: str | None = None
    """swiglu, swiglu-clamped, geglu, gelu, gelu-exact, gelu-fast, relu, or FILE.py:NAME, an MLP (class) or an
    activation (function) of yours. gelu: GPT-2's tanh approximation; gelu-exact: with the error function, twice as fast
    on a CPU; gelu-fast: with the logistic function; swiglu-clamped: gpt-oss's."""
    block: str = ""
    """FILE.py:CLASS: a block of yours in place of each block; it derives from ours."""
    residual: Literal["pre-norm", "parallel", "deepnorm"] | None = None
    """pre-norm: each sublayer adds to the stream, which it sees normalised; parallel: attention and MLP see the same
    stream, as in GPT-NeoX; deepnorm: the normalised stream is passed on, times (2 layers)^½, as in GLM-130B."""
    embed_norm: bool | None = None
    """A norm after the embedding, as in BLOOM."""
    query_layer: bool | None = None
    """The last block has a learned query for each position, as in CodeGeeX and PanGu-α."""
    bias: bool | None = None
    """Biases in the linear layers, unless the next three options say otherwise, and in LayerNorm."""
    qkv_bias: bool | None = None
    """Biases of the queries, keys and values."""
    out_bias: bool | None = None
    """Bias of attention's output matrix."""
    mlp_bias: bool | None = None
    """Biases in the MLP."""
    qk_norm: bool | None = None
    """A norm of each head's query and key, before they are rotated."""
    qk_norm_joint: bool | None = None
    """With qk_norm: one norm over the queries of all heads, and one over the keys, as in OLMoE."""
    kv_lora_rank: int = 0
    """Multi-head latent attention (DeepSeek-V2): keys and values of all heads are computed from one vector of this many
    features; 0: the preset's, or no latent attention."""
    q_lora_rank: int = 0
    """With latent attention: queries are computed from a vector of this many features; 0: the preset's, or directly."""
    qk_nope_head_dim: int = 0
    """With latent attention: features of a head's query and key that are not rotated; 0: the preset's, or width /
    heads."""
    qk_rope_head_dim: int = 0
    """With latent attention: features of a head's query and key that are rotated; all heads share these features of the
    key. 0: the preset's, or half of qk_nope_head_dim."""
    v_head_dim: int = 0
    """With latent attention: features of a head's value; 0: the preset's, or qk_nope_head_dim."""
    window: int | None = None
    """Number of tokens that a token attends to, including itself (sliding-window attention); 0: all before it; by
    default the preset's."""
    full_attention_every: int = 0
    """With a window: every n-th layer attends to all tokens, as in gpt-oss (2); 0: the preset's, or no layer does."""
    sinks: bool | None = None
    """Attention sinks: a learned logit per head takes a share of the attention weights and adds no value, as in
    gpt-oss."""
    tied: bool | None = None
    """Tie the output matrix to the token embedding."""
    dropout: float = 0.0
    """Dropout probability, for the embedding, the attention weights and each sublayer's output."""
    rope_fraction: float = 0.0
    """Share of a head's features that are rotated, from the first on; 0: the preset's, or 1."""
    rope_base: float = 0.0
    """Base of the rotary frequencies (theta); 0: the preset's (10,000 for llama)."""
    rope_scaling: Literal["none", "linear", "llama3", "yarn"] | None = None
    """Rotary frequencies divided by rope_factor, for longer sequences than those of pre-training: linear, all of them;
    llama3 and yarn, the low ones."""
    rope_factor: float = 0.0
    """By how much sequences are longer than rope_original_context."""
    rope_original_context: int = 0
    """For llama3 and yarn: sequence length of pre-training."""
    rope_low: float = 0.0
    """Frequencies that turn less often in rope_original_context are divided; 0: 1, for llama3 and yarn."""
    rope_high: float = 0.0
    """Frequencies that turn more often in rope_original_context stay; 0: 4 for llama3, 32 for yarn."""
    rope_attention_factor: float = 0.0
    """For yarn: factor of the rotated queries and keys; 0: 0.1 ln(rope_factor) + 1."""
    rope_truncate: bool | None = None
    """For yarn: round rope_low and rope_high to whole pairs of features; by default as in the preset, or true."""
    rope_mscale_all_dim: float = 0.0
    """With yarn and latent attention: all scores are multiplied by (0.1 x rope_mscale_all_dim ln(rope_factor) + 1)²."""
    norm_eps: float = 0.0
    """Epsilon of the norms; 0: the preset's (1e-5 for llama and gpt2)."""
    init_std: float = 0.0
    """Standard deviation of the initial weights, or with deepnorm of those outside the blocks; 0: the preset's, or
    0.02."""
    experts: int = 0
    """Experts of a sparse layer (mixture of experts): MLPs of which a router chooses a few for each token; 0: the
    preset's, or none: all layers are dense."""
    experts_per_token: int = 0
    """Experts that the router chooses for a token (top-k); 0: the preset's, or 2."""
    expert_width: int = 0
    """Features inside an expert; 0: the preset's, or ffn_width, which is that of the dense layers."""
    shared_experts: int = 0
    """Shared experts, which every token passes through in addition, computed as one MLP of this many times
    expert_width."""
    dense_layers: int = 0
    """First layers that are dense, as in DeepSeek-V3."""
    sparse_every: int = 0
    """Every n-th layer is sparse, the others are dense; 0: the preset's, or 1."""
    router: Literal["softmax", "sigmoid"] | None = None
    """Scores of the experts from the router's logits, in float32; by default the preset's, or softmax."""
    router_normalize: bool | None = None
    """Divide the chosen experts' scores by their sum; by default as in the preset, or true."""
    router_bias: bool | None = None
    """A bias of the router's logits, as in gpt-oss."""
    router_scale: float = 0.0
    """Factor of the chosen experts' weights; 0: the preset's, or 1."""
    expert_groups: int = 0
    """Number of groups of neighbouring experts. A token uses experts of groups_per_token groups, those whose two best
    experts have the highest scores (DeepSeek-V3); 0: the preset's, or one group."""
    groups_per_token: int = 0
    """Number of groups that a token's experts are chosen from; 0: the preset's, or all."""
    capacity_factor: float = 0.0
    """In training, an expert takes at most this many times its equal share of a sequence's tokens, rounded up; further
    tokens that choose it skip it (Fedus et al. 2022). 0: the preset's, or no limit."""
    balance: Literal["none", "switch", "sequence", "bias"] | None = None
    """How the load of experts is balanced. sequence: an auxiliary loss over each sequence; switch: over each
    micro-batch of all data-parallel ranks (Fedus et al. 2022); bias: no loss, but a bias on the choice that changes
    after each step (Wang et al. 2024). By default the preset's, or sequence."""
    balance_loss: float = 0.0
    """Coefficient of the auxiliary loss; 0: 0.01 for switch and sequence, none for bias. With bias, the loss is over
    each sequence."""
    balance_rate: float = 0.0
    """Change of the bias per step; 0: 0.001."""
    router_z_loss: float = 0.0
    """Coefficient of the router's z-loss: the mean squared log-sum-exp of its logits (Zoph et al. 2022)."""

    def is_sparse(self, layer: int) -> bool:
        """Return whether the layer has experts in place of one MLP."""
        return self.experts > 0 and layer >= self.dense_layers and (layer + 1) % self.sparse_every == 0

    def layer_window(self, layer: int) -> int:
        """Return the tokens that a token of the layer attends to; 0: all before it."""
        every = self.full_attention_every
        return 0 if every and (layer + 1) % every == 0 else self.window or 0

    def attended(self, seq_len: int) -> float:
        """Return the tokens that FLOPs count for a token's attention, of a layer on average, as if it were not causal.

        All of a sequence; of a window twice as many as a token sees.
        """
        windows = map(self.layer_window, range(self.layers))
        return sum(min(seq_len, 2 * window or seq_len) for window in windows) / self.layers

    @property
    def sparse_layers(self) -> list[int]:
        """Return the numbers of the layers with experts."""
        return [layer for layer in range(self.layers) if self.is_sparse(layer)]

    @property
    def active_width(self) -> int:
        """Return the features inside the MLPs that a token passes, of a layer on average."""
        sparse = len(self.sparse_layers)
        chosen = (self.experts_per_token + self.shared_experts) * self.expert_width
        return (sparse * chosen + (self.layers - sparse) * self.ffn_width) // max(1, self.layers)

    def active_numel(self, name: str, numel: int) -> int:
        """Return the elements of a parameter that one token uses, of `numel`."""
        return numel * self.experts_per_token // self.experts if ".experts." in name else numel

    @property
    def q_width(self) -> int:
        """Return the features of all queries: heads x head_dim."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Features of all keys, or of all values: fewer than the queries' with grouped heads (Ainslie et al. 2023)."""
        return self.kv_heads * self.head_dim

    @property
    def value_width(self) -> int:
        """Return the features of all heads' outputs: heads x v_head_dim with latent attention, else the queries'."""
        return self.heads * (self.v_head_dim or self.head_dim)

    @property
    def attention_numel(self) -> int:
        """Return the elements of the matrices of a layer's attention."""
        if not self.kv_lora_rank:
            return 2 * self.width * (self.q_width + self.kv_width)
        queries = self.q_lora_rank * (self.width + self.q_width) or self.width * self.q_width
        compressed = self.width * (self.kv_lora_rank + self.qk_rope_head_dim)
        expanded = self.kv_lora_rank * (self.heads * self.qk_nope_head_dim + self.value_width)
        return queries + compressed + expanded + self.width * self.value_width

    @property
    def is_gated(self) -> bool:
        """Return whether the MLP has a gate: three matrices instead of two."""
        if self.mlp in MLPS:
            return self.mlp in GATED
        from training.model.own_parts import is_gated_by_user  # imports torch

        return is_gated_by_user(str(self.mlp))

    @property
    def rotary_dim(self) -> int:
        """Return the features of a head that are rotated."""
        return self.qk_rope_head_dim or int(self.head_dim * self.rope_fraction)

    @property
    def position_rows(self) -> int:
        """Return the rows of the learned positions."""
        return self.context + (self.position_offset or 0) if self.positions == "learned" else 0
