"""Benchmarks and the text that a model was trained on: items that are in it, and tasks made of what was held out."""
