"""Candidate pairs and clusters: LSH bands, joins by hash and by sort, exact copies, connected components."""
