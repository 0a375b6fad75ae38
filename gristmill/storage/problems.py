"""What an object store's error means for a user: one sentence with what to try."""

import re

from gristmill.errors import GristmillError, StorageError, UsageError
from gristmill.urls import ObjectName

_CODE = re.compile(r"<Code>(\w+)</Code>|\"code\": ?\"?(\w+)")
_STATUS = re.compile(r"status code: (\d{3})")
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
    "RequestTimeTooSkewed": "this machine's clock is wrong, and the store refuses it: set the clock",
}
_WRONG_KEYS = ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken", "TokenRefreshRequired")
_WORDS = {
    "redirect": _BY_CODE["PermanentRedirect"],
    "error sending request": "it cannot be reached: check the network and the endpoint (AWS_ENDPOINT_URL)",
    "builder error": "the endpoint is not a URL: look at AWS_ENDPOINT_URL",
}


def explain_problem(name: ObjectName, message: str, writes: bool) -> GristmillError:
    """The error for a user that the message of an object store amounts to.

    A UsageError if repeating the request cannot help, else a StorageError.
    """
    found, status = _CODE.search(message), _STATUS.search(message)
    code = next(filter(None, found.groups()), "") if found else ""
    doing = f"cannot {'write' if writes else 'read'} {name.url}"
    if code in _BY_CODE:
        return UsageError(f"{doing}: {_BY_CODE[code]}")
    if code in _WRONG_KEYS or (status and status[1] == "401") or "credential" in message.lower():
        return UsageError(
            f"{doing}: the credentials are missing, wrong or expired{f' ({code})' if code else ''}: set "
            f"{_VARIABLES[name.scheme]} in the environment"
        )
    if status and status[1] == "403":
        return UsageError(
            f"{doing}: no permission{f' ({code})' if code else ''}: allow these credentials to "
            f"{'write' if writes else 'list and read'} there, or give others"
        )
    for word, meaning in _WORDS.items():
        if word in message:
            kind = UsageError if word != "error sending request" else StorageError
            return kind(f"{doing}: {meaning}")
    first = message.split("\n")[0].split(": ", 1)[-1][:300]
    return StorageError(f"{doing}: {first}. Run the same command again to go on")
