"""The same bytes everywhere: one run of the pipeline in each way, on local disk and in a bucket, compared byte by byte.

    python benchmarks/bench_everywhere.py CORPUS --folder /tmp/everywhere --options="--tokenizer.vocab_size 4096"

The ways: one process, eight (at most two a core), three `--shard` processes, a Ray cluster of two nodes. A source with
two broken lines is added to the corpus, so that files of malformed records are compared, too. The bucket is moto's S3,
in this process: its speed says nothing about a real one's. Needs the extra `test`.
"""

import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

ROOT = Path(__file__).resolve().parents[1]
if not __package__: sys.path[0] = str(ROOT)  # fmt: skip

import tyro
from rich.table import Table

from benchmarks.kill_pipeline import hash_tree
from gristmill.console import wide_console
from gristmill.io.files import REJECTS_SUFFIX
from gristmill.storage.files import download
from gristmill.storage.objects import delete_objects, list_objects, upload
from tests.object_store import BUCKET, Store, object_store

SHARDS = 3
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20, "memory": 16 << 30}  # of the Ray cluster, in bytes


def bench_everywhere(
    corpus: Annotated[Path, tyro.conf.Positional], folder: Path, options: str = "", only: str = ""
) -> Table:
    """Run the pipeline in every way and place; raises AssertionError if a byte differs from the first run's.

    Args:
        corpus: CORPUS/<source>/**, of some thousand documents: two broken lines must be below --max_malformed.
        folder: Folder for the outputs; it is emptied first.
        options: More options of `gristmill run`.
        only: Part of the names of the ways and places to run, such as `ray` or `bucket`; the first one always runs.
    """
    shutil.rmtree(folder, ignore_errors=True)
    table = Table("how", "where", "seconds", "GET", "PUT", "LIST", "HEAD", "DELETE", box=None)
    expected: dict[str, str] = {}
    with object_store() as store, ray_cluster(store) as address:
        corpus = _with_broken_lines(corpus, folder / "corpus")
        for source in corpus.iterdir():
            for path in (path for path in source.resolve().rglob("*") if path.is_file()):
                upload(path, Path(f"s3://{BUCKET}/corpus") / source.name / path.relative_to(source.resolve()))
        for how, start in _ways(address).items():
            for where in ("local disk", "bucket"):
                if expected and only not in f"{how} {where}":
                    continue
                store.requests.clear()
                began = time.monotonic()
                found = _run(start, corpus, folder / f"{how}, {where}", where == "bucket", shlex.split(options))
                expected = expected or found
                assert any(name.endswith(REJECTS_SUFFIX) for name in found), f"{how}, {where}: no malformed records"
                assert found == expected, f"{how}, {where}: {_first_difference(found, expected)} differs"
                table.add_row(how, where, f"{time.monotonic() - began:.1f}", *map(str, count_requests(store)))
                print(f"{how}, {where}: {len(found):,} files as expected", file=sys.stderr, flush=True)
    return table


def _with_broken_lines(corpus: Path, folder: Path) -> Path:
    """A folder with links to the sources of a corpus, and a source of its own, of which two lines are broken."""
    broken = folder / "broken_lines" / "two.jsonl"
    broken.parent.mkdir(parents=True)
    broken.write_text('{"text": "' + "a line that is whole " * 20 + '"}\n{"text": "cut off\n{"text": null}\n')
    for source in corpus.iterdir():
        (folder / source.name).symlink_to(source.resolve())
    return folder


def _ways(address: str) -> dict[str, Callable[[list[str]], list[subprocess.Popen[bytes]]]]:
    """What starts the processes of a run, by name."""

    def start(command: list[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    return {
        "one process": lambda command: [start([*command, "--workers", "1"])],
        "eight processes": lambda command: [start([*command, "--workers", "8"])],
        f"{SHARDS} shards": lambda command: [
            start([*command, "--workers", "1", "--shard", f"{i}/{SHARDS}"]) for i in range(SHARDS)
        ],
        "Ray on two nodes": lambda command: [
            start([*command, "--workers", "2", "--executor", "ray", "--address", address])
        ],
    }


def _run(
    start: Callable[[list[str]], list[subprocess.Popen[bytes]]],
    corpus: Path,
    out: Path,
    in_bucket: bool,
    options: Sequence[str],
) -> dict[str, str]:
    """Run the pipeline; return the hash of each published file by name. Leaves nothing in the bucket but the corpus."""
    remote = Path(f"s3://{BUCKET}/run")
    places = [f"s3://{BUCKET}/corpus", f"s3://{BUCKET}/run"] if in_bucket else [str(corpus), str(out)]
    command = [sys.executable, "-m", "gristmill_cli", "run", "--corpus", places[0], "--out", places[1], *options]
    for process in start(command):
        _, errors = process.communicate()
        assert process.returncode == 0, errors.decode()
    if in_bucket:
        names = [name for name, _ in list_objects(remote)]
        for name in names:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            download(remote / name, out / name)
        delete_objects(remote / name for name in names)
    found = hash_tree(out)
    shutil.rmtree(out)
    return found


def count_requests(store: Store) -> Iterator[int]:
    """Number of requests: GET without listings, PUT, LIST, HEAD, DELETE (up to 1,000 objects each)."""
    kinds = [(verb, "list-type" in path, "delete" in path.partition("?")[2]) for verb, path in store.requests]
    yield sum(verb == "GET" and not is_list for verb, is_list, _ in kinds)
    yield sum(verb == "PUT" for verb, _, _ in kinds)
    yield sum(is_list for _, is_list, _ in kinds)
    yield sum(verb == "HEAD" for verb, _, _ in kinds)
    yield sum(verb == "DELETE" or is_delete for verb, _, is_delete in kinds)


@contextmanager
def ray_cluster(store: Store) -> Iterator[str]:
    """Context: a head without cores and two nodes with one core each, which know the store; yields the address."""
    from ray.cluster_utils import Cluster

    os.environ |= store.environment | {"PYTHONPATH": str(ROOT)}
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0})
    cluster.add_node(**NODE)
    cluster.add_node(**NODE)
    try:
        yield cluster.address
    finally:
        cluster.shutdown()


def _first_difference(one: dict[str, str], other: dict[str, str]) -> str:
    return min(name for name in one | other if one.get(name) != other.get(name))


if __name__ == "__main__":
    wide_console().print(tyro.cli(bench_everywhere))
