"""Estimate of what `gristmill run` costs on a corpus, from a sample of it that is run on this machine."""
