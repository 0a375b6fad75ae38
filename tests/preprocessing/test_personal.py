"""Personal data: what is replaced and what only looks like it, by kind, and the counts in a report and a card."""

from pathlib import Path

import pytest

from benchmarks.bench_personal import measure
from gristmill.errors import UsageError
from gristmill_cli.cards.data_card import card
from gristmill_cli.report.write import report
from gristmill_cli.run import run
from gristmill_cli.run_config import Filter, Mix, RunConfig, Tokenizer
from preprocessing.quality import personal
from preprocessing.quality.personal import PersonalRules
from preprocessing.quality.recipe import parse_recipe
from tests.gristmill_cli.corpus import documents, write_records

AWS = "AKIA" + "QWERTYUIOPASDFGH"
PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow==\n-----END RSA PRIVATE KEY-----"


@pytest.mark.parametrize(
    ("rules", "text", "expected"),
    [
        ({"card": True}, "pay 4111 1111 1111 1111 or 4111-1111-1111-1111", "pay {card} or {card}"),
        ({"card": True}, "4111 1111 1111 1112 and 1234567812345670 and 41111111111111111", None),
        ({"iban": True}, "to DE89 3704 0044 0532 0130 00 TODAY", "to {iban} TODAY"),
        ({"iban": True}, "GB29NWBK60161331926819, or DE89370400440532013001", "{iban}, or DE89370400440532013001"),
        ({"phone": True}, "call +49 30 901820 or 030 901820", "call {phone} or 030 901820"),
        ({"phone": True, "region": "DE"}, "call 030 901820, not 2026-11-29", "call {phone}, not 2026-11-29"),
        ({"phone": True}, "1+1 = 2, 3 + 49 30 90, C++ 11", None),
        ({"key": True}, f"id {AWS}, {PEM}.", "id {key}, {key}."),
        ({"key": True}, "AKIA is a beginning, hf_ another, ghp_short a third", None),
        ({"mail": True, "ip": True}, "a.b@mail.org at 8.8.8.8, 10.0.0.1", "{mail} at {ip}, 10.0.0.1"),
    ],
)
def test_what_is_replaced(rules: dict, text: str, expected: str | None) -> None:
    rewritten, counts = PersonalRules(**rules).rewrite(text)
    assert rewritten == (text if expected is None else expected.format(**personal.REPLACEMENTS))
    assert sum(counts.values()) == (0 if expected is None else expected.count("{"))


def test_precision_and_recall_on_generated_text() -> None:
    for kind, (recall, precision, _) in measure(150).items():
        assert recall > 0.99 and precision > 0.97, kind


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ("{ region = 'DE' }", "region = 'DE' has no effect without phone = true"),
        ("{ phone = true, region = 'Bavaria' }", "region 'Bavaria': expected a country such as US, DE or IN"),
        ("{ phone = 'yes' }", "personal.phone: expected true or false, got 'yes'"),
        ("{ phone = true, region = 49 }", "personal.region: expected a text, got 49"),
        ("{ fax = true }", "unknown rule 'fax'"),
    ],
)
def test_a_wrong_section_is_refused(section: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_recipe(f"personal = {section}", "own")


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(personal, "find_spec", lambda _: None)
    PersonalRules(mail=True, ip=True, key=True)
    with pytest.raises(UsageError, match=r"stdnum is not installed.*pip install 'gristmill\[personal\]'"):
        PersonalRules(card=True)


def test_a_run_counts_by_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "corpus/web").mkdir(parents=True)
    texts = [f"{record['text']} pay 4111 1111 1111 1111 to jo@mail.org" for record in documents("web", 40)]
    write_records(tmp_path / "corpus/web/a.jsonl", [{"text": text} for text in [*texts, "short 4111 1111 1111 1111"]])
    (tmp_path / "own.toml").write_text("words.min = 6\npersonal = { mail = true, card = true }\n")
    config = RunConfig(
        tmp_path / "corpus", tmp_path / "out", workers=1, recipe=str(tmp_path / "own.toml"), filter=Filter(10),
        mix=Mix(holdout=0.1), tokenizer=Tokenizer(vocab_size=400, exact=False),
    )  # fmt: skip
    run(config)
    assert "personal data replaced in the documents written: 40 mail, 40 card" in capsys.readouterr().err
    report((config.out,))
    page = (config.out / "report.html").read_text()
    assert "Personal data that was replaced" in page
    assert 'data-record=".gristmill/run/normalize_text.json#/counts/replaced/card"' in page
    card(config.out)
    assert "| card | 40 |" in (config.out / "tokens/README.md").read_text()
