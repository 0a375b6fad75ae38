"""Near-duplicates: MinHash signatures, LSH pairs, connected components, what to remove."""
