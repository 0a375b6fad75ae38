"""Training of tokenizers, and SentencePiece encoding, compiled: its own ids, many times as fast."""
