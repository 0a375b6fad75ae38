"""Find the extras that a run needs, by the formats, models and options that its file names."""

import tomllib
from pathlib import Path

from gristmill.config import load_config
from gristmill.errors import GristmillError
from gristmill.io.documents import WEB_FORMATS, parse_name
from gristmill.paths import paths_in, scheme_of
from gristmill_cli.run_check import scan_inputs
from gristmill_cli.run_config import RunConfig
from preprocessing.quality.recipe import load_recipe, read_recipe

_PAGES = (*WEB_FORMATS, "html")


def needed_extras(file: Path) -> dict[str, str]:
    """Return the extras that the run of a TOML file needs, and what for. Raises UsageError for a file that is none."""
    config = load_config(RunConfig, ["--config", str(file)])
    extras = dict[str, str]()
    pages = _find_pages(config)
    if pages:
        extras["web"] = pages
    if config.recipe:
        extras |= _extras_of_recipe(config.recipe)
    for name, score in config.scores.items():
        if score.fasttext:
            extras["fasttext"] = f"[scores.{name}]"
        if score.transformers:
            extras["classifier"] = f"[scores.{name}]"
    tokenizer = config.tokenizer
    if tokenizer.model_type == "byte-bpe":
        extras["tokenizers"] = "tokenizer.model_type"
    elif tokenizer.file and tokenizer.file.suffix != ".model":
        extras["tokenizers"] = str(tokenizer.file)
    if config.normalize.ftfy:
        extras["ftfy"] = "normalize.ftfy"
    if config.executor == "ray":
        extras["ray"] = "executor"
    places = [*map(str, paths_in(config)), *(source.path for source in config.sources.values())]
    for path in places:
        if scheme_of(Path(path)) == "hf":
            extras["hub"] = path
    return extras


def _extras_of_recipe(recipe: str) -> dict[str, str]:
    """Return the extras that a recipe needs, and what for; they need not be installed, as they must be to load it."""
    try:
        rules = tomllib.loads(read_recipe(recipe))
    except tomllib.TOMLDecodeError:
        load_recipe(recipe)  # raises, and says where
        raise
    extras = dict[str, str]()
    for rule in ("language", "languages"):
        if rule in rules:
            extras["language"] = f"the rule {rule} of {recipe}"
    personal = rules.get("personal")
    if isinstance(personal, dict) and any(personal.get(kind) for kind in ("phone", "card", "iban")):
        extras["personal"] = f"the rule personal of {recipe}"
    return extras


def _find_pages(config: RunConfig) -> str:
    """Return what of a run reads web archives or pages: a table, an option, or a file of the corpus; '' if nothing."""
    for name, source in config.sources.items():
        if source.format in _PAGES:
            return f"[sources.{name}] format {source.format}"
    if "html" in config.normalize.read_also:
        return "normalize.read_also"
    try:
        files = scan_inputs(config, config.corpus).files
    except (GristmillError, OSError):  # the corpus is not here, or on a store that needs an extra itself
        return ""
    for file in files:
        parts = parse_name(file.name)
        if parts and parts.format in _PAGES:
            return file.name
    return ""
