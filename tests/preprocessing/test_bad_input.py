"""Bad input and full disks, by command line: clear errors, no partial output, no traceback."""

import base64
import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from gristmill.command import command
from gristmill.errors import OutputError
from gristmill.io.lines import read_lines
from gristmill.storage.files import check_writable
from preprocessing import filter, normalize_text, pass1, pass2

NORMALIZE = "preprocessing/normalize_text.py"
SCRIPTS = {
    NORMALIZE: (normalize_text,), "preprocessing/filter.py": (filter,),
    "preprocessing/shuffle_holdout.py": (pass1, pass2),
}  # fmt: skip
GOOD = b'{"text":"good"}\n'
MANY = b"".join(b'{"text":"document number %d"}\n' % i for i in range(20_000))

MALFORMED = {
    b'{"text": "broken': "broken JSON",
    b'{"text": "a"} {"text": "b"}': "several JSON values on a line",
    b'{"text": "a", "score": nan}': "broken JSON",
    b'{"text": NaN}': "text is not a string",
    b'{"text": "raw \x00 NUL"}': "broken JSON",
    b"[1, 2]": "a JSON array",
    b'"text"': "not an object",
    b"null": "not an object",
    b'{"body": "a"}': "no text",
    b"{}": "no text",
    b'{"text": null}': "text is null",
    b'{"text": 5}': "text is not a string",
    b'{"text": ["a"]}': "text is not a string",
    b'{"text": "\xff\xfe"}': "invalid UTF-8",
    b'{"text": "a", "other": "\xc3\x28"}': "invalid UTF-8",
    b'{"text": "CESU \xed\xa0\xbd\xed\xb8\x80"}': "invalid UTF-8",
    b'{"text": "escaped \\ud83d alone"}': "lone surrogate",
    b'{"text": "a", "deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}": "nested too deeply",
}


@pytest.fixture
def fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """Run a command, in this process, that must fail without partial files; exit code, standard error."""

    def fails(script: str, *arguments: object) -> tuple[int, str]:
        with pytest.raises(SystemExit) as end:
            command(*SCRIPTS[script], arguments=[*map(str, arguments)])
        text = capsys.readouterr().err
        assert end.value.code != 0 and (text.startswith("error: ") or "\nerror: " in text), text
        assert not list(tmp_path.rglob("*.partial"))
        return end.value.code, text

    return fails


def put(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_malformed_records_are_counted_and_saved(tmp_path: Path, run, read) -> None:
    lines = list(MALFORMED)
    path = put(tmp_path / "in" / "book" / "a.jsonl", GOOD + b"".join(line + b"\n" + GOOD for line in lines))
    arguments = (NORMALIZE, "--data_dir", tmp_path / "in", "--target_dir", tmp_path / "out")
    stopped = run(*arguments)
    assert stopped.returncode == 1 and "Traceback" not in stopped.stderr
    assert f"{len(lines)} of {2 * len(lines) + 1} records are malformed" in stopped.stderr
    assert f"{path} line 2: {MALFORMED[lines[0]]}" in stopped.stderr and "--max_malformed" in stopped.stderr

    passed = run(*arguments, "--max_malformed", "1")
    assert passed.returncode == 0, passed.stderr
    for reason in set(MALFORMED.values()):
        assert f"{list(MALFORMED.values()).count(reason)} malformed: {reason}" in passed.stderr
    assert read(tmp_path / "out") == [{"text": "good"}] * (len(lines) + 1)

    rejects = (tmp_path / "out" / "book" / "a.jsonl.malformed").read_bytes().splitlines()
    for i, (line, entry) in enumerate(zip(lines, map(json.loads, rejects), strict=True)):
        raw = entry["raw"].encode() if "raw" in entry else base64.b64decode(entry["raw_base64"])
        assert (entry["file"], entry["line"], entry["reason"]) == ("book/a.jsonl", 2 * i + 2, MALFORMED[line])
        assert raw == line


def test_unusual_but_valid_records_are_documents(tmp_path: Path, run, read_texts) -> None:
    texts = ["", " ", "escaped \0 NUL", "\u2028 and \u2029 and \x85", "pair 😀", "\ufeffmark within"]
    lines = [json.dumps({"text": text}).encode() for text in texts]
    nested = b'{"text":"deep","x":' + b"[" * 500 + b"]" * 500 + b"}"
    put(tmp_path / "in" / "a.jsonl", b"\xef\xbb\xbf" + b"\r\n".join([*lines, b"", b"  \t", nested, b""]))
    odd = b'{"id":1e400,"text":"cafe\xcc\x81","meta":{"x": NaN, "y":[-Infinity],"z": "\\udc00"},"n":NaN}\n'
    put(tmp_path / "in" / "odd" / "a.jsonl", odd)
    put(tmp_path / "in" / "empty" / "a.jsonl", b"")
    put(tmp_path / "in" / "empty" / "mark.jsonl", b"\xef\xbb\xbf")
    done = run(NORMALIZE, "--data_dir", tmp_path / "in", "--target_dir", tmp_path / "out", "--max_malformed", "0")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "odd" / "a.jsonl").read_bytes() == odd.replace(b"e\xcc\x81", b"\xc3\xa9")
    assert read_texts(tmp_path / "out") == [*texts, "deep", "caf\u00e9"]
    assert (tmp_path / "out" / "empty" / "mark.jsonl").read_bytes() == b""


def test_a_line_of_30_megabytes_is_a_document(tmp_path: Path, run) -> None:
    put(tmp_path / "in" / "a.jsonl", GOOD + b'{"text":"' + b"long " * 6_000_000 + b'"}\n' + GOOD)
    done = run(NORMALIZE, "-d", tmp_path / "in", "-t", tmp_path / "out")
    assert done.returncode == 0 and "3 read = 3 written" in done.stderr
    assert (tmp_path / "out" / "a.jsonl").read_bytes() == (tmp_path / "in" / "a.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl.zst", zstandard.compress(MANY)[:-7]),
        ("a.jsonl.gz", gzip.compress(MANY)[:-7]),
        ("b.jsonl.zst", zstandard.compress(MANY)[:9000] + b"\0" * 99 + zstandard.compress(MANY)[9099:]),
        ("b.jsonl.gz", gzip.compress(MANY)[:9000] + b"\0" * 99 + gzip.compress(MANY)[9099:]),
        ("c.jsonl.zst", b"no frame" + MANY),
        ("c.jsonl.gz", b"no member" + MANY),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damaged_compressed_file_is_named_in_the_error(tmp_path: Path, fails, name: str, data: bytes) -> None:
    path = put(tmp_path / "in" / name, data)
    code, text = fails(NORMALIZE, "--data_dir", tmp_path / "in", "--target_dir", tmp_path / "out")
    assert code == 1 and f"{path}: the compressed data is truncated or corrupt after line" in text
    assert "fetch the file again" in text and "damaged files (1) hold 100.00%" in text
    assert not list(read_lines(tmp_path / "out" / name))
    code, text = fails(NORMALIZE, "--data_dir", tmp_path / "out", "--target_dir", tmp_path / "next")
    assert code == 1 and "found more malformed or damaged input" in text


@pytest.mark.parametrize(
    ("folder", "wanted"),
    [
        ("none", "expected a folder, but there is none"),
        ("in/book/a.jsonl", "expected a folder, got a file"),
        ("empty", "holds no corpus file: expected *.jsonl"),
        ("clash", "a.arrow and a.parquet would be written to one file, "),
    ],
)
def test_error_for_a_folder_that_is_no_corpus(tmp_path: Path, fails, folder: str, wanted: str) -> None:
    put(tmp_path / "in" / "book" / "a.jsonl", GOOD)
    put(tmp_path / "empty" / "notes.txt", GOOD)
    put(tmp_path / "clash" / "a.parquet", GOOD)
    put(tmp_path / "clash" / "a.arrow", GOOD)
    code, text = fails(NORMALIZE, "--data_dir", tmp_path / folder, "--target_dir", tmp_path / "out")
    assert code in (1, 2) and wanted in text
    assert not (tmp_path / "out").exists()


def test_output_folder_with_unknown_files_is_rejected(tmp_path: Path, fails) -> None:
    put(tmp_path / "in" / "a.jsonl", GOOD)
    put(tmp_path / "out" / "older.jsonl", GOOD)
    code, text = fails(NORMALIZE, "--data_dir", tmp_path / "in", "--target_dir", tmp_path / "out")
    assert code == 1 and "'older.jsonl'" in text and "empty or new folder" in text
    assert not (tmp_path / "out" / "a.jsonl").exists()


@pytest.mark.parametrize("target", ["in", "in/out"])
def test_output_folder_in_the_input_is_rejected(tmp_path: Path, fails, target: str) -> None:
    path = put(tmp_path / "in" / "a.jsonl", '{"text": "e\u0301"}\n'.encode())
    before = path.read_bytes()
    code, text = fails(NORMALIZE, "--data_dir", tmp_path / "in", "--target_dir", tmp_path / target)
    assert code == 2 and "outside it" in text
    assert path.read_bytes() == before


@pytest.mark.parametrize("target", ["file", "file/below", "/proc/none", "blocked"])
def test_error_for_an_output_that_cannot_be_written(tmp_path: Path, fails, target: str) -> None:
    """Impossible paths, as missing permissions cannot be tested as root."""
    put(tmp_path / "in" / "a.jsonl", GOOD)
    put(tmp_path / "file", b"")
    (tmp_path / "blocked" / "a.jsonl").mkdir(parents=True)
    code, text = fails(NORMALIZE, "--data_dir", tmp_path / "in", "--target_dir", tmp_path / target)
    assert code == 1 and "cannot write" in text and "hoose another folder" in text


@pytest.mark.parametrize("target", ["link", "link/below"])
def test_an_output_that_is_a_link_to_nothing_is_named(tmp_path: Path, fails, target: str) -> None:
    put(tmp_path / "in" / "a.jsonl", GOOD)
    (tmp_path / "link").symlink_to("nowhere")
    code, text = fails(NORMALIZE, "--data_dir", tmp_path / "in", "--target_dir", tmp_path / target)
    assert code == 1 and f"{tmp_path}/link is a link to nowhere, which does not exist: create that folder" in text


def test_the_limit_of_file_sizes_is_named(tmp_path: Path) -> None:
    put(tmp_path / "in" / "a.jsonl", MANY)
    command = f"ulimit -f 200; exec {sys.executable} {NORMALIZE} --data_dir {tmp_path}/in --target_dir {tmp_path}/out"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "a.jsonl: the limit of file sizes is reached: raise it (ulimit -f unlimited)" in done.stderr


def test_error_for_a_key_set_that_cannot_be_written(tmp_path: Path, fails) -> None:
    put(tmp_path / "in" / "a.jsonl", GOOD)
    put(tmp_path / "file", b"")
    _, text = fails("preprocessing/filter.py", tmp_path / "in", tmp_path / "file" / "short.pickle", 0, "all", 200)
    assert "cannot write" in text


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB; skips the test without the permission to mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    if not mounted:
        pytest.skip("no permission to mount a small file system")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_a_read_only_disk_is_said_to_be_one(tiny_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    with pytest.raises(OutputError, match="that file system is read-only"):
        check_writable(tiny_disk / "out")


def test_full_disk_is_an_error_and_the_same_command_resumes(tmp_path: Path, fails, run, tiny_disk: Path) -> None:
    put(tmp_path / "in" / "one" / "a.jsonl", GOOD)
    put(tmp_path / "in" / "two" / "b.jsonl", MANY)
    arguments = (NORMALIZE, "--data_dir", tmp_path / "in", "--target_dir", tiny_disk, "--workers", 1)
    code, text = fails(*arguments)
    assert code == 1 and "the disk is full: free some space and run the same command again" in text
    assert "b.jsonl" in text and not (tiny_disk / "two" / "b.jsonl").exists()
    subprocess.run(["mount", "-o", "remount,size=64m", str(tiny_disk)], check=True)
    done = run(*arguments)
    assert done.returncode == 0 and "1 of 2 tasks done before" in done.stderr
    assert (tiny_disk / "two" / "b.jsonl").read_bytes() == MANY


def test_error_for_a_disk_without_a_free_byte(tmp_path: Path, fails, tiny_disk: Path) -> None:
    put(tmp_path / "in" / "a.jsonl", GOOD)
    with (tiny_disk / "ballast").open("wb", buffering=0) as ballast:
        while ballast.write(b"x" * 4096) == 4096 and os.statvfs(tiny_disk).f_bfree:
            pass
    for words in (
        (NORMALIZE, "--data_dir", tmp_path / "in", "--target_dir", tiny_disk),
        ("preprocessing/filter.py", tmp_path / "in", tiny_disk / "short.pickle", 0, "all", 200),
        ("preprocessing/shuffle_holdout.py", "pass1", "--input_dir", tmp_path / "in", "--out_dir", tiny_disk),
    ):
        _, text = fails(*words)
        assert "the disk is full" in text


def test_wrong_number_of_documents_gives_a_note(tmp_path: Path, run) -> None:
    put(tmp_path / "norm" / "book" / "a.jsonl", GOOD * 3)
    filter = ("preprocessing/filter.py", tmp_path / "norm" / "book", tmp_path / "short.pickle")
    wrong = run(*filter, 5, "book", 200)
    right = run(*filter, 3, "book", 200)
    assert (wrong.returncode, right.returncode) == (0, 0)
    assert "n_docs is 5, but 3 documents were found" in wrong.stderr
    assert "n_docs" not in right.stderr


def test_file_name_that_looks_like_markup_is_printed_unchanged(tmp_path: Path, fails) -> None:
    put(tmp_path / "in" / "[bold]:apple:[" / "a.jsonl.gz", b"no gzip")
    _, text = fails(NORMALIZE, "--data_dir", tmp_path / "in", "--target_dir", tmp_path / "out")
    assert "[bold]:apple:[/a.jsonl.gz" in text


def test_wrong_command_line_gives_no_traceback(run) -> None:
    done = run(NORMALIZE, "--data_dri", "x")
    assert done.returncode == 2 and "Traceback" not in done.stderr
