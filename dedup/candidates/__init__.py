"""Signature shards, candidate pairs and clusters: LSH band joins, exact copies, connected components."""
