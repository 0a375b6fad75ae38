"""Removal: from clusters to the table of documents to remove.

    clusters       the clusters of connected_components.parquet or .pickle; all members sorted by file and row
    fetching       their texts, copied out of the corpus slice by slice, or their signatures in an index
    decisions      cluster by cluster: a document similar enough to an earlier kept one is removed
    removal_table  the removed documents, each with the kept one and their similarity
    steps          the above as tasks of the stage generate_duplicates_dict: sort, fetch, decide, write

If no document needs to be read (no --verify, and a keep policy that needs keys alone), the stage goes from clusters
straight to decisions.
"""
