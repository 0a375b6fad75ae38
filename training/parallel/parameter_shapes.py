"""Parameter shapes of a decoder as its sizes give them, cut by tensor parallelism (Shoeybi et al. 2019, section 3)."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from training.model.model_config import ModelConfig
from training.model.own_shapes import own_shapes
from training.parallel.tensor.options import kv_copies


@dataclass(frozen=True)
class ParameterShape:
    """A parameter on one tensor-parallel rank; the first one has the most of it."""

    name: str
    shape: tuple[int, ...]
    divided: bool
    """True if the tensor-parallel ranks hold different parts of it; otherwise each has all of it."""
    unit: str
    """What is gathered at once with it under ZeRO-3: "embed", the block's number, or "head"; of experts that have
    replicas of their own "experts" with the number."""
    copies: int = 1
    """Neighbouring tensor-parallel ranks that hold the same part of it, each of which has a term of its gradient."""
    of_heads: bool = False
    """True if each tensor-parallel rank applies all of it to its own heads, or experts' parts: its gradient is a sum
    over the ranks."""

    @property
    def of_experts(self) -> bool:
        """Return whether it has replicas of its own: those of the experts that a rank has."""
        return self.unit.startswith("experts")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def rows_numel(self, parts: int, rank: int = 0) -> int:
        """Return the elements in the rows of one of `parts` ranks.

        The first one has the most, the last ones may have none.
        """
        rows = -(-self.shape[0] // parts)
        return max(0, min(rows, self.shape[0] - rank * rows)) * math.prod(self.shape[1:])

    def padded_numel(self, parts: int) -> int:
        """Return the elements with the rows padded to a multiple of `parts`."""
        return parts * self.rows_numel(parts)


def stage_parameters(
    model: ModelConfig, layers: range, first: bool, last: bool, tp: int = 1, tp_rank: int = 0, ep: int = 1
) -> list[ParameterShape]:
    """Return the parameters of a pipeline stage, or of the unsplit decoder, in the order of the forward pass.

    A tied output matrix is the embedding's where one stage has both.
    """
    width = model.width
    rows = -(-model.vocab_size // tp)
    vocabulary = min(rows, model.vocab_size - tp_rank * rows)
    shapes: list[ParameterShape] = []
    if first:
        shapes.append(ParameterShape("embed.tokens.weight", (vocabulary, width), tp > 1, "embed"))
        if model.positions == "learned":
            shapes.append(ParameterShape("embed.positions.weight", (model.position_rows, width), False, "embed"))
        if model.embed_norm:
            shapes.extend(_norm(model, "embed.embed_norm", "embed"))
    for layer in layers:
        shapes.extend(_block(model, str(layer), tp, ep))
    if last:
        shapes.extend(_norm(model, "norm", "head") if not model.query_layer else [])
        if not (model.tied and first):
            shapes.append(ParameterShape("head.weight", (vocabulary, width), tp > 1, "head"))
    return shapes


def _block(model: ModelConfig, layer: str, tp: int, ep: int) -> Iterator[ParameterShape]:
    width = model.width
    prefix = f"blocks.{layer}.attention"
    has_queries = model.query_layer and int(layer) == model.layers - 1
    yield from _norm(model, f"{prefix}_norm", layer)
    yield from _latent(model, layer, tp) if model.kv_lora_rank else _heads(model, layer, tp)
    matrix = ParameterShape(f"{prefix}.o.weight", (width, model.value_width // tp), tp > 1, layer)
    yield from _with_bias(matrix, bool(model.out_bias), False)
    if has_queries:
        query = ParameterShape(f"{prefix}.query.weight", (model.context, width), False, layer)
        yield replace(query, of_heads=True)
    yield from _norm(model, f"blocks.{layer}.mlp_norm", layer)
    sparse = model.is_sparse(int(layer))
    own = _own(model, layer, tp)
    yield from (p for p in own if ".mlp." not in p.name)
    if any(".mlp." in p.name for p in own):
        yield from (p for p in own if ".mlp." in p.name)
        return
    yield from _sparse(model, layer, tp, ep) if sparse else _dense(model, layer, tp, "mlp", model.ffn_width // tp)
    if has_queries:
        yield from _norm(model, f"blocks.{layer}.input_norm", layer)


def _own(model: ModelConfig, layer: str, tp: int) -> list[ParameterShape]:
    """Return the parameters of own parts of the user's, as they say that they are divided."""
    shapes = []
    for name, (placement, shape) in own_shapes(model, int(layer)).items():
        divided = placement in ("colwise", "rowwise")
        dim = 1 if placement == "rowwise" else 0
        cut = tuple(size // tp if divided and i == dim else size for i, size in enumerate(shape))
        full = f"blocks.{layer}.{name}"
        shapes.append(ParameterShape(full, cut, divided and tp > 1, layer, of_heads=placement == "partial"))
    return shapes


def _heads(model: ModelConfig, layer: str, tp: int) -> Iterator[ParameterShape]:
    """Yield the queries, keys and values, and their norms."""
    q = model.q_width // tp
    copies = kv_copies(model, tp)
    prefix = f"blocks.{layer}.attention"
    kv = model.kv_width * copies // tp
    if model.sinks:
        yield ParameterShape(f"{prefix}.sinks", (model.heads // tp,), tp > 1, layer)
    for name, features, held in (("q", q, 1), ("k", kv, copies), ("v", kv, copies)):
        matrix = ParameterShape(f"{prefix}.{name}.weight", (features, model.width), tp > 1, layer, held)
        yield from _with_bias(matrix, bool(model.qkv_bias), tp > 1)
    if model.qk_norm:
        joint = bool(model.qk_norm_joint)
        for name, features, held in (("q_norm", q, 1), ("k_norm", kv, copies)):
            for p in _norm(model, f"{prefix}.{name}", layer, features if joint else model.head_dim):
                yield replace(p, divided=tp > 1, copies=held) if joint else replace(p, of_heads=True)


def _latent(model: ModelConfig, layer: str, tp: int) -> Iterator[ParameterShape]:
    """Latent attention: the matrices to the compressed vectors, their norms, and the matrices to this rank's heads."""
    width = model.width
    rank = model.q_lora_rank
    kv_rank = model.kv_lora_rank
    q = model.q_width
    rows: list[tuple[str, tuple[int, ...], bool]] = [("q", (q, width), True)]
    if rank:
        rows = [("q_a", (rank, width), False), ("q_a_norm", (rank,), False), ("q_b", (q, rank), True)]
    rows += [("kv_a", (kv_rank + model.qk_rope_head_dim, width), False), ("kv_a_norm", (kv_rank,), False)]
    rows += [("kv_b", (model.heads * model.qk_nope_head_dim + model.value_width, kv_rank), True)]
    for name, (features, *inputs), divided in rows:
        shape = (features // tp if divided else features, *inputs)
        full_name = f"blocks.{layer}.attention.{name}.weight"
        yield ParameterShape(full_name, shape, divided and tp > 1, layer, of_heads=not divided)


def _dense(model: ModelConfig, layer: str, tp: int, module: str, ffn: int) -> Iterator[ParameterShape]:
    """Yield an MLP, of `ffn` features on a rank."""
    for name in ("gate", "up")[not model.is_gated :]:
        matrix = ParameterShape(f"blocks.{layer}.{module}.{name}.weight", (ffn, model.width), tp > 1, layer)
        yield from _with_bias(matrix, bool(model.mlp_bias), tp > 1)
    matrix = ParameterShape(f"blocks.{layer}.{module}.down.weight", (model.width, ffn), tp > 1, layer)
    yield from _with_bias(matrix, bool(model.mlp_bias), False)


def _sparse(model: ModelConfig, layer: str, tp: int, ep: int) -> Iterator[ParameterShape]:
    """Router, experts and shared experts; each rank's router weights its own parts of the experts' outputs."""
    width = model.width
    ffn = model.expert_width // tp
    prefix = f"blocks.{layer}.mlp"
    router = ParameterShape(f"{prefix}.router.weight", (model.experts, width), False, layer, of_heads=True)
    yield from _with_bias(router, bool(model.router_bias), False)
    unit = f"experts {layer}" if ep > 1 else layer
    count = model.experts // ep
    for name, shape in (("gate", (ffn, width)), ("up", (ffn, width)), ("down", (width, ffn))):
        matrix = ParameterShape(f"{prefix}.experts.{name}.weight", (count, *shape), tp > 1, unit)
        yield matrix
        if model.mlp_bias:
            bias = replace(matrix, name=f"{prefix}.experts.{name}.bias", shape=(count, shape[0]))
            yield replace(bias, divided=False, of_heads=True) if name == "down" else bias
    if model.shared_experts:
        yield from _dense(model, layer, tp, "mlp.shared", model.shared_experts * ffn)


def _with_bias(matrix: ParameterShape, bias: bool, divided_bias: bool) -> Iterator[ParameterShape]:
    yield matrix
    if bias:
        name = matrix.name.removesuffix("weight") + "bias"
        yield replace(matrix, name=name, shape=matrix.shape[:1], divided=divided_bias)


def _norm(model: ModelConfig, name: str, unit: str, features: int = 0) -> Iterator[ParameterShape]:
    yield ParameterShape(f"{name}.weight", (features or model.width,), False, unit)
    if model.norm == "layer" and model.bias:
        yield ParameterShape(f"{name}.bias", (features or model.width,), False, unit)


def pack_buckets(parameters: Sequence[ParameterShape], numel: int) -> list[list[ParameterShape]]:
    """Return the consecutive parameters, last ones first, of up to `numel` elements together (Li et al.

    2020, section 3.2.3).

    A larger one is alone.
    """
    buckets: list[list[ParameterShape]] = []
    size = numel
    for p in reversed(parameters):
        if size + p.numel > numel:
            buckets.append([])
            size = 0
        buckets[-1].append(p)
        size += p.numel
    return buckets
