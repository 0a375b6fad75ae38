"""Rules of a recipe that rewrite a text: lines are left out, as by C4."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

_CITATION = re.compile(r"\[\d*]|\[edit]|\[citation needed]")
_LINE_ENDS = (".", "?", "!", '"', "'")
_POLICY = re.compile("terms of use|privacy policy|cookie policy|uses cookies|use of cookies|use cookies")


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

    def rewrite(self, text: str) -> tuple[str, Mapping[str, int]]:
        """Return the lines to keep, joined by newlines; no personal data is replaced."""
        return "\n".join(line for found in text.splitlines() if (line := self._keep(found))).strip(), {}

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
