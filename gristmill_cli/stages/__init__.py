"""The stages of `gristmill run`: one description each, and the list of all in pipeline.py."""
