"""The text of an HTML page: its main content, without menus and footers, or all of its text.

resiliparse decides what is main content. Some of its rules remove content, too: lists (`<ul>`) with fewer than three
elements above them, figures with a table or code, dates in the middle of a sentence, and a Chinese character, quotation
mark or dash that stands alone between two tags. Pages are rewritten before extraction so that these rules do not match.
"""

import html
import re
from typing import TYPE_CHECKING

from gristmill.errors import UsageError
from gristmill.io.documents import Extract

if TYPE_CHECKING:
    from resiliparse.parse.html import ElementNode, HTMLTree, Node

# their texts are for browsers that cannot show them
_MEDIA = ["object", "video", "audio", "embed", "img", "area", "svg"]
_CAPTIONED = "figure:has(table, pre, blockquote)"  # figures of text; a figure of pictures is no main content
_PICTURES = [f"figure:not({_CAPTIONED})", f"figcaption:not({_CAPTIONED} figcaption)"]
_LISTS = "body > ul, body > * > ul, body > * > * > ul"
_LIST_DEPTH = 3  # a list with as many elements above it is removed only if it consists of links
_BLOCKS = "summary, legend"  # resiliparse joins their text to the next line
_DATES = ":is(p, li, dd, td, th, blockquote) > time"
_TITLES = ":is(h1, h2, h3, h4, h5, h6, summary, dt) button"  # titles of sections that open and close
_LONE_CHARACTER = re.compile(r">\s*([\u0800-\uffff]|&#?\w+;)(?=\s*(?:<|\Z))")
_ICONS = range(0xE000, 0xF900)  # private use area
# bytes of memory, measured: for each byte of a page, and for what its tree consists of
MEMORY_A_BYTE = 24
_MEMORY_OF_TEXT = 10
_MEMORY_OF = {b"<": 600, b"=": 670, b"<ul": 1700, b"<UL": 1700}
# elements deeper than browsers nest them; resiliparse needs time with the square of the depth of <div> and <figure>
_MAX_DEPTH = 512
_TOO_DEEP = "body" + " > *" * _MAX_DEPTH
_VOID = "area|base|br|col|embed|hr|img|input|link|meta|source|track|wbr"  # elements of HTML without an end tag
_EMPTY_ELEMENT = re.compile(
    rf"""(?i)<(?!(?:{_VOID})\b)([a-z][\w:.-]*)((?:\s+[\w:.-]+\s*=\s*(?:"[^"<]*"|'[^'<]*'))*)\s*/>"""
)
_CDATA = re.compile(r"(?s)<!\[CDATA\[(.*?)\]\]>")
_MARK = "\ufdd0"  # put after a lone character, which is then not alone; Unicode has no character here


def text_of_page(page: str, extract: Extract = "main") -> str:
    """Return the text of an HTML page. Raises UsageError where the library is missing."""
    try:
        from resiliparse.extract.html2text import extract_plain_text
        from resiliparse.parse.html import HTMLTree
    except ImportError as error:
        raise UsageError("to read HTML pages: pip install 'gristmill[web]'") from error
    is_main = extract == "main"
    is_marked = is_main and _MARK not in page
    parsed = _mark_lone_characters(page) if is_marked else page
    tree = HTMLTree.parse(parsed)
    if tree.body is None:
        return ""
    if is_main and tree.body.query_selector(_TOO_DEEP):
        return text_of_page(page, "all")
    _wrap(tree, _BLOCKS, 1)
    skipped = _MEDIA
    if is_main:
        _wrap(tree, _LISTS, _LIST_DEPTH)
        for element in _select(tree, f"{_DATES}, {_TITLES}"):
            _replace(element, tree.create_text_node(element.text or ""))
        skipped = _MEDIA + _PICTURES
    # without alternative texts it removes all figures
    text: str = extract_plain_text(tree, main_content=is_main, alt_texts=True, skip_elements=skipped)
    if is_marked:
        text = text.replace(_MARK, "")
    return text


def page_memory(content: bytes) -> int:
    """Return how many bytes of memory it takes to read a page: its tree may have a hundred times its size."""
    tree = sum(size * content.count(pattern) for pattern, size in _MEMORY_OF.items())
    return max(len(content) * MEMORY_A_BYTE, len(content) * _MEMORY_OF_TEXT + tree)


def html_of_xhtml(page: str) -> str:
    """Return a page in XHTML as one in HTML: with end tags for empty elements, and without CDATA.

    >>> html_of_xhtml("<title/><br/><p class='a'/><![CDATA[a < b]]>")
    "<title></title><br/><p class='a'></p>a &lt; b"
    """
    if "<![CDATA[" in page:
        page = _CDATA.sub(lambda match: html.escape(match[1], quote=False), page)
    return _EMPTY_ELEMENT.sub(r"<\1\2></\1>", page)


def _mark_lone_characters(page: str) -> str:
    """Put a mark after every character that stands alone between two tags, or a tag and an end of the page."""
    return _LONE_CHARACTER.sub(_mark, f">{page}")[1:]


def _mark(match: re.Match[str]) -> str:
    """Return the text between two tags, with a mark if it is one character that resiliparse takes for an icon."""
    character = html.unescape(match[1])
    if len(character) == 1 and character.isprintable() and ord(character) not in _ICONS:
        return match[0] + _MARK
    return match[0]


def _wrap(tree: "HTMLTree", selector: str, times: int) -> None:
    """Wrap every selected element in this many nested <div>."""
    for element in _select(tree, selector):
        for _ in range(times):
            wrapper = tree.create_element("div")
            assert wrapper is not None
            _replace(element, wrapper)
            wrapper.append_child(element)


def _select(tree: "HTMLTree", selector: str) -> "list[ElementNode]":
    """Return the selected elements as a list: resiliparse's own collects all of them again for each index."""
    assert tree.body is not None
    return tree.body.query_selector_all(selector).values()


def _replace(element: "ElementNode", new: "Node | None") -> None:
    parent = element.parent
    assert parent is not None
    assert new is not None
    parent.replace_child(new, element)
