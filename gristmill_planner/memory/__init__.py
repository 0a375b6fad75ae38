"""Formulas of the memory of a training process, from the sizes of a model and its layout."""
