"""SentencePiece encoding, compiled: the ids that SentencePiece gives, many times as fast."""
