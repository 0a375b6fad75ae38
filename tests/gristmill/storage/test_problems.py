"""What a user can mend is told in one sentence, at once."""

import re
from pathlib import Path

import pytest

from gristmill.counts import Counts
from gristmill.engine.execution.staging import Scratch, staged
from gristmill.engine.task import Task
from gristmill.errors import GristmillError, InputError, StorageError, UsageError
from gristmill.io.corpus import list_corpus
from gristmill.paths import object_name
from gristmill.storage import objects
from gristmill.storage.files import FileInfo, is_file, list_folder, read_file, write_file
from gristmill.storage.problems import explain_problem
from tests.object_faults import dropped, refuse, unavailable

REGION = "the bucket is in another region: set AWS_REGION to the bucket's region"
KEYS = r"the credentials are missing, wrong or expired \({}\): set AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and"


def write(path: Path) -> None:
    write_file(path, b"data")


CALLS = (read_file, list_folder, write)
REFUSALS = [
    (
        "403 Forbidden",
        "AccessDenied",
        r"no permission \(AccessDenied\): allow these credentials to",
    ),
    ("403 Forbidden", "InvalidAccessKeyId", KEYS.format("InvalidAccessKeyId")),
    ("403 Forbidden", "SignatureDoesNotMatch", KEYS.format("SignatureDoesNotMatch")),
    ("400 Bad Request", "ExpiredToken", KEYS.format("ExpiredToken")),
    (
        "403 Forbidden",
        "RequestTimeTooSkewed",
        "this machine's clock is wrong, so the store refuses requests: set the clock",
    ),
    ("301 Moved Permanently", "PermanentRedirect", REGION),
    ("400 Bad Request", "AuthorizationHeaderMalformed", REGION),
    ("404 Not Found", "NoSuchBucket", "there is no bucket of that name: check the name, or create it"),
    ("418 Teapot", "Unheard", r"the store refused the request \(418 Unheard\)"),
]
PASSING = [
    (unavailable, r"the store failed or is too busy \(503"),
    (dropped, "it cannot be reached, or does not answer"),
]


def problem(call, path: Path) -> GristmillError:
    """The error of a call."""
    with pytest.raises(GristmillError) as raised:
        call(path)
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith(f"cannot {'write' if call is write else 'read'} {path.parts[0]}//")
    return raised.value


@pytest.mark.parametrize(("status", "code", "sentence"), REFUSALS, ids=[code for _, code, _ in REFUSALS])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_refusal(folder: Path, store, call, status: str, code: str, sentence: str) -> None:
    store.fault = refuse(status, code)
    store.requests.clear()
    error = problem(call, folder / "a")
    assert len(store.requests) == 1  # it is not sent again
    assert isinstance(error, UsageError) and re.search(sentence, str(error))


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        ("403 Forbidden", "no permission: allow"),
        ("400 Bad Request", "refused the request"),
        ("301 Moved Permanently", REGION),
    ],
)
def test_a_refusal_of_a_request_whose_answer_has_no_body(folder: Path, store, status: str, sentence: str) -> None:
    store.fault = refuse(status, "")
    with pytest.raises(UsageError, match=sentence):
        is_file(folder / "a")


@pytest.mark.parametrize(
    "key", ["credentials/a b", "redirects/a", "builder error", "status code: 401/<a>", "169.254.169.254"]
)
@pytest.mark.parametrize(("fault", "sentence"), PASSING, ids=[fault.__name__ for fault, _ in PASSING])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_fault_that_may_pass_whatever_the_key(folder: Path, store, call, fault, sentence: str, key: str) -> None:
    store.fault = fault
    with pytest.raises(StorageError, match=sentence):
        call(folder / key)


def test_a_refusal_whose_body_names_the_key(folder: Path, store) -> None:
    message = "refused</Message><Key>credentials/a</Key><Message>http://169.254.169.254 redirect"
    store.fault = refuse("503 Slow Down", "SlowDown", message)
    error = problem(read_file, folder / "credentials/a")
    assert isinstance(error, StorageError) and "(503 SlowDown)" in str(error)


def test_a_store_without_conditional_writes(folder: Path, store) -> None:
    store.fault = refuse("501 Not Implemented", "NotImplemented")
    error = problem(write, folder / "a")
    assert isinstance(error, UsageError) and "the store lacks conditional writes (If-None-Match" in str(error)


@pytest.mark.parametrize("server", ["169.254.169.254", "169.254.170.2:80", "metadata.google.internal"])
def test_credentials_are_missing_where_only_the_machine_could_have_some(server: str) -> None:
    message = (
        f"Generic S3 error: Error performing PUT http://{server}/latest/api in 1s - HTTP error: error sending request"
    )
    error = explain_problem(object_name(Path("s3://bucket/a")), message, False)
    assert isinstance(error, UsageError) and "the credentials are missing, wrong or expired: set" in str(error)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_bucket_that_is_not_there(store, call) -> None:
    assert "there is no bucket of that name" in str(problem(call, Path("s3://nowhere/folder/a")))


@pytest.mark.parametrize("name", ["bucket#1", "bucket?x=1", "bucket:80", "me:secret@bucket", "b%75cket", "a b", "[b"])
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_what_is_no_buckets_name(store, call, name: str) -> None:
    """Clients take a part of it, which is another bucket, or fail with a plain error."""
    with pytest.raises(
        UsageError, match="/folder/a' has no bucket's name after s3://: expected letters, digits,"
    ) as told:
        call(Path(f"s3://{name}/folder/a"))
    assert "secret" not in str(told.value) and not store.requests


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_store_that_cannot_be_reached(store, monkeypatch, call) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    objects._open.cache_clear()
    error = problem(call, Path("s3://bucket/a"))
    assert isinstance(error, StorageError) and "check the network and the endpoint (AWS_ENDPOINT_URL)" in str(error)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("localhost", "localhost"),
        ("ftp://user:secret@h", r"ftp://\*\*\*@h"),
        ("user:secret@h:9000", r"\*\*\*@h:9000"),
        ("http://user:secret@h:port", r"http://\*\*\*@h:port"),
    ],
)
def test_an_endpoint_that_is_no_url(store, monkeypatch, given: str, shown: str) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", given)
    objects._open.cache_clear()
    with pytest.raises(UsageError, match=rf"^AWS_ENDPOINT_URL '{shown}' is not a URL: expected http://host:port"):
        read_file(Path("s3://bucket/a"))
    monkeypatch.setenv("HF_ENDPOINT", given)
    if not given.startswith("http"):
        with pytest.raises(UsageError, match=rf"^HF_ENDPOINT '{shown}' is not a URL: expected https://host"):
            read_file(Path("hf://datasets/org/name/a"))


def test_an_error_that_is_told_as_it_is_hides_passwords() -> None:
    message = "Generic S3 error: Error performing GET http://user:secret@h/bucket/a@b in 1s - unheard of"
    error = explain_problem(object_name(Path("s3://bucket/a@b")), message, False)
    assert "GET http://***@h/bucket/a@b in 1s - unheard of. Run the same" in str(error)


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("az://bucket/a", "set AZURE_STORAGE_ACCOUNT_NAME"),
        ("hf://datasets/a", "expected hf://datasets/ORG/NAME/folder"),
    ],
)
def test_other_stores(url: str, sentence: str, monkeypatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(UsageError, match=sentence):
        read_file(Path(url))


def test_no_secret_is_printed(folder: Path, store, monkeypatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "very-secret")
    objects._open.cache_clear()
    for status, code, _ in REFUSALS:
        store.fault = refuse(status, code, message="AWSAccessKeyId=tests very-secret")
        assert "very-secret" not in str(problem(read_file, folder / "a"))


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (["book//a.jsonl"], "the object 'test.*/book//a.jsonl' in it has a key that no file's path can be"),
        (["../a.jsonl"], "the object 'test.*/../a.jsonl' in it has a key that no file's path can be"),
        (["./a.jsonl"], "the object 'test.*/./a.jsonl' in it has a key that no file's path can be"),
    ],
)
def test_keys_that_no_file_can_have(folder: Path, store, keys: list[str], sentence: str) -> None:
    for key in keys:
        store.put(f"{object_name(folder).key}/{key}", b"data")
    with pytest.raises(UsageError, match=sentence):
        list_corpus(folder)


@pytest.mark.parametrize("key", ["a\tb.jsonl", "a\rb.jsonl", "\x01/b.jsonl", "a\x7fb.jsonl", "\0.jsonl"])
def test_keys_with_control_characters(folder: Path, store, key: str) -> None:
    store.put(f"{object_name(folder).key}/{key}", b"data")
    advice = r" has a tab, a line break or another control character in its key: expected keys without them; "
    with pytest.raises(
        UsageError, match=rf"^cannot read {object_name(folder).url}: the object 'test\d+/.*'.*{advice}rename"
    ):
        list_corpus(folder)
    for call in CALLS:
        with pytest.raises(UsageError, match=rf"^'{object_name(folder).url}/.*'{advice}give another name$"):
            call(folder / key)


def test_an_object_whose_key_ends_in_a_slash(folder: Path, store, tmp_path: Path) -> None:
    """It is listed without the slash."""
    store.put(f"{object_name(folder).key}/a.jsonl/", b"data")
    (file,) = list_corpus(folder)
    task = Task("read", Counts, {"path": file.path})
    with pytest.raises(
        InputError, match=r"no such object\. Check the path, .* slash, a\.jsonl/, cannot be read as a file"
    ):
        staged(task, {}, Scratch(tmp_path)).__enter__()
    with pytest.raises(
        InputError, match=r"was removed while it was read: run the same command again\. .* slash, a\.jsonl/, cannot"
    ):
        staged(task, {file.path: FileInfo(4)}, Scratch(tmp_path)).__enter__()
