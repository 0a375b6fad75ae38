"""Formulas of memory and traffic, from the sizes of a model and its layout; they use nothing of what they predict."""
