"""Process of bench_pipeline: datatrove deduplicates a corpus by MinHash and encodes what is left.

`python pipeline_peer.py CORPUS TOKENIZER OUT WORKERS` runs its four executors, as its example of MinHash does, the last
with the step that tokenizes and shuffles.
"""

import sys
from importlib import import_module
from pathlib import Path


def main(corpus: str, tokenizer: str, out: Path, workers: int) -> None:
    """Write the tokens of `corpus` to OUT/tokens."""
    dedup = import_module("datatrove.pipeline.dedup")
    config = import_module("datatrove.pipeline.dedup.minhash").MinhashConfig()
    executor = import_module("datatrove.executor").LocalPipelineExecutor
    reader = import_module("datatrove.pipeline.readers").JsonlReader
    encoder = import_module("datatrove.pipeline.tokens").DocumentTokenizer
    tasks = len(list(Path(corpus).rglob("*.jsonl*")))  # one a file: each holds the signatures of its share in memory
    signatures = str(out / "signatures")
    buckets = str(out / "buckets")
    removed = str(out / "removed")

    def run(name: str, steps: list[object], count: int) -> None:
        executor(steps, tasks=count, workers=workers, logging_dir=str(out / "logs" / name)).run()

    read = reader(corpus, glob_pattern="**/*.jsonl*")
    run("sign", [read, dedup.MinhashDedupSignature(signatures, config)], tasks)
    run("buckets", [dedup.MinhashDedupBuckets(signatures, buckets, config=config)], config.num_buckets)
    run("cluster", [dedup.MinhashDedupCluster(buckets, removed, config=config)], 1)
    tokens = encoder(str(out / "tokens"), tokenizer, eos_token="<s>", shuffle_documents=True)
    run("encode", [read, dedup.MinhashDedupFilter(removed), tokens], tasks)
    if not any((out / "tokens").rglob("*.ds")):  # it goes on where it cannot read a file
        sys.exit(f"datatrove wrote no tokens of {corpus}: see {out / 'logs'}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
