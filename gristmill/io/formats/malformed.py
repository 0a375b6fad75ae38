"""Malformed: the reason why a record is not a document."""


class Malformed(Exception):
    """A record that is not a document. `reason` is one of a few, to count by; `detail` is about this record."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}{detail and ', ' + detail}")
        self.reason = reason
