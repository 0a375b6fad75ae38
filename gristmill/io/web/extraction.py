"""The text of an HTML page: its main content, without menus and footers, or all that a browser shows."""

from typing import Literal, get_args

from gristmill.errors import UsageError

Extract = Literal["main", "all"]
EXTRACTS: tuple[str, ...] = get_args(Extract)


def text_of_page(page: str, extract: Extract = "main") -> str:
    """Return the text of an HTML page. Raises UsageError where the library is missing."""
    try:
        from resiliparse.extract.html2text import extract_plain_text
    except ImportError as error:
        raise UsageError("to read HTML pages: pip install 'gristmill[web]'") from error
    text: str = extract_plain_text(page, main_content=extract == "main", alt_texts=False)
    return text
