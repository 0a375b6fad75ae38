"""The report: one HTML page of a run, for a browser, without network."""
