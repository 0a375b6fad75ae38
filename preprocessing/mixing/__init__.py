"""Mixing: weighted sampling and the two-pass shuffle."""
