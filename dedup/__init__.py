"""Deduplication: MinHash signatures, LSH candidate pairs, connected components, duplicates to remove.

`from dedup import deduplicate` imports the mathematics alone; a stage is imported when its name is first used.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dedup.cluster_graph import cluster_graph
    from dedup.clustering.lsh import Bands, band_parameters, detection
    from dedup.dedup_train import dedup_train
    from dedup.deduplicate import Deduplicated, deduplicate
    from dedup.generate_connected_components import generate_connected_components
    from dedup.generate_duplicate_pairs import generate_duplicate_pairs
    from dedup.generate_duplicates_dict import generate_duplicates_dict
    from dedup.generate_exact_pairs import generate_exact_pairs
    from dedup.minhash.shingles import shingle_sets
    from dedup.minhash.signatures import DATATROVE, Sketch, jaccard, signatures
    from dedup.to_hash import to_hash

__all__ = [
    "DATATROVE",
    "Bands",
    "Deduplicated",
    "Sketch",
    "band_parameters",
    "cluster_graph",
    "dedup_train",
    "deduplicate",
    "detection",
    "generate_connected_components",
    "generate_duplicate_pairs",
    "generate_duplicates_dict",
    "generate_exact_pairs",
    "jaccard",
    "shingle_sets",
    "signatures",
    "to_hash",
]
_MODULES = {  # of names that are not the module's own
    "clustering.lsh": ("Bands", "band_parameters", "detection"),
    "deduplicate": ("Deduplicated",),
    "minhash.shingles": ("shingle_sets",),
    "minhash.signatures": ("DATATROVE", "Sketch", "jaccard", "signatures"),
}


class _Package(ModuleType):
    """This package: `dedup.to_hash` is the function, not the module of the same name, whichever is imported first."""

    def __getattr__(self, name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = next((module for module, names in _MODULES.items() if name in names), name)
        return getattr(import_module(f"{__name__}.{module}"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_module = isinstance(value, ModuleType) and name in __all__
        super().__setattr__(name, getattr(value, name) if is_module else value)


sys.modules[__name__].__class__ = _Package
