"""Spans of bytes that a corpus repeats: finding them by blocks that the text itself chooses, and cutting them."""
