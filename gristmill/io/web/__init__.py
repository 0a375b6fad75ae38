"""Web archives and pages: records, bodies, charsets and the text of a page."""
