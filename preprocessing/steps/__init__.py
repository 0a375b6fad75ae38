"""Steps on documents that decide from one document alone: a file each."""
