"""Near-duplicates: MinHash signatures, LSH pairs, connected components, what to remove."""

from dedup.dedup_train import dedup_train
from dedup.deduplicate import Deduplicated, deduplicate
from dedup.generate_connected_components import generate_connected_components
from dedup.generate_duplicate_pairs import generate_duplicate_pairs
from dedup.generate_duplicates_dict import generate_duplicates_dict
from dedup.minhash import Sketch, jaccard, signatures
from dedup.to_hash import to_hash

__all__ = [
    "Deduplicated",
    "Sketch",
    "dedup_train",
    "deduplicate",
    "generate_connected_components",
    "generate_duplicate_pairs",
    "generate_duplicates_dict",
    "jaccard",
    "signatures",
    "to_hash",
]
