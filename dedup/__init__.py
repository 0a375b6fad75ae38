"""Deduplication: MinHash signatures, LSH candidate pairs, connected components, duplicates to remove."""

import warnings

from dedup.bands import Bands, band_parameters, detection
from dedup.cluster_graph import cluster_graph
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

# For `python -m dedup.x`, which runs x again, as __main__: `command` calls the function of the import above.
warnings.filterwarnings("ignore", rf"'{__name__}\.\w+' found in sys\.modules", RuntimeWarning, "runpy")
