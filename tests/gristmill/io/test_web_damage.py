"""Damaged archives: one damaged record is left out and counted, the others are read; what is cut off is named."""

import gzip
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import zstandard

from gristmill.budget import MemoryReservation
from gristmill.counts import Counts
from gristmill.engine.options import RunOptions
from gristmill.errors import DamagedFile, TooManyMalformed
from gristmill.io import readers
from gristmill.io.corpus import list_corpus
from gristmill.io.lines import read_chunks
from gristmill.io.web import archive, gzip_members, records
from gristmill.io.web.archive import DamagedRecord, Record, read_records
from gristmill.io.writers import Rejects
from preprocessing.normalize_text import normalize_text
from tests.gristmill.io.test_web_archives import gzipped, page, record, response
from tests.gristmill.io.test_web_bodies import read

PAGES = [response(f"http://a/{i}", page(f"The mill grinds grain number {i} all day long.").encode()) for i in range(9)]
IMAGE = response("http://a/image", b"\x89PNG" + bytes(range(256)) * 30, "image/png")


def went(folder: Path, name: str, content: bytes) -> tuple[list[str], int]:
    """The ends of the addresses of the documents of an archive, and how many records were damaged."""
    path = folder / name
    path.write_bytes(content)
    chunks = read_chunks(path, gzip_members.gzip_members)
    found = list(read_records(path, chunks, 1 << 20, MemoryReservation()))
    urls = [one.get("warc-target-uri").rpartition("/")[2] for one in found if isinstance(one, Record)]
    return urls, sum(isinstance(one, DamagedRecord) for one in found)


def all_but(*numbers: int) -> list[str]:
    return [str(number) for number in range(9) if number not in numbers]


def changed(number: int, change: Callable[[bytes], bytes], pages: list[bytes] = PAGES) -> list[bytes]:
    """All records, one of them changed."""
    return [change(one) if i == number else one for i, one in enumerate(pages)]


def length_of(one: bytes) -> bytes:
    return one.partition(b"Content-Length: ")[2].partition(b"\r\n")[0]


HEADERS: dict[str, Callable[[bytes], bytes]] = {
    "a length that is no number": lambda one: one.replace(b"Content-Length: ", b"Content-Length: x", 1),
    "no length": lambda one: one.replace(b"Content-Length: ", b"Content-Height: ", 1),
    "no version": lambda one: one.replace(b"WARC/1.0", b"WXRC/1.0", 1),
    "a length that is too short": lambda one: one.replace(b"Length: " + length_of(one), b"Length: 99", 1),
    "a length that is too long": lambda one: one.replace(b"Length: " + length_of(one), b"Length: 700", 1),
    "a length of half the archive": lambda one: one.replace(b"Length: " + length_of(one), b"Length: 1801", 1),
    "a length beyond the archive": lambda one: one.replace(b"Length: " + length_of(one), b"Length: 90000", 1),
    "a length that is short of the line end": lambda one: one.replace(
        b"Length: " + length_of(one), b"Length: %d" % (int(length_of(one)) - 3), 1
    ),
}


@pytest.mark.parametrize("name", HEADERS)
@pytest.mark.parametrize("number", [0, 3, 7])
@pytest.mark.parametrize("pack", [b"".join, gzipped])
def test_one_damaged_record_costs_one_record(
    tmp_path: Path, name: str, number: int, pack: Callable[[list[bytes]], bytes]
) -> None:
    content = pack(changed(number, HEADERS[name]))
    suffix = ".gz" if pack is gzipped else ""
    assert went(tmp_path, f"a.warc{suffix}", content) == (all_but(number), 1)


@pytest.mark.parametrize("pack", [b"".join, gzipped])
def test_rubbish_between_records_costs_none(tmp_path: Path, pack: Callable[[list[bytes]], bytes]) -> None:
    suffix = ".gz" if pack is gzipped else ""
    content = pack(changed(3, lambda one: one + b"rubbish\r\n" * 9))
    assert went(tmp_path, f"a.warc{suffix}", content) == (all_but(), 1)
    if suffix:
        content = gzipped(PAGES[:4]) + b"rubbish" + gzipped(PAGES[4:]) + b"\n"
        assert went(tmp_path, "a.warc.gz", content) == (all_but(), 2)


@pytest.mark.parametrize("number", [0, 4, 7, 8])
def test_a_member_with_a_flipped_byte_costs_one_record(tmp_path: Path, number: int) -> None:
    members = [gzip.compress(one) for one in PAGES]
    for at in [0, 2, 15, 40, len(members[number]) // 2, len(members[number]) - 6, len(members[number]) - 1]:
        damaged = bytearray(members[number])
        damaged[at] ^= 0x55
        content = b"".join([*members[:number], bytes(damaged), *members[number + 1 :]])
        assert went(tmp_path, "a.warc.gz", content) == (all_but(number), 1), at


def test_members_of_any_size_are_checked_before_their_records_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gzip_members, "_HELD", 100)  # all are long ones
    monkeypatch.setattr(gzip_members, "_INPUT", 50)
    monkeypatch.setattr(gzip_members, "CHUNK", 60)
    members = [gzip.compress(one) for one in PAGES]
    damaged = members[4][:-8] + b"\0" * 4 + members[4][-4:]  # its content is right, its checksum is not
    assert went(tmp_path, "a.warc.gz", b"".join([*members[:4], damaged, *members[5:]])) == (all_but(4), 1)
    two = gzip.compress(PAGES[4] + PAGES[5])
    content = b"".join([*members[:4], two[:-8] + b"\0" * 4 + two[-4:], *members[6:]])
    with pytest.raises(DamagedFile, match="several records are compressed together"):
        went(tmp_path, "b.warc.gz", content)


def test_members_need_not_begin_with_records(tmp_path: Path) -> None:
    whole = b"".join(PAGES)
    blocks = [gzip.compress(whole[at : at + 301]) for at in range(0, len(whole), 301)]
    assert went(tmp_path, "a.warc.gz", b"".join(blocks) + b"\0" * 99) == (all_but(), 0)
    with pytest.raises(DamagedFile, match="truncated or corrupt"):
        went(tmp_path, "a.warc.gz", b"".join(blocks)[:-9])
    with pytest.raises(DamagedFile, match="truncated or corrupt"):  # none after it begins with a record
        went(tmp_path, "a.warc.gz", b"".join([blocks[0], blocks[1][:-8], b"\0" * 8, *blocks[2:]]))


@pytest.mark.parametrize("last", [PAGES[8], IMAGE])
def test_an_archive_that_is_cut_off_is_damaged_wherever_that_is(tmp_path: Path, last: bytes) -> None:
    whole = b"".join(PAGES[:3])
    for cut in (len(last) - 12, len(last) - 5, len(last) // 2, 150, 30, 6):
        with pytest.raises(DamagedFile, match=r"damaged in record 4 \(cut off "):
            went(tmp_path, "a.warc", whole + last[:cut].rstrip(b"\r\n"))
        with pytest.raises(DamagedFile, match="truncated or corrupt"):
            went(tmp_path, "a.warc.gz", gzipped(PAGES[:3]) + gzip.compress(last)[:-7])
    assert went(tmp_path, "a.warc", b"".join(PAGES)[:-4])[1] == 0  # only the line ends are missing


RUBBISH = {
    "a.warc": b"rubbish\n" * 999,
    "b.warc": b"WARC/1.0\r\n\r\n" * 999,
    "c.warc": b"filedesc://a.arc 0.0.0.0 20260101000000 text/plain 9\n1 0 A\n\n",
    "d.warc": record("reply", "http://a", b"text", "text/plain"),
    "e.warc.gz": gzip.compress(b"rubbish"),
    "f.warc.zst": zstandard.compress(b'{"text": "a"}\n'),
    "g.wet": b"\0" * 99,
    "h.warc": b"",
    "i.warc.gz": gzip.compress(b""),
}


@pytest.mark.parametrize("name", RUBBISH)
def test_a_file_without_a_known_record_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DamagedFile, match="expected records of a web archive"):
        went(tmp_path, name, RUBBISH[name])


def test_a_text_that_is_called_an_archive_is_named_as_one(tmp_path: Path) -> None:
    with pytest.raises(
        DamagedFile, match=r"it is neither gzip nor a web archive: it begins with b'A text, and no archi"
    ):
        went(tmp_path, "a.warc.gz", b"A text, and no archive.")


def test_a_page_on_which_a_library_fails_is_malformed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are read; an error of the reader itself is damage of the file."""

    def fail(page: str, extract: str) -> str:
        raise IndexError(page)

    monkeypatch.setattr(records, "text_of_page", fail)
    monkeypatch.setattr(readers, "text_of_page", fail)
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.warc").write_bytes(b"".join(PAGES[:2]))
    (tmp_path / "in/b.html").write_text("<p>A page.</p>")
    counts = Counts()
    for file in list_corpus(tmp_path / "in", read_also=("html",)):
        (part,) = readers.plan_slices(file)
        assert not list(readers.read_documents(part, counts, Rejects(tmp_path / "out")))
    assert counts.total("malformed: page that fails with IndexError").documents == 3

    def fail_at_once(*_: object) -> None:
        raise IndexError("no such index")

    monkeypatch.setattr(readers, "read_archive", fail_at_once)
    (file,) = list_corpus(tmp_path / "in")
    with pytest.raises(DamagedFile, match=r"a\.warc: its reader failed with IndexError: no such index\. Fix it, or"):
        list(readers.read_corpus(file.path))


def test_an_archive_without_documents_is_read(tmp_path: Path) -> None:
    about = record("warcinfo", "", b"software: test\r\n", "application/warc-fields")
    assert went(tmp_path, "a.warc.gz", gzipped([about])) == ([""], 0)


def test_bare_newlines_and_names_in_lower_case_are_read(tmp_path: Path) -> None:
    def old(one: bytes) -> bytes:
        head, _, body = one.partition(b"\r\n\r\n")
        http, _, content = body.removesuffix(b"\r\n\r\n").partition(b"\r\n\r\n")
        block = http.replace(b"\r\n", b"\n") + b"\n\n" + content
        lines = head.replace(b"WARC/1.0", b"WARC/0.18").split(b"\r\n")[:-1]
        lines.append(b"Content-Length: %d" % len(block))
        return b"\n".join(lines) + b"\n\n" + block + b"\n"

    def lower(one: bytes) -> bytes:
        head, end, body = one.partition(b"\r\n\r\n")
        for name in (b"WARC-Type", b"WARC-Target-URI", b"Content-Length", b"Content-Type"):
            head = head.replace(name, name.lower())
        return head + end + body

    for change in (old, lower):
        documents, counted = read(tmp_path, *map(change, PAGES))
        assert [document.value("url") for document in documents] == [f"http://a/{i}" for i in range(9)]
        assert all(document.text.startswith("The mill grinds") for document in documents) and counted == {}


def test_a_page_about_archives_is_one_page(tmp_path: Path) -> None:
    nested = response("http://a/nested", b"<pre>" + PAGES[0] + PAGES[1], "text/html")
    assert went(tmp_path, "a.warc", b"".join([PAGES[0], nested, PAGES[2]])) == (["0", "nested", "2"], 0)


def test_damaged_records_count_as_malformed(tmp_path: Path) -> None:
    (tmp_path / "in/web").mkdir(parents=True)
    records = changed(4, HEADERS["a length that is no number"])
    (tmp_path / "in/web/a.warc.gz").write_bytes(gzipped(records))
    with pytest.raises(TooManyMalformed, match="1 of 9 records is malformed"):
        normalize_text(tmp_path / "in", tmp_path / "out", options=RunOptions(workers=1, quiet=True))
    options = RunOptions(workers=1, quiet=True, max_malformed=0.7)
    counts = normalize_text(tmp_path / "in", tmp_path / "out", options=options)
    assert (counts.total("written").documents, counts.total("malformed: damaged record").documents) == (8, 1)
    (rejected,) = (tmp_path / "out").rglob("*.malformed")
    assert "http://a/4" in rejected.read_text()


def test_images_make_no_room_for_malformed_records(tmp_path: Path) -> None:
    (tmp_path / "in/web").mkdir(parents=True)
    records = [*[IMAGE] * 90, *changed(4, HEADERS["no length"])]
    (tmp_path / "in/web/a.warc.gz").write_bytes(gzipped(records))
    with pytest.raises(TooManyMalformed, match="1 of 9 records is malformed"):
        options = RunOptions(workers=1, quiet=True, max_malformed=0.05)
        normalize_text(tmp_path / "in", tmp_path / "out", options=options)


@pytest.mark.parametrize("length", ["99999", "x"])
def test_the_search_for_records_is_linear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: str) -> None:
    """Records that are all damaged are searched again only so often; then the archive is given up."""
    monkeypatch.setattr(archive, "_FREE_RETRIES", 1 << 16)
    damaged = b"WARC/1.0\r\nWARC-Type: response\r\nContent-Length: %s\r\n\r\nx\r\n\r\n" % length.encode()
    content = PAGES[0] + damaged * 20_000
    chunks = [content[at : at + 4096] for at in range(0, len(content), 4096)]
    taken = 0
    take = archive._Stream.take

    def counting(stream: archive._Stream, size: int) -> bytes:
        nonlocal taken
        found = take(stream, size)
        taken += len(found)
        return found

    monkeypatch.setattr(archive._Stream, "take", counting)
    try:
        list(read_records(tmp_path, iter(chunks), 1 << 20, MemoryReservation()))
    except DamagedFile as error:
        assert "would take too long" in str(error)
    assert taken < 4 * len(content)


def test_a_gap_is_given_up_where_members_are_read_again_too_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gzip_members, "_FREE_RETRIES", 1000)
    damaged = [one[:-8] + b"\0" * 8 for one in map(gzip.compress, PAGES)]
    with pytest.raises(DamagedFile, match="truncated or corrupt"):
        went(tmp_path, "a.warc.gz", b"".join([*damaged * 3, gzip.compress(PAGES[0])]))


def test_random_damage_is_never_silent(tmp_path: Path) -> None:
    """Whatever byte of an archive changes: the other records are there, or the file is named as damaged."""
    chance = Random(46)
    plain = b"".join(PAGES)
    packed = gzipped(PAGES)
    for name, content in (("a.warc", plain), ("a.warc.gz", packed)):
        for _ in range(150):
            damaged = bytearray(content)
            at = chance.randrange(len(content))
            damaged[at] = chance.randrange(256)
            try:
                urls, lost = went(tmp_path, name, bytes(damaged))
            except DamagedFile:
                continue  # its length, perhaps, is beyond the end
            assert len(urls) + lost >= 9 and len(set(urls) & set(all_but())) >= 8, at
