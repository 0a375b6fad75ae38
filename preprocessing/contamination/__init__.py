"""Benchmarks kept out of a corpus: words and their n-grams, the index of a benchmark's items, the search in a text."""
