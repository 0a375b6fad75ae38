"""Formula of the peak memory of one process that trains in bf16, to set beside what a GPU measures.

B sequences of T tokens, width D, F features in the MLP, K = key and value features, L layers, V words, P parameters.
"""

from typing import Any

_STATES = 4 + 8 + 2 + 4  # bytes a parameter: float32 weight, AdamW's two moments, bf16 copy, float32 gradient


def peak_bytes(options: dict[str, Any], parameters: int) -> float:
    """Bytes at the end of the forward pass, when all activations are alive beside the states; float32 logits not.

    `options`: the trainer's, such as "model.width". The loss is computed in chunks, which keep the gradient of the
    features (B, T, D) and of the output matrix, and no logits.
    """
    tokens = options["data.batch_size"] * options["data.seq_len"]
    width, layers = options["model.width"], options["model.layers"]
    mode = options.get("memory.recompute", "none")
    per_token = 2 * layers * _saved_features(options, mode) + 2 * 4 * width  # and the last norm's, the loss's
    if mode != "none":
        per_token += 2 * _saved_features(options, "none")  # of the one block that is computed again
    states = _STATES - (8 if options.get("memory.optimizer", "device") != "device" else 0)
    return states * parameters + tokens * per_token


def _saved_features(options: dict[str, Any], mode: str) -> int:
    """Features a token that a block keeps for its backward pass.

    full: its input (Chen et al. 2016). selective: also the outputs of matrix products and of attention (Korthikanti et
    al. 2022, section 5). none: also norms, rotated queries and keys, and the MLP's activation.
    """
    width = options["model.width"]
    gated = options.get("model.preset", "llama") == "llama"
    kv = width * options.get("model.kv_heads", options["model.heads"]) // options["model.heads"]
    ffn = options.get("model.ffn_width", 4 * width)
    if mode == "full":
        return width
    projections = width + 2 * kv
    products = projections + width + width + (2 * ffn if gated else ffn) + width  # q k v, attention, o, gate up, down
    if mode == "selective":
        return width + products
    attention = projections + 2 * width  # rotated q and k, v; the mixed values, and their copy in another order
    return 2 * width + attention + 2 * width + (4 * ffn if gated else 2 * ffn)
