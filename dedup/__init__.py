"""Deduplication: MinHash signatures, LSH candidate pairs, connected components, duplicates to remove.

`from dedup import deduplicate` imports the mathematics alone; a stage is imported when its name is first used.
"""

from typing import TYPE_CHECKING

from gristmill.lazy_package import import_lazily

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

import_lazily(__name__, __all__, _MODULES)
