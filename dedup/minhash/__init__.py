"""MinHash signatures: matching form, shingles, hashes, minima, and signature shards."""
