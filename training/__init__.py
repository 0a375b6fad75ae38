"""Pre-training on token shards: one decoder, parallelised from outside. The only importer of torch."""
