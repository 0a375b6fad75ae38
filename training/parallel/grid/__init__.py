"""Tensor parallelism over a grid of ranks: 2D (SUMMA) and 2.5D (Tesseract). Read summa.py first."""
