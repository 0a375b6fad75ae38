"""Section of a report on scores: how they are distributed in each source, and the documents next to the limits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from gristmill.errors import GristmillError
from gristmill.io.documents import DocKey, Document
from gristmill_cli.documents.duplicates import label_among, some_documents, text_among
from gristmill_cli.report.documents import MAX_SOURCES
from gristmill_cli.report.page import NOTHING, Number, Row, figure, fold, join, quotation, section, table
from gristmill_cli.report.pictures import draw_bars, largest
from gristmill_cli.report.records import DataRun
from gristmill_cli.report.removed import excerpt
from gristmill_cli.stages.filter import ChooseByScore
from gristmill_cli.stages.pipeline import clean_corpus
from gristmill_cli.stages.spec import StageSpec
from preprocessing.from_facts.low_scores import read_score_sums
from preprocessing.scoring.score_statistics import NearLimit, ScoreSums

_BARS = 16  # of a distribution

BySource = Mapping[str, ScoreSums]


@dataclass
class ScoresSection:
    """The sums of each score by source."""

    title: str
    scores: Mapping[str, BySource]

    def show(self, run: DataRun) -> Markup:
        """Return the section."""
        documents = _documents_of(run, self.scores)
        parts = list[Markup]()
        for name, by_source in self.scores.items():
            parts += [_picture(name, by_source), table(_HEAD, _rows(by_source), f"score_{name}")]
            below = list[NearLimit]()
            above = list[NearLimit]()
            for near in _nearest(by_source):
                if near.is_kept:
                    above.append(near)
                else:
                    below.append(near)
            parts.append(_near(f"Just below the limit of {name}", below, documents))
            parts.append(_near(f"Just above it, by {name}", above, documents))
        return section(self.title, *parts)


_HEAD = ["", "documents", "mean", "deviation", "min", "max", "limit"]


def read_section(run: DataRun, stage: StageSpec) -> ScoresSection | None:
    """Return what the section shows; None, with a fault, if the records of the stage are damaged."""
    try:
        scores = read_score_sums(run.out / stage.output, stage.engine)
    except (ValueError, OSError, GristmillError) as error:
        run.faults.append(f"{stage.name} left damaged records ({error}): scores are not shown")
        return None
    title = stage.title if isinstance(stage, ChooseByScore) else stage.name
    return ScoresSection(title, scores) if scores else None


def _documents_of(run: DataRun, scores: Mapping[str, BySource]) -> Mapping[DocKey, Document]:
    """Return the documents next to the limits that are still there."""
    if run.config is None:
        return {}
    keys = list[DocKey]()
    for by_source in scores.values():
        keys += [near.key for near in _nearest(by_source)]
    return some_documents(clean_corpus(run.config), keys, run.text_column)


def _nearest(by_source: BySource) -> list[NearLimit]:
    nearest = list[NearLimit]()
    for sums in by_source.values():
        nearest += sums.near
    return nearest


def _picture(name: str, by_source: BySource) -> Markup:
    """Draw how the documents of each source are distributed over classes of a score."""
    documents = {source: sums.documents for source, sums in by_source.items()}
    shown = largest(list(by_source), documents, MAX_SOURCES)
    width, by_class = join_classes([by_source[source] for source in shown])
    numbers = range(min(map(min, by_class)), max(map(max, by_class)) + 1)
    labels = [f"{number * width:.4g}–{(number + 1) * width:.4g}" for number in numbers]
    bars = dict[str, list[float]]()
    for source, classes in zip(shown, by_class, strict=True):
        total = max(documents[source], 1)
        bars[source] = [100 * classes.get(number, 0) / total for number in numbers]
    return figure(f"documents by the score {name}", draw_bars(labels, bars, "% of documents"))


def join_classes(sums: Sequence[ScoreSums]) -> tuple[float, list[dict[int, int]]]:
    """Return classes of one width for several sources, _BARS or fewer from the first to the last, and that width."""
    width = max(of_source.width for of_source in sums)
    while True:
        joined = [of_source.classes(width) for of_source in sums]
        first = min(map(min, joined))
        last = max(map(max, joined))
        if last - first < _BARS:
            return width, joined
        width *= 2


def _rows(by_source: BySource) -> list[Row]:
    rows = list[Row]()
    for source, sums in by_source.items():
        row: Row = [source, Number(sums.documents)]
        for value in (sums.mean, sums.deviation, sums.min, sums.max):
            row.append(Number(value, f"{value:.4g}"))
        row.append("none" if sums.limit is None else Number(sums.limit, f"{sums.limit:.4g}"))
        rows.append(row)
    return rows


def _near(title: str, nearest: Sequence[NearLimit], documents: Mapping[DocKey, Document]) -> Markup:
    if not nearest:
        return NOTHING
    texts = list[Markup]()
    for near in nearest:
        text = excerpt(text_among(near.key, documents))
        texts.append(quotation(label_among(near.key, documents), text, f", {near.score:.4g}"))
    return fold(title, join(texts))
