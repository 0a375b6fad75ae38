"""Gristmill: from raw text to a pre-trained language model."""

__version__ = "0.1.0"
