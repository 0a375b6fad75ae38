"""Steps on documents that make what documents are compared by: a file each."""
