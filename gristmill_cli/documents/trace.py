"""Command: what became of one document, stage by stage, from its raw file to its place among the tokens, and back."""

import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Group
from rich.table import Table
from rich.text import Text
from tyro.conf import Positional

from gristmill.counts import HELD_OUT, SKIPPED, Counts
from gristmill.engine.execution.staging import local_copies
from gristmill.errors import DamagedFile, InputError, UsageError
from gristmill.io.artefacts import open_table
from gristmill.io.documents import ONE_SLICE, DocKey, slices_at
from gristmill.io.facts import INDEX_FILE, read_index
from gristmill.io.readers import read_documents
from gristmill.io.token_shards import Manifest
from gristmill.steps import FORM_CHARACTERS
from gristmill.storage.files import is_file
from gristmill.wording import count_of
from gristmill_cli.documents.document_scores import read_scores
from gristmill_cli.documents.duplicates import DUPLICATES
from gristmill_cli.documents.id_search import IdSearch
from gristmill_cli.documents.takedown import describe_takedown
from gristmill_cli.run_check import scan_inputs
from gristmill_cli.run_config import RunConfig, is_data_run, load_options, read_options
from gristmill_cli.run_records import load_record
from gristmill_cli.stages.apply import ApplyFunction
from gristmill_cli.stages.mix import DecideMix
from gristmill_cli.stages.pipeline import FIRST_STAGE, facts_of_raw_corpus, plan_stages
from gristmill_cli.stages.spec import StageSpec
from preprocessing.apply import failed_path
from preprocessing.mixing.decisions import HELD_OUT_COPY
from preprocessing.mixing.drops import LISTED
from preprocessing.mixing.mix_manifest import MixManifest, read_order
from preprocessing.mixing.token_order import TRAIN, DocumentPlaces, TokenPlace
from preprocessing.steps.normalise import web_libraries
from preprocessing.steps.text_digest import TEXT_DIGEST

_PLACE = re.compile(rf"(?:tokens/)?({TRAIN}|{HELD_OUT})(?:/(tokens_\d+))?@(\d+)")
_KEY = re.compile(r".+/.+@\d+")
_MAX_KEYS = 5  # of documents with one id that are named
_FACTS = ("file", "row", FORM_CHARACTERS, "form_bytes", *TEXT_DIGEST)
_RAW_COLUMNS = ("raw_file", "raw_row", "file", "row", "reason", "value", "detail", "raw_bytes", "bytes")


@dataclass(frozen=True)
class RawRecord:
    """What the first stage did with a record: its keys in the raw corpus and in what was written, or why it is not."""

    raw: DocKey
    written: DocKey | None
    outcome: str
    is_skipped: bool = False  # of a web archive: it is no document, and has the key of the next one


@dataclass(frozen=True)
class Fate:
    """What a stage did with a document, in words."""

    stage: str
    outcome: str
    lines: tuple[str, ...] = ()  # of a list, to copy


def trace(out: Positional[Path], document: Positional[str]) -> Group:
    """Tell what became of a document in each stage of a run, from its raw file and row to its place in the tokens.

    Changes nothing. By an id or url the raw corpus is read; by a key only what the run noted.

    Args:
        out: The --out of a `gristmill run`; also s3://bucket/folder.
        document: Its key, FILE@ROW with rows from 0, in the raw corpus or as reports and `gristmill duplicates` show
            it; its own field `id` or `url`; or its place in the tokens, such as train@17, holdout@0 or
            tokens/train/tokens_00002@5 (documents are counted from 0).

    Raises:
        UsageError: the folder is not of a run, or there is no such document.
    """
    if not is_data_run(out):
        raise UsageError(f"{out}: expected the --out of a gristmill run, got no run.json of one in it")
    try:
        config = load_options(read_options(out), out)
    except ValueError as error:
        raise InputError(
            f"{out} has options of another version ({error}): run the same `gristmill run` again"
        ) from error
    tracer = Tracer(config)
    shown = list[Table | Text]()
    for title, fates in tracer.find(document):
        shown.append(_table(title, fates))
        shown += [Text(line) for fate in fates for line in fate.lines]  # not in a table, which breaks long lines
    return Group(*shown)


def _table(title: str, fates: list[Fate]) -> Table:
    table = Table("stage", "what became of it", title=Text(title), box=None, pad_edge=False, title_justify="left")
    for fate in fates:
        table.add_row(fate.stage, Text(fate.outcome))
    return table


class Tracer:
    """Follows documents through the records of a run."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.out = config.out
        self.cleaning = [stage for stage in plan_stages(config) if stage.losses]  # they rewrite texts

    def find(self, document: str) -> Iterator[tuple[str, list[Fate]]]:
        """Yield a title and the fates of each record that is meant. Raises UsageError if there is none."""
        place = _PLACE.fullmatch(document)
        if place:
            key = self._token_order().key_at(self._place(place[1], place[2], int(place[3])))
            yield from self._by_key(key, is_raw=False, is_mixed=True)
        elif _KEY.fullmatch(document):
            yield from self._by_key(DocKey.parse(document), is_raw=True, is_mixed=True)
        else:
            yield from self._by_id(document)

    def keys_in_tokens(self, set_name: str, numbers: Iterable[int]) -> dict[int, DocKey]:
        """Return the keys in what was mixed of documents of the train set or the holdout, by their numbers there."""
        return self._token_order().keys_at(set_name, numbers)

    def raw_keys(self, keys: Iterable[DocKey]) -> dict[DocKey, DocKey]:
        """Return the keys in the raw corpus of documents, where they were noted, given the keys in what was mixed.

        What a function of the user yields (`apply`) has none.
        """
        facts = facts_of_raw_corpus(self.config)
        if self.config.apply.function or not is_file(facts / INDEX_FILE):
            return {}
        mixed_of = {self._before_cleaning(key): key for key in set(keys)}
        rows_of = dict[str, list[int]]()
        for key in mixed_of:
            rows_of.setdefault(key.file, []).append(key.row)
        with local_copies([facts / INDEX_FILE]) as (index,):
            files = read_index(index)
        found = dict[DocKey, DocKey]()
        for file in files:
            for name in {part.file for part in file.slices} & rows_of.keys():
                with local_copies([facts / file.path]) as (copy,):
                    rows = _select(copy, ["raw_file", "raw_row", "row"], {"file": name}, {"row": rows_of[name]})
                for row in rows:
                    mixed = mixed_of.get(DocKey(name, row["row"]))
                    if mixed is not None:
                        found[mixed] = DocKey(row["raw_file"], row["raw_row"])
        return found

    def follow(self, record: RawRecord) -> list[Fate]:
        """Return what became of a record of the raw corpus in each stage that has finished."""
        fates = [Fate(FIRST_STAGE, record.outcome)]
        key = record.written
        if key is None:
            return fates
        if self.config.apply.function:
            failed = failed_path(self.out / ApplyFunction.output)
            if is_file(failed):
                with local_copies([failed]) as (copy,):
                    rows = _select(copy, None, {"file": key.file, "row": key.row})
                if rows:
                    return [*fates, Fate("apply", f"removed: {rows[0]['rule']}, {rows[0]['detail']}")]
            fates.append(Fate("apply", "a function of yours read it: what that yields has keys of its own"))
            return fates
        for stage in self.cleaning:
            if load_record(self.out, stage.name):
                key, outcome = self._after(stage, key)
                fates.append(Fate(stage.name, outcome))
                if key is None:
                    return fates
        return fates + list(self._after_cleaning(key))

    def _by_key(self, key: DocKey, is_raw: bool, is_mixed: bool) -> Iterator[tuple[str, list[Fate]]]:
        """Yield what became of the records with this key: in the raw corpus, or in what was mixed of it, or in both."""
        records = self._raw_records(key, "raw_file", "raw_row") if is_raw else []
        written = self._before_cleaning(key)
        if is_mixed and not self.config.apply.function:
            known = {record.raw for record in records}
            mixed = self._raw_records(written, "file", "row")
            records += [record for record in mixed if record.raw not in known]
        documents = [record for record in records if not record.is_skipped]
        for record in documents or records:
            yield str(record.raw), self.follow(record)
        if not records:
            fates = list(self._after_cleaning(key))
            if not fates and not load_record(self.out, FIRST_STAGE):
                raise UsageError(
                    f"{self.out}: {FIRST_STAGE} has not finished, which notes what became of {key}: run the same "
                    "`gristmill run` again, then trace it"
                )
            if not fates:
                raise UsageError(
                    f"{self.out} knows no document {key}: expected a key FILE@ROW (rows from 0) of the corpus, an id, "
                    "a url, or a place in the tokens such as train@17"
                )
            yield f"{key} in what was mixed", fates

    def _raw_records(self, key: DocKey, file_column: str, row_column: str) -> list[RawRecord]:
        """Return the records of the first stage whose key in these columns is this one."""
        facts = facts_of_raw_corpus(self.config)
        if not is_file(facts / INDEX_FILE):
            return []
        with local_copies([facts / INDEX_FILE]) as (index,):
            files = read_index(index)
        found = list[RawRecord]()
        for file in files:
            is_elsewhere = file_column == "file" and all(
                part.file != key.file or not part.first <= key.row < part.end for part in file.slices
            )
            if is_elsewhere:
                continue
            with local_copies([facts / file.path]) as (copy,):
                rows = _select(copy, list(_RAW_COLUMNS), {file_column: key.file, row_column: key.row})
            found += [_to_record(row) for row in rows]
        return found

    def _before_cleaning(self, key: DocKey) -> DocKey:
        """Return the key that a document had after the first stage, given that in what was mixed."""
        for stage in reversed(self.cleaning):
            if load_record(self.out, stage.name):
                for removed in self._removed_rows(stage, key.file):
                    if removed > key.row:
                        break
                    key = DocKey(key.file, key.row + 1)
        return key

    def _after(self, stage: StageSpec, key: DocKey) -> tuple[DocKey | None, str]:
        """Return the key of a document after a stage that rewrites texts, None if it went, and what was done."""
        with local_copies([_losses(self.out, stage)]) as (copy,):
            rows = _select(copy, None, {"file": key.file, "row": key.row})
        removed = self._removed_rows(stage, key.file)
        if rows and rows[0]["removed"]:
            return None, f"removed: {stage.describe_loss(rows)}"
        after = DocKey(key.file, key.row - sum(row < key.row for row in removed))
        return after, stage.describe_loss(rows) if rows else "unchanged"

    def _removed_rows(self, stage: StageSpec, file: str) -> list[int]:
        """Return the rows of a file that a stage removed, ascending."""
        with local_copies([_losses(self.out, stage)]) as (copy,):
            rows = _select(copy, ["row", "removed"], {"file": file, "removed": True})
        return sorted({row["row"] for row in rows})

    def _after_cleaning(self, key: DocKey) -> Iterator[Fate]:
        """Yield what the stages did that read no text, given the key in what was mixed."""
        fact = self._fact(key)
        if load_record(self.out, "filter") and fact:
            is_short = self.is_short(fact)
            length = f"{fact[FORM_CHARACTERS]:,} characters without punctuation"
            yield Fate("filter", f"short: {length}" if is_short else length)
        scores = [f"{name} {of_score[key]:.4g}" for name, of_score in read_scores(self.config, [key]).items()]
        if load_record(self.out, "choose_by_score") and scores:
            yield Fate("choose_by_score", ", ".join(scores))
        kept = None
        if load_record(self.out, "generate_duplicates_dict") and fact:
            kept, outcome = self._similarity(key)
            yield Fate("generate_duplicates_dict", outcome)
        row = self._decision(key)
        if fact:
            is_down = row is not None and row["reason"] == LISTED
            fact_of_kept = self._fact(kept) if kept else None
            yield Fate("--keep_list", *describe_takedown(self.config.keep_list, is_down, fact, fact_of_kept))
        if row:
            yield Fate(DecideMix.name, _describe_decision(row))
        if row and row["copies"] and is_file(self.out / "tokens" / "order.json"):
            places = self._token_order().places_of(key)
            yield Fate("encode", "; ".join(map(self._shard_of, places)))

    def is_short(self, fact: dict[str, Any]) -> bool:
        """Return whether a document with such facts is below the threshold of the run."""
        spec = self.config.filter
        size = fact[FORM_CHARACTERS] if spec.unit == "character" else fact["form_bytes"]
        return bool(size < spec.threshold)

    def _fact(self, key: DocKey) -> dict[str, Any] | None:
        facts = self.out / "facts"
        if not is_file(facts / INDEX_FILE):
            return None
        with local_copies([facts / INDEX_FILE]) as (index,):
            files = read_index(index)
        for file in files:
            if any(part.file == key.file and part.first <= key.row < part.end for part in file.slices):
                with local_copies([facts / file.path]) as (copy,):
                    rows = _select(copy, list(_FACTS), _columns_of(key))
                return rows[0] if rows else None
        return None

    def _similarity(self, key: DocKey) -> tuple[DocKey | None, str]:
        """Return the document that is kept in place of this one, if there is one, and what the comparison found."""
        with local_copies([self.out / DUPLICATES]) as (copy,):
            removed = _select(copy, None, _columns_of(key))
            others = _select(copy, ["file", "row"], {"kept_file": key.file, "kept_row": key.row})
        if removed:
            pair = removed[0]
            kept = DocKey(pair["kept_file"], pair["kept_row"])
            similarity = pair["similarity"]
            measured = "" if similarity is None else f", similarity {similarity:.3g}"
            return kept, f"duplicate of {kept}{measured}"
        return None, f"kept in place of {count_of(len(others), 'other')}" if others else "no duplicate"

    def _decision(self, key: DocKey) -> dict[str, Any] | None:
        folder = DecideMix().path(self.config)
        if not load_record(self.out, DecideMix.name):
            return None
        for file in MixManifest.load(folder).files:
            if any(part.file == key.file and part.first <= key.row < part.end for part in file.slices):
                with local_copies([folder / file.path]) as (copy,):
                    rows = _select(copy, None, _columns_of(key))
                return rows[0] if rows else None
        return None

    def _token_order(self) -> DocumentPlaces:
        return DocumentPlaces(DecideMix().path(self.config), read_order(self.out / "tokens").parts)

    def _shard_of(self, place: TokenPlace) -> str:
        number = place.number
        for shard in Manifest.load(self.out / "tokens" / place.set_name).shards:
            if number < shard.documents:
                return f"tokens/{place.set_name}/{shard.name}@{number}"
            number -= shard.documents
        raise InputError(f"{self.out}/tokens/{place.set_name} has fewer documents than the mix: run the same run again")

    def _place(self, set_name: str, shard_name: str | None, number: int) -> TokenPlace:
        """Return a place, given its number in a shard, or in the set if no shard is named."""
        if shard_name is None:
            return TokenPlace(set_name, number)
        before = 0
        for shard in Manifest.load(self.out / "tokens" / set_name).shards:
            if shard.name == shard_name:
                if number < shard.documents:
                    return TokenPlace(set_name, before + number)
                raise UsageError(f"{shard_name}@{number}: expected a document from 0 to {shard.documents - 1:,}")
            before += shard.documents
        raise UsageError(f"tokens/{set_name} has no shard {shard_name}: expected one such as tokens_00000")

    def _by_id(self, wanted: str) -> Iterator[tuple[str, list[Fate]]]:
        """Yield what became of the record with this id or url: a document, else a malformed or a skipped record.

        Raises UsageError unless it is one.
        """
        keys = list[DocKey]()
        with tempfile.TemporaryDirectory() as folder:
            rejects = IdSearch(Path(folder) / "malformed", wanted)
            files = scan_inputs(self.config, self.config.corpus).files
            web_libraries(file.name for file in files)  # raises if they are missing
            for file in files:
                with local_copies([file.path]) as (copy,), suppress(DamagedFile):  # the run left it out, too
                    (part,) = slices_at(replace(file, path=copy), ONE_SLICE)
                    for document in read_documents(part, Counts({}, []), rejects.of(file.name)):
                        if wanted in (document.own_id, str(document.value("url"))):
                            keys.append(document.key)
        keys = keys or rejects.malformed
        if not keys and rejects.skipped:
            for key, reason in rejects.skipped:
                yield f"{wanted} in {key.file}", [Fate(FIRST_STAGE, f"removed: {reason}")]
            return
        if not keys:
            raise UsageError(f"{self.config.corpus} has no document with the id or url {wanted!r}; try a key FILE@ROW")
        if len(keys) > 1:
            named = ", ".join(map(str, keys[:_MAX_KEYS]))
            raise UsageError(f"{len(keys):,} documents have the id or url {wanted!r}: give the key of one, of {named}")
        yield from self._by_key(keys[0], is_raw=True, is_mixed=False)


def _to_record(row: dict[str, Any]) -> RawRecord:
    raw = DocKey(row["raw_file"], row["raw_row"])
    if row["row"] is not None:
        change = row["raw_bytes"] - row["bytes"]
        changed = ""
        if change:
            changed = f", {abs(change):,} bytes {'shorter' if change > 0 else 'longer'}"
        key = DocKey(row["file"], row["row"])
        return RawRecord(raw, key, f"kept as {key}{changed}")
    value = "" if row["value"] is None else f" ({row['value']:.4g})"
    detail = f", {row['detail']}" if row["detail"] else ""
    is_skipped = row["reason"].startswith(f"{SKIPPED}: ")
    return RawRecord(raw, None, f"removed: {row['reason']}{value}{detail}", is_skipped)


def _losses(out: Path, stage: StageSpec) -> Path:
    """Return the table of what documents lost in a stage."""
    assert stage.losses is not None, stage.name
    return out / stage.losses


def _describe_decision(row: dict[str, Any]) -> str:
    copies = row["copies"]
    if copies == HELD_OUT_COPY:
        return "held out"
    if not copies:
        reason = str(row["reason"])
        return reason if reason.startswith("left out") else f"left out: {reason}"
    return "in the train set" if copies == 1 else f"in the train set {copies} times"


def _columns_of(key: DocKey) -> dict[str, Any]:
    return {"file": key.file, "row": key.row}


def _select(
    path: Path, columns: list[str] | None, equal: dict[str, Any], among: Mapping[str, list[int]] = MappingProxyType({})
) -> list[dict[str, Any]]:
    """Return the rows of a table in which columns have these values, a row group at a time.

    `among`: columns that have one of several values; they must be read, too.
    """
    rows = list[dict[str, Any]]()
    with open_table(path, list(equal)) as file:
        for number in range(file.num_row_groups):
            table = file.read_row_group(number, columns=columns and [*{*columns, *equal}])
            is_wanted = pa.chunked_array([pa.repeat(pa.scalar(True), table.num_rows)])
            for name, value in equal.items():
                is_wanted = pc.and_(is_wanted, pc.fill_null(pc.equal(table.column(name), value), False))
            for name, values in among.items():
                is_wanted = pc.and_(is_wanted, pc.is_in(table.column(name), pa.array(values)))
            rows += table.filter(is_wanted).to_pylist()
    return rows
