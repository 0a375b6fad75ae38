"""Rules of a recipe that rewrite a text: lines are left out, as by C4; mail and IP addresses are replaced."""

import ipaddress
import re
from dataclasses import dataclass

_CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")
_LINE_ENDS = (".", "?", "!", '"', "'")
_POLICY = re.compile("terms of use|privacy policy|cookie policy|uses cookies|use of cookies|use cookies")
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_MAIL = re.compile(
    rf"://[^\s/?#@<>]*@"  # user of a URL, such as ssh://git@host: no address
    rf"|(?<![A-Za-z0-9])(?P<mail>[A-Za-z0-9](?:[A-Za-z0-9._%+'-]{{0,62}}[A-Za-z0-9_%+'-])?"
    rf"@(?:{_LABEL}\.){{1,8}}[A-Za-z](?:[A-Za-z0-9-]{{0,61}}[A-Za-z0-9]))(?![A-Za-z0-9]|:[\w.~-]+/)"
)
_IP = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.]*\d)")
_NOBODY = "email@example.com"  # a domain that RFC 2606 keeps for documentation
_NOWHERE = "192.0.2.1"  # an address that RFC 5737 keeps for documentation


@dataclass(frozen=True)
class LineRules:
    """Section lines of a recipe. Each line is stripped; those that a rule is against are left out."""

    end_punctuation: bool = False
    """Keep lines that end in . ? ! or a quote alone, and not in an ellipsis."""
    min_words: int = 0
    """Fewest words, as separated by spaces, of a line."""
    max_word_length: int = 0
    """Most characters of a word, as separated by spaces; 0: any."""
    javascript: bool = True
    """Keep lines that mention JavaScript."""
    policy: bool = True
    """Keep lines on cookies, terms of use and privacy policies."""
    citations: bool = True
    """Keep [1], [edit] and [citation needed]."""

    def rewrite(self, text: str) -> tuple[str, int]:
        """The lines to keep, joined by newlines; no address is replaced."""
        return "\n".join(line for found in text.splitlines() if (line := self._keep(found))).strip(), 0

    def _keep(self, line: str) -> str:
        line = line.strip()
        words = line.split()
        if self.max_word_length and len(line) > self.max_word_length and max(map(len, words)) > self.max_word_length:
            return ""
        if not self.citations and "[" in line:
            line = _CITATION.sub("", line)
        if self.end_punctuation and (not line.endswith(_LINE_ENDS) or line.endswith("...")):
            return ""
        if len(words) < self.min_words:
            return ""
        lower = line.lower()
        if (not self.javascript and "javascript" in lower) or (not self.policy and _POLICY.search(lower)):
            return ""
        return line


@dataclass(frozen=True)
class PersonalRules:
    """Section personal of a recipe: what is replaced."""

    mail: bool = False
    """Replace mail addresses by email@example.com."""
    ip: bool = False
    """Replace public IPv4 addresses by 192.0.2.1; private ones are kept."""

    def rewrite(self, text: str) -> tuple[str, int]:
        """The text with replacements, itself if it has no such address, and how many there are."""
        mails = 0
        public = 0
        if self.mail and "@" in text:
            mails = sum(match["mail"] is not None for match in _MAIL.finditer(text))
            text = _MAIL.sub(lambda match: _NOBODY if match["mail"] else match[0], text)
        if self.ip:
            public = sum(_is_public(found) for found in _IP.findall(text))
            text = _IP.sub(lambda found: _NOWHERE if _is_public(found[0]) else found[0], text) if public else text
        return text, mails + public


def _is_public(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_global
    except ValueError:
        return False
