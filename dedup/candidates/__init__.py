"""Candidate pairs and clusters: banded LSH, the external join, connected components, exact copies."""
