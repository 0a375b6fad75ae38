"""Fixed-length sequences from token shards, and the batches of each step."""
