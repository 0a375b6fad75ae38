"""Models on the Hugging Face Hub, hf://ORG/NAME[@REVISION]: what of them is read, fetched into the Hub's cache."""

import os
from pathlib import Path

from gristmill.errors import StorageError, UsageError, require
from gristmill.io.tokenizer_companions import COMPANIONS, JSON, MODEL, RANKS, TEMPLATES
from gristmill.paths import ObjectName, object_name, scheme_of
from gristmill.storage.hub import hub_library
from training.hugging_face.export_hf import GENERATION_FILE, INDEX_FILE
from training.hugging_face.hf_config import CONFIG_FILE

_FILES = {CONFIG_FILE, GENERATION_FILE, INDEX_FILE, JSON, MODEL, RANKS, "vocab.json", *COMPANIONS}
_WEIGHTS = ".safetensors"


def local_folder(model: Path) -> Path:
    """Return the folder of a model: as it is given, or where the files of hf://ORG/NAME[@REVISION] are fetched to.

    Files that are in the Hub's cache are not fetched again. Raises UsageError for a name that has no model,
    StorageError where the Hub cannot be reached.
    """
    if not scheme_of(model):
        return model
    name = object_name(model)
    repository, _, revision = name.bucket.partition("@")
    is_model = name.scheme == "hf" and repository.count("/") == 1 and not repository.startswith("datasets/")
    require(is_model, f"{name.url}: expected the folder of a Hugging Face model, or hf://ORG/NAME")
    with hub_library(ObjectName("hf", name.bucket, "")):
        from huggingface_hub import HfApi, hf_hub_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        endpoint = os.environ.get("HF_ENDPOINT") or None
        hub = HfApi(endpoint=endpoint)
        commit = hub.model_info(repository, revision=revision or "main").sha  # the files are of one state
        listed = hub.list_repo_files(repository, revision=commit)
        files = [file for file in listed if _is_read(file)]
        if CONFIG_FILE not in files:
            raise UsageError(f"{name.url} has no {CONFIG_FILE}; expected a model that transformers loads")
        try:
            paths = [hf_hub_download(repository, file, revision=commit, endpoint=endpoint) for file in files]
        except LocalEntryNotFoundError as error:
            raise StorageError(f"cannot read {name.url}: the Hub cannot be reached; try again") from error
    return Path(paths[files.index(CONFIG_FILE)]).parent


def _is_read(file: str) -> bool:
    """Return whether a file of a repository belongs to a model as import_hf reads it."""
    return file in _FILES or file.startswith(f"{TEMPLATES}/") or ("/" not in file and file.endswith(_WEIGHTS))
