"""Layer work: the products and the memory traffic of a decoder layer and of the head, on one tensor-parallel rank.

b sequences of s tokens, h width, f feed-forward width, a heads of d features, V vocabulary, t tensor-parallel ranks.
"""

from dataclasses import dataclass

from training.model.model_config import ModelConfig


@dataclass(frozen=True)
class Product:
    """`count` products of an m x k by a k x n matrix."""

    m: float
    n: float
    k: float
    count: float = 1.0

    @property
    def flops(self) -> float:
        """A multiplication and an addition each: 2 m n k."""
        return 2.0 * self.count * self.m * self.n * self.k

    @property
    def elements(self) -> float:
        """Read and written, if each matrix passes once."""
        return self.count * (self.m * self.k + self.k * self.n + self.m * self.n)

    def backward(self) -> "tuple[Product, Product]":
        """The products for the gradients of the input and of the weights."""
        return Product(self.m, self.k, self.n, self.count), Product(self.k, self.n, self.m, self.count)


@dataclass(frozen=True)
class Work:
    """What a layer or the head computes in a forward pass."""

    products: tuple[Product, ...]
    traffic: float
    """Bytes that the kernels beside the products read and write, in 16 bits; twice that in a backward pass."""
    attention: tuple[Product, ...] = ()
    """Those of the products that are of queries and keys, and of weights and values."""

    @property
    def flops(self) -> float:
        return sum(product.flops for product in self.products)


def layer_work(model: ModelConfig, sequences: float, seq_len: int, tp: int, shards: int, flash: bool) -> Work:
    """Work of one decoder layer; its norms and residual sums see 1 / `shards` of the tokens.

    `flash`: attention's weights never leave the chip (Dao et al. 2022); else the softmax reads and writes b a s² / t.
    """
    tokens, width, heads, head_dim = sequences * seq_len, model.width, model.heads / tp, model.head_dim
    attention, ffn = model.q_width / tp, model.ffn_width / tp
    up = ffn * (2 if model.is_gated else 1)
    of_heads = attention_products(seq_len, head_dim, sequences * heads)
    products = (
        Product(tokens, attention + 2 * model.kv_width / tp, width),
        *of_heads,
        Product(tokens, width, attention),
        Product(tokens, up, width),
        Product(tokens, width, ffn),
    )
    whole = (2 * 2 + 2 * 3) * width / shards  # two norms, and two sums with the residual stream
    divided = 2 * attention + up + ffn  # attention's output rearranged, and the activation function
    weights = 0.0 if flash else 2 * heads * seq_len
    return Work(products, 2.0 * tokens * (whole + divided + weights), of_heads)


def attention_products(seq_len: int, head_dim: int, count: float) -> tuple[Product, Product]:
    """Of queries and keys, and of weights and values, of `count` heads of sequences; as if all tokens saw all."""
    return Product(seq_len, seq_len, head_dim, count), Product(seq_len, head_dim, seq_len, count)


def head_work(model: ModelConfig, sequences: float, seq_len: int, tp: int) -> Work:
    """Work of the output matrix and the loss, which reads or writes each logit about ten times in float32."""
    tokens, vocabulary = sequences * seq_len, -(-model.vocab_size // tp)
    return Work((Product(tokens, vocabulary, model.width),), 40.0 * tokens * vocabulary)


def model_flops(model: ModelConfig, sequences: int, seq_len: int, recompute: str = "none") -> float:
    """FLOPs of a step over `sequences`, backward pass and what is computed again included.

    72 B s L h² (1 + s / 6h + V / 12Lh) without recomputation, 96 B s L h² (1 + s / 6h + V / 16Lh) with all layers
    computed again (Narayanan et al. 2021, equation 3), for f = 4h; other shapes by their products.
    """
    layers = model.layers * layer_work(model, 1, seq_len, 1, 1, True).flops
    head = head_work(model, 1, seq_len, 1).flops
    again = {"none": 0.0, "selective": 0.0, "full": layers}[recompute]
    return sequences * (3 * (layers + head) + again)
