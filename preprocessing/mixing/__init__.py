"""Mixing: documents to drop, epochs per source, and the two-pass shuffle."""
