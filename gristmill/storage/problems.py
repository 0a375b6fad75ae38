"""Errors of object stores in a user's words: one sentence with what to try."""

import re
from typing import NamedTuple

from gristmill.errors import GristmillError, StorageError, UsageError
from gristmill.paths import ObjectName, hide_passwords

_SOURCE = "\n\nDebug source:"  # after it comes the same again
_PLACE = re.compile(r"(?s)(?:for path|at location) .*?(?=: Error performing | not found: | already exists: )")
_URL = re.compile(r"https?://([^\s/?]*)\S*")
_CODE = re.compile(r"<Code>(\w+)</Code>|\"code\": ?\"?(\w+)")
_BAD_KEY = re.compile(r'(?s)invalid path: (?:Error parsing )?Path "(.*?)"(?: contained|: Encountered)')
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_WITHOUT_CONTROLS = "a tab, a line break or another control character in its key: expected keys without them"
_LIKE_PATHS = (
    "a key that no file's path can be: expected keys without //, /./ and /../ and without a slash at the beginning"
)
_BUCKET = re.compile(r"\$?[\w.-]+", re.ASCII)  # $root and $web are Azure's
_AZURE = re.compile(rf"{_BUCKET.pattern}(?:@[\w.-]+)?", re.ASCII)  # with the account
_STATUS = re.compile(r"status code: (\d{3})\b")
_VARIABLES = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
    "hf": "HF_TOKEN",
}
_REGION = "set AWS_REGION to the bucket's region"
_BY_CODE = {
    "NoSuchBucket": "there is no bucket of that name: check the name, or create it",
    "ContainerNotFound": "there is no container of that name: check the name, or create it",
    "PermanentRedirect": f"the bucket is in another region: {_REGION}",
    "AuthorizationHeaderMalformed": f"the bucket is in another region: {_REGION}",
    "IllegalLocationConstraintException": f"the bucket is in another region: {_REGION}",
    "NotImplemented": (
        "the store lacks conditional writes (If-None-Match, If-Match), which are needed: use another store"
    ),
    "RequestTimeTooSkewed": "this machine's clock is wrong, so the store refuses requests: set the clock",
}
_WRONG_KEYS = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "TokenRefreshRequired")
CHECK_NETWORK = "check the network and HF_ENDPOINT"
_NO_ANSWER = "it cannot be reached, or does not answer: check the network and the endpoint (AWS_ENDPOINT_URL)"
_KEY_SERVERS = {"169.254.169.254", "169.254.170.2", "169.254.170.23", "metadata.google.internal"}  # asked without keys
_WORDS = {
    "redirect": _BY_CODE["PermanentRedirect"],
    "error sending request": _NO_ANSWER,
    "request or response body error": "its responses are cut off, even after retries: check the network",
    "builder error": "the endpoint is not a URL: look at AWS_ENDPOINT_URL",
    "Account must be specified": "no account is given: set AZURE_STORAGE_ACCOUNT_NAME",
}
_BUSY = ("408", "429", "RequestTimeout")  # S3 answers 400 with this code where a request came too slowly
_PASSING = ("error sending request", "request or response body error")


class Refusal(NamedTuple):
    """Meaning of an error's message, whatever words are in the keys and URLs that it names."""

    status: str  # of the answer, and the store's code for it; '' if there is none
    code: str
    words: str  # of the client itself
    servers: frozenset[str]

    @classmethod
    def read(cls, message: str) -> "Refusal":
        """Read the message of an error of obstore."""
        text, status, body = (*_STATUS.split(_PLACE.sub("", message.partition(_SOURCE)[0]), maxsplit=1), "", "")[:3]
        code = ""
        match = _CODE.search(body or text)
        if match:
            code = next(filter(None, match.groups()), "")
        servers = frozenset(host.partition(":")[0] for host in _URL.findall(text))
        return cls(status, code, _URL.sub("", text), servers)

    @property
    def is_of_keys(self) -> bool:
        """Return whether the credentials are missing or wrong."""
        is_missing = "credential" in self.words.lower() or not self.servers.isdisjoint(_KEY_SERVERS)
        return is_missing or self.code in _WRONG_KEYS or self.status == "401"


def reject_bucket(name: ObjectName) -> None:
    """Raise UsageError for what cannot be a bucket's name: of b#1 or b:80 a client would take b, another bucket."""
    if not name.bucket:
        raise UsageError(f"{name.scheme}:// without a bucket: expected {name.scheme}://bucket/folder")
    if not (_AZURE if name.scheme == "az" else _BUCKET).fullmatch(name.bucket):
        raise UsageError(
            f"{hide_passwords(repr(name.url))} has no bucket's name after {name.scheme}://: expected letters, digits, "
            f"'.', '-' and '_' there, as in {name.scheme}://bucket/folder"
        )


def has_controls(key: str) -> bool:
    """Return whether a key has characters that no request can name."""
    return _CONTROL.search(key) is not None


def explain_control(name: ObjectName) -> UsageError:
    """Return the error for a key, given or made by us, with such characters."""
    return UsageError(f"{name.url!r} has {_WITHOUT_CONTROLS}; give another name")


def explain_problem(name: ObjectName, message: str, writes: bool) -> GristmillError:
    """Return the error for a user that the message of an object store amounts to.

    A UsageError if repeating the request cannot help, else a StorageError.
    """
    refusal = Refusal.read(message)
    status = refusal.status
    code = refusal.code
    doing = f"cannot read {name.url}"
    rights = "list and read"
    if writes:
        doing = f"cannot write {name.url}"
        rights = "write and delete"
    if bad_key := _BAD_KEY.search(message):
        fault = _LIKE_PATHS
        if has_controls(bad_key[1]):
            fault = _WITHOUT_CONTROLS
        return UsageError(f"{doing}: the object {bad_key[1]!r} in it has {fault}; rename it, or give another folder")
    if code in _BY_CODE:
        return UsageError(f"{doing}: {_BY_CODE[code]}")
    code_in_brackets = f" ({code})" if code else ""
    if refusal.is_of_keys:
        return UsageError(
            f"{doing}: the credentials are missing, wrong or expired{code_in_brackets}: set "
            f"{_VARIABLES[name.scheme]} in the environment"
        )
    if status == "403":
        return UsageError(
            f"{doing}: no permission{code_in_brackets}: allow these credentials to {rights} there, or give others"
        )
    answer = f"{status} {code}".strip()
    if answer.startswith("5") or status in _BUSY or code in _BUSY:
        return StorageError(
            f"{doing}: the store failed or is too busy ({answer}). Run the same command again to resume"
        )
    for word, meaning in _WORDS.items():
        if word in refusal.words:
            kind = StorageError if word in _PASSING else UsageError
            return kind(f"{doing}: {meaning}")
    if answer.startswith("4") and not answer.startswith("404"):
        return UsageError(
            f"{doing}: the store refused the request ({answer}): check the credentials, the region and the name"
        )
    first = hide_passwords(message.split("\n")[0]).split(": ", 1)[-1][:300]
    return StorageError(f"{doing}: {first}. Run the same command again to resume")


def explain_hub_problem(name: ObjectName, status: int, code: str) -> GristmillError:
    """The error for a user that an answer of the Hugging Face Hub amounts to: a status, and the Hub's own code."""
    doing = f"cannot read {name.url}"
    dataset = name.bucket.partition("@")[0]
    if code == "RevisionNotFound":
        revision = name.bucket.partition("@")[2] or "main"
        return UsageError(f"{doing}: it has no revision {revision}: give a branch, tag or commit after the @")
    if code == "GatedRepo" or status == 403:
        return UsageError(
            f"{doing}: access is restricted: accept the terms on its page, and set HF_TOKEN to a token that may read it"
        )
    if status in (401, 404):
        return UsageError(
            f"{doing}: there is no hf://{dataset}, or it is private: check the name, and set HF_TOKEN to a token that "
            "may read it"
        )
    if status == 429:
        return StorageError(
            f"{doing}: the Hub limits the rate of requests (429). Run the same command again to resume; with HF_TOKEN "
            "more requests are allowed"
        )
    if status >= 500 or status == 408:
        return StorageError(f"{doing}: the Hub failed or is too busy ({status}). Run the same command again to resume")
    return UsageError(f"{doing}: the Hub refused the request ({status}{code and f' {code}'}): check the name")
