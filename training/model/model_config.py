"""ModelConfig: a decoder's options, filled in, checked, and recorded."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from gristmill.arguments import one_of
from gristmill.errors import UsageError, require
from training.model.layer_options import (
    ROTATED_OR_NOT,
    check_experts,
    check_latent,
    check_rope,
    expert_defaults,
    latent_defaults,
    rope_defaults,
)
from training.model.model_options import MLPS, ModelOptions
from training.own_code import is_own, recorded_name
from training.presets.presets import find_preset


@dataclass(frozen=True)
class ModelConfig(ModelOptions):
    """Sizes of a decoder and variants of its layers. An option at its default takes the preset's value, or ours if the
    preset has none.
    """

    def merged_with(self, stored: Self) -> Self:
        """Fill in the values of a checkpoint's model, `stored`, but for those of `dropout` and `init_std`.

        Another preset is another model, with its own values.
        """
        if self.preset not in (ModelConfig.preset, stored.preset):
            return self
        mine = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        kept = replace(stored, dropout=self.dropout, init_std=self.init_std)
        if "balance" in mine:  # whose defaults are of each kind
            kept = replace(kept, balance_loss=0.0, balance_rate=0.0)
        return replace(kept, **mine)

    def resolve(self, vocab_size: int, seq_len: int) -> "ModelConfig":
        """Return a copy with every None and 0 default filled in. Raises UsageError if the sizes do not fit together."""
        self._check_names()
        given = self._with_preset()
        sizes = (given.layers, given.width, given.heads)
        require(min(sizes) > 0, f"model.layers, width and heads are {sizes}; expected every one above 0")
        step = given.heads * (2 if given.positions == "rope" else 1)  # of each head pairs of features are rotated
        require(
            max(given.head_dim, given.qk_nope_head_dim) > 0 or given.width % given.heads == 0,
            f"model.width {given.width} is not divisible by model.heads {given.heads}; try --model.width "
            f"{-(-given.width // step) * step}, or give --model.head_dim",
        )
        full = given._complete(vocab_size, seq_len)
        full.check(vocab_size, seq_len)
        return full

    def _check_names(self) -> None:
        """Raise UsageError for an MLP or block that is neither one of ours nor code of the user's."""
        if self.mlp not in MLPS and not is_own(self.mlp):
            advice = one_of(str(self.mlp), [name for name in MLPS if name])
            raise UsageError(f"model.mlp is {self.mlp}; {advice}, and FILE.py:NAME is one of yours")
        require(
            not self.block or is_own(self.block),
            f"model.block is {self.block}; expected FILE.py:CLASS, a block of yours; for ours try --model.residual",
        )

    @property
    def own_names(self) -> dict[str, str]:
        """Return the options whose value names code of the user's, FILE.py:NAME, with it."""
        values = {"model.mlp": str(self.mlp), "model.block": self.block}
        return {option: value for option, value in values.items() if is_own(value)}

    def _with_preset(self) -> Self:
        """Fill in the preset's values."""
        defaults = {field.name: field.default for field in fields(self)}
        options = find_preset(self.preset).options_given(self.rope_scaling, self.balance).items()
        return replace(self, **{key: value for key, value in options if getattr(self, key) == defaults[key]})

    def _complete(self, vocab_size: int, seq_len: int) -> Self:
        """Fill in every default that is no preset's, and check nothing."""
        given: dict[str, Any] = {name: getattr(self, name) for name in ("qkv_bias", "out_bias", "mlp_bias")}
        given = {name: self.bias if value is None else value for name, value in given.items()}
        latent = latent_defaults(self)
        gated = -(-8 * self.width // 3 // 32) * 32
        ffn_width = self.ffn_width or (gated if self.is_gated else 4 * self.width)
        return replace(
            self,
            mlp=self.mlp and recorded_name(self.mlp),
            block=recorded_name(self.block),
            **given,
            **latent,
            **rope_defaults(self),
            window=self.window or 0,
            position_offset=self.position_offset or 0,
            qk_norm=bool(self.qk_norm),
            sinks=bool(self.sinks),
            bias=self.bias if self.norm == "layer" else all(given.values()),  # it has no other effect then
            residual=self.residual or "pre-norm",
            embed_norm=bool(self.embed_norm),
            query_layer=bool(self.query_layer),
            kv_heads=self.kv_heads or self.heads,
            head_dim=self.head_dim or sum(latent[key] for key in ROTATED_OR_NOT) or self.width // max(1, self.heads),
            ffn_width=ffn_width,
            vocab_size=self.vocab_size or vocab_size,
            context=self.context or seq_len,
            qk_norm_joint=bool(self.qk_norm_joint),
            **expert_defaults(self, ffn_width),
        )

    def record(self) -> dict[str, Any]:
        """Return the fields of this resolved configuration, as records and the identities of runs have them.

        A field that the first records did not have is among them only where it changes something: runs that do not use
        it have the same record in every version.
        """
        newer: dict[str, Any] = {
            field.name: field.default for field in fields(self) if field.name not in ALWAYS_RECORDED
        }
        plain = replace(self, **newer, preset="llama")._with_preset()._complete(self.vocab_size, self.context)
        fields_now = asdict(self)
        kept = {key: value for key, value in fields_now.items() if key not in newer or value != getattr(plain, key)}
        again = self.from_record(kept)  # with it another option may have another default
        return kept | {key: value for key, value in fields_now.items() if value != getattr(again, key)}

    @classmethod
    def from_record(cls, values: Mapping[str, Any]) -> Self:
        """Return the resolved configuration in a record. Raises UsageError for fields unknown to this version."""
        try:
            plain = cls(**{**values, "preset": "llama"})._with_preset()._complete(0, 0)
        except TypeError as error:
            raise UsageError(f"the checkpoint was saved by a version with other model options ({error})") from error
        return replace(plain, preset=values.get("preset", "llama"))

    def check(self, vocab_size: int, seq_len: int) -> None:
        """Raise UsageError unless this resolved configuration fits the tokenizer and the sequence length."""
        sizes = (self.kv_heads, self.head_dim, self.ffn_width, self.vocab_size, self.context)
        require(min(sizes) > 0, f"model sizes are {sizes}; expected every one above 0")
        require(
            self.heads % self.kv_heads == 0,
            f"model.heads {self.heads} is not divisible by model.kv_heads {self.kv_heads}; try one of its divisors",
        )
        require(
            self.vocab_size >= vocab_size,
            f"model.vocab_size {self.vocab_size} is below the tokenizer's {vocab_size}; "
            f"try --model.vocab_size {vocab_size}",
        )
        require(
            self.context >= seq_len,
            f"model.context {self.context} is below data.seq_len {seq_len}; try --model.context {seq_len}",
        )
        require(
            (self.window or 0) >= 0,
            f"model.window is {self.window}; expected a window of 1 token or more, or 0 for none; try --model.window "
            f"{self.context}",
        )
        require(
            not self.window or self.positions != "alibi",
            f"model.window {self.window} and model.positions alibi: a window has no bias; try --model.window 0",
        )
        require(
            bool(self.window) or not self.full_attention_every,
            f"model.full_attention_every {self.full_attention_every} has no effect without a window; "
            "try --model.window 128",
        )
        require(
            not self.sinks or (self.positions != "alibi" and not self.kv_lora_rank),
            f"model.sinks with model.positions {self.positions} and model.kv_lora_rank {self.kv_lora_rank}: neither "
            "ALiBi nor latent attention has them; try --model.sinks false",
        )
        require(
            not self.position_offset or self.positions == "learned",
            f"model.position_offset {self.position_offset} needs learned positions, and model.positions is "
            f"{self.positions}; try --model.position_offset 0, or --model.positions learned",
        )
        require(
            not self.query_layer or (self.layers > 1 and self.residual == "pre-norm"),
            f"model.query_layer needs 2 layers or more, and pre-norm, and this model has {self.layers} and "
            f"{self.residual}; try --model.query_layer false",
        )
        require(
            not self.qk_norm_joint or bool(self.qk_norm),
            "model.qk_norm_joint needs model.qk_norm, which is false; try --model.qk_norm true, or leave it out",
        )
        require(
            not self.block or (self.residual == "pre-norm" and not self.query_layer),
            f"model.block is {self.block}, with model.residual {self.residual} and model.query_layer "
            f"{str(bool(self.query_layer)).lower()}, which are blocks of ours; try --model.residual pre-norm "
            "--model.query_layer false",
        )
        require(
            not is_own(self.mlp) or not self.experts,
            f"model.mlp is {self.mlp}, and model.experts {self.experts}: experts are MLPs of ours; try "
            "--model.experts 0",
        )
        check_rope(self)
        check_latent(self)
        check_experts(self)
        require(0 <= self.dropout < 1, f"model.dropout is {self.dropout}; expected 0 <= dropout < 1")


# fields of the first records; of later ones those that a record omits have their default
ALWAYS_RECORDED = frozenset({
    "preset", "layers", "width", "heads", "kv_heads", "ffn_width", "vocab_size", "context", "norm", "positions", "mlp",
    "bias", "tied", "dropout", "rope_base", "norm_eps", "init_std",
})  # fmt: skip


def is_lookup(name: str) -> bool:
    """Return True for an embedding, which takes part in no product; a tied output matrix is counted apart."""
    return name.startswith("embed.") or name.endswith("attention.query.weight")
