"""The rules of a recipe in the stages that apply them: their version, alarms, and section in the card of the data."""

from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from gristmill.counts import READ, Counts, warn_of_losses
from gristmill.engine.staleness.ledger import Ledger
from gristmill.errors import GristmillError, UsageError
from gristmill_cli.run_config import RunConfig
from gristmill_cli.stages.odd_files import counts_by_file, odd_languages
from preprocessing.quality.bounds import Bounds
from preprocessing.quality.recipe import load_recipe, read_recipe

_SHOWN_DIGITS = 12  # of the SHA-256 of a recipe's rules


def rule_alarms(config: RunConfig, counts: Counts, ledger: Ledger, step: str) -> Iterator[str]:
    """Yield what looks wrong in what the rules of a recipe removed, given the ledger and the step that judged."""
    limits = config.alarms
    yield from _idle_rules(config, counts)
    files_of_source = counts_by_file(ledger, step)
    yield from odd_languages(files_of_source, limits.language)
    for source, files in sorted(files_of_source.items()):
        losses = warn_of_losses(files, "", 0, limits.times_median, "file")
        for line in list(losses.values())[:1]:
            yield f"in {source} {line}: check whether this file holds a different kind of text"


def rules_version(recipe: str) -> str:
    """Return the beginning of the SHA-256 of a recipe's TOML."""
    return sha256(recipe.encode()).hexdigest()[:_SHOWN_DIGITS]


def _idle_rules(config: RunConfig, counts: Counts) -> Iterator[str]:
    """Yield a sentence if rules removed none of many documents."""
    documents = counts.total(READ).documents
    limit = config.alarms.idle_rule
    if not limit or documents < limit:
        return
    try:
        steps = load_recipe(config.recipe).steps
    except GristmillError:  # a report of a run whose recipe is no longer there
        return
    rules = [step.name for step in steps if isinstance(step, Bounds)]
    idle = [rule for rule in rules if not counts.total(rule).documents]
    if idle:
        yield f"of {documents:,} documents these rules removed none: {', '.join(idle)}: look at their limits"


def rules_card(recipe: str, settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the rules of a recipe, if they are the rules that the run had, as the settings of its stage say."""
    try:
        rules = read_recipe(recipe)
    except UsageError:
        rules = ""
    yield f"\n## Rules of the recipe {Path(recipe).name}\n"
    if settings.get("rules") == rules_version(rules):
        yield f"```toml\n{rules.strip()}\n```"
    else:
        yield "The file of its rules has changed since the run."
