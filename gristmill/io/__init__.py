"""Files in and out: documents, key sets, token shards; written atomically."""
