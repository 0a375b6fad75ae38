"""MinHash signatures: matching form, shingles, hashes, minima, and the shards they are stored in."""
