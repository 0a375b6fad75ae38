"""Removal: from clusters to the table of documents to remove, with a module for each step.

    clusters       the clusters of connected_components.parquet or .pickle, as records in blocks
    keep_policy    the order within a cluster: the document to keep comes first
    members        all members sorted by file and row; each slice of the corpus reads only its own
    texts          their texts, copied out of the corpus slice by slice, or their signatures in an index
    similarity     the similarity of a document to those kept before it, on shingles or signatures
    decisions      cluster by cluster: a document similar enough to an earlier kept one is removed
    removal_table  the removed documents, each with the kept one and their similarity
    steps          the above as tasks of the stage generate_duplicates_dict: sort, fetch, decide, write

If no document needs to be read (no --verify, and a keep policy that needs keys alone), the stage
goes from clusters straight to decisions.
"""
