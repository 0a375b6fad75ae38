"""Words of messages: a number with its noun, in the singular for one."""


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
