"""Compressed streams: gzip, zstd, bzip2 and xz."""
