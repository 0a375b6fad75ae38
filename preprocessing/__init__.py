"""Stages that decide from one document, or sample: normalise, filter, mix, shuffle, split, tokenise."""
