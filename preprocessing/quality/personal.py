"""Personal data: mail addresses and public IP addresses are replaced by addresses that are nobody's."""

import ipaddress
import re
from dataclasses import dataclass

_MAIL = re.compile(r"(?<![\w.+-])[A-Za-z0-9!#$%&'*+/=?^_`{|}~.-]{1,64}@(?:[A-Za-z0-9-]{1,63}\.){1,8}[A-Za-z0-9-]{2,63}")
_IP = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.]*\d)")
_NOBODY, _NOWHERE = "email@example.com", "192.0.2.1"  # RFC 2606 and RFC 5737: for documentation


@dataclass(frozen=True)
class PersonalRules:
    """Section personal of a recipe: what is replaced."""

    mail: bool = False
    """Replace mail addresses by email@example.com."""
    ip: bool = False
    """Replace public IPv4 addresses by 192.0.2.1; private ones are kept."""

    def rewrite(self, text: str) -> str:
        """The text with replacements; itself if it has no such address."""
        return self.replace(text)[0]

    def replace(self, text: str) -> tuple[str, int]:
        """The text with replacements, and how many there are."""
        mails, public = 0, 0
        if self.mail and "@" in text:
            text, mails = _MAIL.subn(_NOBODY, text)
        if self.ip:
            public = sum(_is_public(found) for found in _IP.findall(text))
            text = _IP.sub(lambda found: _NOWHERE if _is_public(found[0]) else found[0], text) if public else text
        return text, mails + public


def _is_public(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_global
    except ValueError:
        return False
