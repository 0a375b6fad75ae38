"""Local files and objects in buckets under one set of functions, named by paths."""
