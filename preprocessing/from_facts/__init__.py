"""Stages of a run that read the facts of documents, which steps noted, and no text."""
