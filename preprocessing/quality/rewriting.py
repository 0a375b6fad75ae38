"""Rules of a recipe that rewrite a text: lines are left out, as by C4."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")
_LINE_ENDS = (".", "?", "!", '"', "'")
_JAVASCRIPT = ("javascript",)
_POLICY = ("terms of use", "privacy policy", "cookie policy", "uses cookies", "use of cookies", "use cookies")


@dataclass(frozen=True)
class LineRules:
    """Section lines of a recipe. Each line is stripped; lines that a rule is against are left out."""

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

    def rewrite(self, text: str) -> tuple[str, Mapping[str, int]]:
        """Return the lines to keep, joined by newlines; no personal data is replaced."""
        phrases = self._phrases_in(text)
        lines = list[str]()
        for line in text.splitlines():
            kept = self._keep(line.strip(), phrases)
            if kept:
                lines.append(kept)
        return "\n".join(lines).strip(), {}

    def _phrases_in(self, text: str) -> list[str]:
        """Return the phrases of a text for which a line that has one is left out: nearly always none."""
        unwanted = list[str]()
        if not self.javascript:
            unwanted += _JAVASCRIPT
        if not self.policy:
            unwanted += _POLICY
        if not unwanted:
            return []
        lower = text.lower()
        return [phrase for phrase in unwanted if phrase in lower]

    def _keep(self, line: str, phrases: list[str]) -> str:
        """Return what is kept of a line: empty if nothing is."""
        max_length = self.max_word_length
        if max_length and len(line) > max_length and max(map(len, line.split()), default=0) > max_length:
            return ""
        if self.min_words and len(line.split(maxsplit=self.min_words)) < self.min_words:
            return ""
        if not self.citations and "[" in line:
            line = _CITATION.sub("", line)
        if self.end_punctuation and (not line.endswith(_LINE_ENDS) or line.endswith("...")):
            return ""
        if phrases:
            lower = line.lower()
            if any(phrase in lower for phrase in phrases):
                return ""
        return line
