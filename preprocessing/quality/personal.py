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
        if self.mail and "@" in text:
            text = _MAIL.sub(_NOBODY, text)
        return _IP.sub(_replace_public, text) if self.ip else text


def _replace_public(found: re.Match[str]) -> str:
    try:
        return _NOWHERE if ipaddress.ip_address(found[0]).is_global else found[0]
    except ValueError:
        return found[0]
