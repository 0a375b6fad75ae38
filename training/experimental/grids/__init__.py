"""Tensor parallelism over a grid of ranks: 2D (SUMMA), 2.5D (Tesseract), 3D. Read summa.py first."""
