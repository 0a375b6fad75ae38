"""Formats of corpus files: compressed streams, fields of a line of JSON, records of Arrow tables, file names."""
