"""Personal data and secrets in a text: mail and IP addresses, telephone numbers, cards, accounts, keys of clouds.

A pattern finds what looks like one, and what can be checked is: check digits, the length of an account by country, the
plan of telephone numbers. So a number that is not one stays.
"""

import ipaddress
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from types import MappingProxyType

from gristmill.errors import UsageError

_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_MAIL = re.compile(
    rf"://[^\s/?#@<>]*@"  # user of a URL, such as ssh://git@host: no address
    rf"|(?<![A-Za-z0-9])(?P<mail>[A-Za-z0-9](?:[A-Za-z0-9._%+'-]{{0,62}}[A-Za-z0-9_%+'-])?"
    rf"@(?:{_LABEL}\.){{1,8}}[A-Za-z](?:[A-Za-z0-9-]{{0,61}}[A-Za-z0-9]))(?![A-Za-z0-9]|:[\w.~-]+/)"
)
_IP = re.compile(r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?![\d.]*\d)")
_DOTTED = re.compile(r"\.\d{1,3}\.\d")  # without which there is no address, and which is found faster
_CARD = re.compile(r"(?<![\w.+-])\d(?:[ -]?\d){12,18}(?![\w-]|\.\d)")
# Beginnings and lengths that issuers have: Visa, Mastercard, American Express, Diners, Discover, JCB, UnionPay.
_ISSUED = re.compile(
    r"4\d{12}(?:\d{3}){0,2}|5[1-5]\d{14}|2(?:22[1-9]|2[3-9]\d|[3-6]\d\d|7[01]\d|720)\d{12}|3[47]\d{13}"
    r"|3(?:0[0-5]|[68]\d)\d{11}|6(?:011|5\d\d|4[4-9]\d)\d{12}|35(?:2[89]|[3-8]\d)\d{12}|62\d{14,17}"
)
_IBAN = re.compile(r"(?<![\w-])[A-Z]{2}\d{2}(?: ?[A-Z0-9]{4}){2,7}(?: ?[A-Z0-9]{1,3})?(?![\w-])")
_NUMBER = re.compile(r"\d[\d ()./-]{5,}\d")  # what a telephone number has
# As their issuers publish them: AWS, GitHub, GitLab, Google, Slack, Stripe, Hugging Face, npm, Azure, PEM.
_KEY = re.compile(
    r"\b(?:AKIA|ASIA)[A-Z2-7]{16}\b|\bgh[pousr]_[A-Za-z0-9]{36,255}\b|\bgithub_pat_\w{82}\b|\bglpat-[\w-]{20,}"
    r"|\bAIza[\w-]{35}(?![\w-])|\bxox[abposr]-[A-Za-z0-9-]{10,}|\b[rs]k_live_[A-Za-z0-9]{24,}\b|\bhf_[A-Za-z]{34}\b"
    r"|\bnpm_[A-Za-z0-9]{36}\b|(?<=AccountKey=)[A-Za-z0-9+/]{86}=="
    r"|-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----[\s\S]{0,8192}?-----END (?:[A-Z]+ )*PRIVATE KEY-----"
)
_KEY_SIGNS = (
    "AKIA", "ASIA", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-", "AIza", "xox", "k_live_",
    "hf_", "npm_", "AccountKey=", "PRIVATE KEY",
)  # fmt: skip  # without which there is no key, and which are found faster than the pattern
_LONGEST_RUN = 3  # groups of an account that may be a word after it
REPLACEMENTS = MappingProxyType(
    {
        "key": "<key>",
        "mail": "email@example.com",  # a domain that RFC 2606 keeps for documentation
        "ip": "192.0.2.1",  # an address that RFC 5737 keeps for documentation
        "iban": "XX00 0000 0000 0000",
        "card": "0000 0000 0000 0000",
        "phone": "+1 202 555 0100",  # numbers from 555 0100 on are kept for fiction
    }
)  # by kind, in the order in which they are looked for


@dataclass(frozen=True)
class PersonalRules:
    """Section personal of a recipe: what is replaced."""

    mail: bool = False
    """Replace mail addresses."""
    ip: bool = False
    """Replace public IPv4 addresses; private ones are kept."""
    phone: bool = False
    """Replace telephone numbers that begin with + and a country's code, or are of the region."""
    region: str = ""
    """Country, such as US or DE, whose numbers are telephone numbers without a country's code, too."""
    card: bool = False
    """Replace numbers of payment cards with a valid check digit (Luhn)."""
    iban: bool = False
    """Replace numbers of bank accounts (IBAN) with valid check digits (mod 97), as long as their country has them."""
    key: bool = False
    """Replace keys of AWS, GitHub, GitLab, Google, Slack, Stripe, Hugging Face, npm and Azure, and private keys."""

    def __post_init__(self) -> None:
        if self.region and not self.phone:
            raise UsageError(f"personal: region = {self.region!r} has no effect without phone = true")
        for library, is_needed in (("phonenumbers", self.phone), ("stdnum", self.card or self.iban)):
            if is_needed and find_spec(library) is None:
                raise UsageError(
                    f"personal: {library} is not installed, which checks numbers: pip install 'gristmill[personal]'"
                )
        if self.region:
            from phonenumbers import SUPPORTED_REGIONS

            if self.region not in SUPPORTED_REGIONS:
                raise UsageError(f"personal: region {self.region!r}: expected a country such as US, DE or IN")

    @property
    def libraries(self) -> tuple[str, ...]:
        """Return the distributions whose versions decide what is found."""
        libraries = list[str]()
        if self.card or self.iban:
            libraries.append("python-stdnum")
        if self.phone:
            libraries.append("phonenumbers")
        return tuple(libraries)

    def rewrite(self, text: str) -> tuple[str, Mapping[str, int]]:
        """Return the text with replacements, itself if it has nothing to replace, and how many there are by kind."""
        counts = dict[str, int]()
        for kind in REPLACEMENTS:
            if getattr(self, kind):
                text, count = self._replace(kind, text)
                if count:
                    counts[kind] = count
        return text, counts

    def _replace(self, kind: str, text: str) -> tuple[str, int]:
        """Return the text with all of a kind replaced, and how many there were."""
        if kind == "phone":
            return self._replace_phones(text)
        find = _FINDERS[kind]
        spans = find(text)
        return _put(text, spans, REPLACEMENTS[kind]), len(spans)

    def _replace_phones(self, text: str) -> tuple[str, int]:
        if not (self.region or "+" in text) or not _NUMBER.search(text):
            return text, 0
        from phonenumbers import Leniency, PhoneNumberMatcher

        matches = PhoneNumberMatcher(text, self.region or None, leniency=Leniency.VALID, max_tries=2**31)
        spans = [(match.start, match.end) for match in matches]
        return _put(text, spans, REPLACEMENTS["phone"]), len(spans)


def _put(text: str, spans: list[tuple[int, int]], replacement: str) -> str:
    """Return a text with all spans, in order, replaced."""
    if not spans:
        return text
    pieces = list[str]()
    last = 0
    for start, end in spans:
        pieces += [text[last:start], replacement]
        last = end
    return "".join([*pieces, text[last:]])


def _find_mails(text: str) -> list[tuple[int, int]]:
    if "@" not in text:
        return []
    return [match.span() for match in _MAIL.finditer(text) if match["mail"] is not None]


def _find_addresses(text: str) -> list[tuple[int, int]]:
    if not _DOTTED.search(text):
        return []
    return [match.span() for match in _IP.finditer(text) if _is_public(match[0])]


def _is_public(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_global
    except ValueError:
        return False


def _find_cards(text: str) -> list[tuple[int, int]]:
    from stdnum import luhn

    spans = list[tuple[int, int]]()
    for match in _CARD.finditer(text):
        digits = re.sub("[ -]", "", match[0])
        if _ISSUED.fullmatch(digits) and luhn.is_valid(digits):
            spans.append(match.span())
    return spans


def _find_accounts(text: str) -> list[tuple[int, int]]:
    """Return the spans of accounts; groups after one, such as a word in capitals, are not part of it."""
    from stdnum import iban

    spans = list[tuple[int, int]]()
    for match in _IBAN.finditer(text):
        account = match[0]
        for _ in range(_LONGEST_RUN + 1):
            if iban.is_valid(account):
                spans.append((match.start(), match.start() + len(account)))
                break
            account = account.rpartition(" ")[0]
    return spans


def _find_keys(text: str) -> list[tuple[int, int]]:
    if not any(sign in text for sign in _KEY_SIGNS):
        return []
    return [match.span() for match in _KEY.finditer(text)]


_FINDERS: Mapping[str, Callable[[str], list[tuple[int, int]]]] = MappingProxyType(
    {"mail": _find_mails, "ip": _find_addresses, "iban": _find_accounts, "card": _find_cards, "key": _find_keys}
)
