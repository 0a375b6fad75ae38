"""File formats: corpora, key sets, pickles, token shards; sorting on disk; atomic writes."""
