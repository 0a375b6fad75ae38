"""Words of messages: a number with its noun, in the singular for one; tables of Markdown."""

from collections.abc import Iterator, Sequence


def count_of(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: the plural, by default with an s, unless it is one.

    >>> count_of(1, "layer"), count_of(1_200, "layer"), count_of(2, "process", "processes")
    ('1 layer', '1,200 layers', '2 processes')
    """
    if number != 1:
        noun = plural or f"{noun}s"
    return f"{number:,} {noun}"


def verb_for(number: int, singular: str, plural: str) -> str:
    """Return the form of a verb that agrees with a number.

    >>> verb_for(1, "is", "are"), verb_for(0, "is", "are")
    ('is', 'are')
    """
    return singular if number == 1 else plural


def duration(seconds: float) -> str:
    """Return a time in seconds, minutes or hours.

    >>> duration(3.21), duration(600), duration(7_200), duration(3.6e6)
    ('3.2 s', '10.0 min', '2.0 h', '1,000 h')
    """
    if seconds < 120:
        return f"{seconds:.1f} s"
    number = seconds / 60
    unit = "min"
    if seconds >= 7200:
        number = seconds / 3600
        unit = "h"
    if number < 100:
        return f"{number:,.1f} {unit}"
    return f"{number:,.0f} {unit}"


def message_of(error: BaseException) -> str:
    """Return the first line of a library's message so that it continues a sentence of ours.

    >>> message_of(ValueError("Expected ']' at the end of a table declaration (at line 1, column 6)"))
    "expected ']' at the end of a table declaration (at line 1, column 6)"
    >>> message_of(ValueError("UTF-8 is required.")), message_of(ValueError())
    ('UTF-8 is required', 'ValueError')
    """
    line = str(error).strip().partition("\n")[0].rstrip(".")
    if line[:1].isupper() and line[1:2].islower():  # a word, not an abbreviation
        return line[0].lower() + line[1:]
    return line or type(error).__name__


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table of Markdown, with numbers on the right.

    >>> list(markdown_table(["a", "b"], [["x|y", "1"]]))
    ['| a | b |', '|---|---:|', '| x\\\\|y | 1 |']
    """
    yield "| " + " | ".join(head) + " |"
    yield "|---" + "|---:" * (len(head) - 1) + "|"
    for row in rows:
        cells = [cell.replace("|", "\\|") for cell in row]
        yield f"| {' | '.join(cells)} |"
