"""Tracer: what became of documents, stage by stage, from the raw file to the places among the tokens, and back."""

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from gristmill.counts import HELD_OUT
from gristmill.errors import InputError, UsageError
from gristmill.io.documents import DocKey
from gristmill.io.facts import are_about
from gristmill.io.token_shards import Manifest
from gristmill.steps import FORM_CHARACTERS
from gristmill.storage.files import is_file
from gristmill.wording import count_of
from gristmill_cli.documents.document_scores import describe_scores
from gristmill_cli.documents.duplicates import DUPLICATES
from gristmill_cli.documents.id_search import IdSearch, search_ids
from gristmill_cli.documents.noted_facts import NotedFacts
from gristmill_cli.documents.raw_records import RAW_COLUMNS, RawRecord, raw_record_of
from gristmill_cli.documents.removed_lines import describe_removed, line_of_document, line_of_raw_document
from gristmill_cli.documents.table_cache import TableCache
from gristmill_cli.documents.takedown import describe_takedown, line_of
from gristmill_cli.documents.way import Fate, Way, describe_decision
from gristmill_cli.run_config import RunConfig
from gristmill_cli.run_records import load_record
from gristmill_cli.stages.apply import ApplyFunction
from gristmill_cli.stages.filter import ChooseAfterCopies, ChooseByScore
from gristmill_cli.stages.mix import DecideMix
from gristmill_cli.stages.note_facts import NoteFacts, ScoreAfterCopies
from gristmill_cli.stages.pipeline import FIRST_STAGE, facts_of_raw_corpus, first_texts, plan_stages
from gristmill_cli.stages.spec import StageSpec
from preprocessing.apply import failed_path
from preprocessing.document_pass import removed_path
from preprocessing.mixing.drops import LISTED
from preprocessing.mixing.keep_list import GONE
from preprocessing.mixing.mix_manifest import MixManifest, read_order
from preprocessing.mixing.token_order import TRAIN, DocumentPlaces, TokenPlace

_PLACE = re.compile(rf"(?:tokens/)?({TRAIN}|{HELD_OUT})(?:/(tokens_\d+))?@(\d+)")
_KEY = re.compile(r".+/.+@\d+")
_MAX_KEYS = 5  # of documents with one id that are named


class Tracer:
    """Follows documents through the records of a run."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.out = config.out
        self.cleaning = [stage for stage in plan_stages(config) if stage.losses]  # they rewrite texts
        self._tables = TableCache()
        self._noted = NotedFacts(self._tables)

    def find(self, document: str) -> Iterator[tuple[str, list[Fate]]]:
        """Yield a title and the fates of each record that is meant. Raises UsageError if there is none."""
        ways = self.find_all([document])[document]
        if isinstance(ways, UsageError):
            raise ways
        for way in ways:
            yield way.title, way.fates

    def find_all(self, documents: Collection[str], only_raw: Collection[str] = ()) -> dict[str, list[Way] | UsageError]:
        """Return the ways of the records that each document's name means, or why there are none.

        The raw corpus is read once for all ids and urls, and the decisions of the mix once for all places. Keys among
        `only_raw` are keys of the raw corpus alone.
        """
        ids = [name for name in documents if not _PLACE.fullmatch(name) and not _KEY.fullmatch(name)]
        searched = search_ids(self.config, frozenset(ids)) if ids else None
        ways_of = dict[str, list[Way] | UsageError]()
        encoded = list[Way]()
        for name in dict.fromkeys(documents):
            try:
                ways = list(self._find(name, searched, is_mixed=name not in only_raw))
            except UsageError as error:
                ways_of[name] = error
                continue
            ways_of[name] = ways
            encoded += [way for way in ways if way.in_tokens]
        self._add_places(encoded)
        return ways_of

    def _find(self, name: str, searched: IdSearch | None, is_mixed: bool) -> Iterator[Way]:
        """Yield the ways of the records that a document's name means, without the places among the tokens."""
        place = _PLACE.fullmatch(name)
        if place:
            key = self._token_order.key_at(self._place(place[1], place[2], int(place[3])))
            yield from self._by_key(key, is_raw=False, is_mixed=True)
        elif _KEY.fullmatch(name):
            yield from self._by_key(DocKey.parse(name), is_raw=True, is_mixed=is_mixed)
        else:
            assert searched is not None
            yield from self._by_id(name, searched)

    def keys_in_tokens(self, set_name: str, numbers: Iterable[int]) -> dict[int, DocKey]:
        """Return the keys in what was mixed of documents of the train set or the holdout, by their numbers there."""
        return self._token_order.keys_at(set_name, numbers)

    def raw_keys(self, keys: Iterable[DocKey]) -> dict[DocKey, DocKey]:
        """Return the keys in the raw corpus of documents, where they were noted, given the keys in what was mixed.

        What a function of the user yields (`apply`) has none.
        """
        facts = facts_of_raw_corpus(self.config)
        if self.config.apply.function:
            return {}
        mixed_of = dict[DocKey, DocKey]()
        rows_of = dict[str, list[int]]()
        for mixed_key in set(keys):
            key = self._before_cleaning(mixed_key)
            mixed_of[key] = mixed_key
            rows_of.setdefault(key.file, []).append(key.row)
        raw_of = dict[DocKey, DocKey]()
        for file in self._noted.files(facts):
            for name in rows_of.keys() & set(file.corpus_files):
                columns = ["raw_file", "raw_row", "row"]
                rows = self._tables.select(facts / file.path, columns, {"file": name}, {"row": rows_of[name]})
                for row in rows:
                    mixed = mixed_of.get(DocKey(name, row["row"]))
                    if mixed is not None:
                        raw_of[mixed] = DocKey(row["raw_file"], row["raw_row"])
        return raw_of

    def _follow(self, record: RawRecord, name: str = "") -> Way:
        """Return the way of a record of the raw corpus through each stage that has finished, places aside.

        `name` is how the lines that take it down name it: by default its key.
        """
        fates = [Fate(FIRST_STAGE, record.outcome)]
        way = Way(str(record.raw), fates)
        key = record.written
        if key is None:
            if record.is_readable:
                self._add_line(way, line_of_raw_document(self.config, record.raw, name or str(record.raw)))
            return way
        if self.config.apply.function:
            failure = self._listed_in(failed_path(self.out / ApplyFunction.output), key)
            if failure:
                fates.append(Fate("apply", failure))
                self._add_line(way, self._line_of_removed(record, ApplyFunction(), key, name))
                return way
            fates.append(Fate("apply", "a function of yours read it: what that yields has keys of its own"))
            return way
        for stage in self.cleaning:
            if load_record(self.out, stage.name):
                after, outcome = self._after(stage, key)
                fates.append(Fate(stage.name, outcome))
                if after is None:
                    self._add_line(way, self._line_of_removed(record, stage, key, name))
                    return way
                key = after
        failure = self._failure_in(NoteFacts.name, NoteFacts.output, key)
        if failure:
            fates.append(Fate(NoteFacts.name, failure))
            self._add_line(way, self._line_of_removed(record, NoteFacts(), key, name))
            return way
        self._follow_mixed(way, key, name or str(record.raw), self._first_fact(record.written))
        return way

    def _first_fact(self, key: DocKey | None) -> dict[str, Any] | None:
        """Return the facts of a text as the first stage wrote it, where later ones cut it, given the key there."""
        first = first_texts(self.config)
        if first is None or key is None:
            return None
        return self._noted.of_document(first.facts, key)

    def _line_of_removed(self, record: RawRecord, stage: StageSpec, key: DocKey, name: str) -> str:
        """Return the line that keeps out a document that a stage removed which read it under a key; '' if none does.

        It is for the text as the first stage wrote it, which holds whatever later stages cut, or as this one read it.
        """
        name = name or str(record.raw)
        fact = self._first_fact(record.written)
        if fact:
            return line_of(fact, name, GONE)
        return line_of_document(self.config, stage, key, name)

    def _failure_in(self, stage: str, folder: str, key: DocKey) -> str:
        """Return how a step failed on a document in a stage that noted facts in a folder; '' if none did."""
        names = {planned.name for planned in plan_stages(self.config)}
        if stage not in names or not load_record(self.out, stage):
            return ""
        return self._listed_in(removed_path(self.out / folder), key)

    def _listed_in(self, table: Path, key: DocKey) -> str:
        """Return why a table of removed documents has a document; '' if it has not, or there is no such table."""
        rows = self._tables.select(table, ["rule", "detail"], _columns_of(key)) if is_file(table) else []
        return f"removed: {rows[0]['rule']}, {rows[0]['detail']}" if rows else ""

    def _add_line(self, way: Way, line: str) -> None:
        """Add to the way of a document that was removed the line that keeps it out; '' if none does."""
        if line:
            way.take_down = (line,)
        way.fates.append(Fate("--keep_list", *describe_removed(self.config.keep_list, line)))

    def _by_key(self, key: DocKey, is_raw: bool, is_mixed: bool, name: str = "") -> Iterator[Way]:
        """Yield the ways of the records with this key: in the raw corpus, or in what was mixed of it, or in both."""
        records = list[RawRecord]()
        if is_raw:
            records = self._raw_records(key, "raw_file", "raw_row")
        written = self._before_cleaning(key)
        if is_mixed and not self.config.apply.function:
            known = {record.raw for record in records}
            for record in self._raw_records(written, "file", "row"):
                if record.raw not in known:
                    records.append(record)
        documents = [record for record in records if not record.is_skipped]
        for record in documents or records:
            yield self._follow(record, name)
        if not records:
            way = Way(f"{key} in what was mixed", [])
            if is_mixed:
                self._follow_mixed(way, key, str(key))
            first_record = load_record(self.out, FIRST_STAGE)
            if first_record and key.file in first_record.counts.damaged:
                fault = first_record.counts.damaged[key.file].fault
                way = Way(str(key), [Fate(FIRST_STAGE, f"left out with its file, which is damaged: {fault}")])
            if not way.fates and not first_record:
                raise UsageError(
                    f"{self.out}: {FIRST_STAGE} has not finished, which notes what became of {key}: run the same "
                    "`gristmill run` again, then trace it"
                )
            if not way.fates:
                raise UsageError(
                    f"{self.out} knows no document {key}: expected a key FILE@ROW (rows from 0) of the corpus, an id, "
                    "a url, or a place in the tokens such as train@17"
                )
            yield way

    def _raw_records(self, key: DocKey, file_column: str, row_column: str) -> list[RawRecord]:
        """Return the records of the first stage whose key in these columns is this one."""
        facts = facts_of_raw_corpus(self.config)
        records = list[RawRecord]()
        for file in self._noted.files(facts):
            if file_column == "file" and not are_about(file.slices, key.file, key.row):
                continue
            rows = self._tables.select(facts / file.path, RAW_COLUMNS, {file_column: key.file, row_column: key.row})
            records += map(raw_record_of, rows)
        return records

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
        rows = self._tables.select(_losses(self.out, stage), None, _columns_of(key))
        removed = self._removed_rows(stage, key.file)
        if rows and rows[0]["removed"]:
            return None, f"removed: {stage.describe_loss(rows)}"
        after = DocKey(key.file, key.row - bisect_left(removed, key.row))
        if not rows:
            return after, "unchanged"
        return after, stage.describe_loss(rows)

    def _removed_rows(self, stage: StageSpec, file: str) -> list[int]:
        """Return the rows of a file that a stage removed, ascending."""
        rows = self._tables.select(_losses(self.out, stage), ["row", "removed"], {"file": file, "removed": True})
        return sorted({row["row"] for row in rows})

    def _follow_mixed(self, way: Way, key: DocKey, name: str, first_fact: dict[str, Any] | None = None) -> None:
        """Add to a way what the stages did that read no text, given the key in what was mixed; places aside.

        `name` is how the lines that take the document down name it; `first_fact`, the facts of its first text.
        """
        fates = way.fates
        fact = self._fact(key)
        if load_record(self.out, "filter") and fact:
            is_short = self.is_short(fact)
            length = f"{fact[FORM_CHARACTERS]:,} characters without punctuation"
            if is_short:
                length = f"short: {length}"
            fates.append(Fate("filter", length))
        scores = describe_scores(self.config, key)
        if load_record(self.out, ChooseByScore.name) and scores:
            fates.append(Fate(ChooseByScore.name, scores))
        kept = None
        if load_record(self.out, "generate_duplicates_dict") and fact:
            kept, outcome = self._similarity(key)
            fates.append(Fate("generate_duplicates_dict", outcome))
        failure = self._failure_in(ScoreAfterCopies.name, ScoreAfterCopies.output, key)
        if failure:
            fates.append(Fate(ScoreAfterCopies.name, failure))
        scores = describe_scores(self.config, key, "copies")
        if load_record(self.out, ChooseAfterCopies.name) and scores:
            fates.append(Fate(ChooseAfterCopies.name, scores))
        row = self._decision(key)
        if fact:
            is_down = row is not None and row["reason"] == LISTED
            lines = [line_of(fact, name)]
            fact_of_kept = self._fact(kept) if kept else None
            is_exact_copy = fact_of_kept is not None and line_of(fact_of_kept, name) == lines[0]
            if kept and fact_of_kept and not is_exact_copy:
                lines.append(line_of(fact_of_kept, str(self._raw_key(kept))))
            way.take_down = tuple(lines)
            facts = [fact]
            if first_fact:
                facts.append(first_fact)
            fates.append(Fate("--keep_list", *describe_takedown(self.config.keep_list, is_down, facts, way.take_down)))
        if row:
            fates.append(Fate(DecideMix.name, describe_decision(row)))
        if row and row["copies"] and is_file(self.out / "tokens" / "order.json"):
            failure = self._listed_in(removed_path(self.out / "tokens"), key)
            if failure:
                fates.append(Fate("encode", failure))
            else:
                way.in_tokens = key

    def _add_places(self, ways: Collection[Way]) -> None:
        """Add the places among the tokens to the ways of documents that were encoded."""
        keys = {way.in_tokens for way in ways if way.in_tokens}
        if not keys:
            return
        places_of = self._token_order.places_of_all(keys)
        for way in ways:
            if way.in_tokens:
                places = map(self._shard_of, places_of[way.in_tokens])
                way.fates.append(Fate("encode", "; ".join(places)))

    def _raw_key(self, key: DocKey) -> DocKey:
        """Return the key in the raw corpus of a document, given that in what was mixed, or that where none is known."""
        if self.config.apply.function:
            return key
        records = self._raw_records(self._before_cleaning(key), "file", "row")
        if not records:
            return key
        return records[0].raw

    def is_short(self, fact: dict[str, Any]) -> bool:
        """Return whether a document with such facts is below the threshold of the run."""
        spec = self.config.filter
        column = FORM_CHARACTERS if spec.unit == "character" else "form_bytes"
        return bool(fact[column] < spec.threshold)

    def _fact(self, key: DocKey) -> dict[str, Any] | None:
        return self._noted.of_document(self.out / "facts", key)

    def _similarity(self, key: DocKey) -> tuple[DocKey | None, str]:
        """Return the document that is kept in place of this one, if there is one, and what the comparison found."""
        table = self.out / DUPLICATES
        removed = self._tables.select(table, None, _columns_of(key))
        if removed:
            pair = removed[0]
            kept = DocKey(pair["kept_file"], pair["kept_row"])
            outcome = f"duplicate of {kept}"
            if pair["similarity"] is not None:
                outcome += f", similarity {pair['similarity']:.3g}"
            return kept, outcome
        others = self._tables.select(table, ["file", "row"], {"kept_file": key.file, "kept_row": key.row})
        if not others:
            return None, "no duplicate"
        return None, f"kept in place of {count_of(len(others), 'other')}"

    def _decision(self, key: DocKey) -> dict[str, Any] | None:
        folder = DecideMix().path(self.config)
        if not load_record(self.out, DecideMix.name):
            return None
        for file in MixManifest.load(folder).files:
            if are_about(file.slices, key.file, key.row):
                rows = self._tables.select(folder / file.path, None, _columns_of(key))
                return next(iter(rows), None)
        return None

    @cached_property
    def _token_order(self) -> DocumentPlaces:
        tokens = self.out / "tokens"
        return DocumentPlaces(DecideMix().path(self.config), read_order(tokens).parts, removed_path(tokens))

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

    def _by_id(self, name: str, searched: IdSearch) -> Iterator[Way]:
        """Yield the way of the record with this id or url: a document, else a malformed or a skipped record.

        Raises UsageError unless it is one.
        """
        keys = searched.documents[name] or searched.malformed[name]
        if not keys and searched.skipped[name]:
            for key, reason in searched.skipped[name]:
                yield Way(f"{name} in {key.file}", [Fate(FIRST_STAGE, f"removed: {reason}")])
            return
        if not keys:
            raise UsageError(f"{self.config.corpus} has no document with the id or url {name!r}; try a key FILE@ROW")
        if len(keys) > 1:
            named = ", ".join(map(str, keys[:_MAX_KEYS]))
            raise UsageError(f"{len(keys):,} documents have the id or url {name!r}: give the key of one, of {named}")
        yield from self._by_key(keys[0], is_raw=True, is_mixed=False, name=name)


def _losses(out: Path, stage: StageSpec) -> Path:
    """Return the table of what documents lost in a stage."""
    assert stage.losses is not None, stage.name
    return out / stage.losses


def _columns_of(key: DocKey) -> dict[str, Any]:
    return {"file": key.file, "row": key.row}
