"""From signatures to the document that is kept: bands, union-find, similarity and keep policies, as mathematics."""
