"""sign, cluster and remove give what the stages of a run give."""

import pytest

from dedup import generate_exact_pairs
from gristmill.counts import READ
from gristmill.engine.options import RunOptions
from gristmill.errors import OutputError
from gristmill_cli.dedup_commands import cluster, remove, sign
from tests.gristmill_cli.corpus import tree

QUIET = RunOptions(workers=1, quiet=True)


def test_the_three_commands_give_the_bytes_of_a_run(finished, tmp_path):
    _, out, _ = finished
    clean, dup = out / "normalized", out / "dup"
    pairs = tmp_path / "pairs" / "duplicate_pairs_exact.txt"
    generate_exact_pairs(clean, pairs, options=QUIET)
    copies = pairs.with_suffix(".parquet")
    assert sign(clean, tmp_path / "minhash", skip=copies, options=QUIET).total(READ).documents == 753
    assert tree(tmp_path / "minhash") == tree(out / "minhash")
    cluster(tmp_path / "minhash", tmp_path / "clusters.parquet", pairs=pairs.parent, options=QUIET)
    assert (tmp_path / "clusters.parquet").read_bytes() == (dup / "connected_components.parquet").read_bytes()
    remove(
        tmp_path / "clusters.parquet", tmp_path / "d.parquet", dropped=(out / "filtered.pickle",), verify="jaccard",
        corpus=clean, options=QUIET,
    )  # fmt: skip
    assert (tmp_path / "d.parquet").read_bytes() == (dup / "duplicates.parquet").read_bytes()


def test_a_file_of_the_user_is_refused_before_the_first_step(finished, tmp_path):
    mine, minhash = tmp_path / "mine.parquet", finished[1] / "minhash"
    mine.touch()
    with pytest.raises(OutputError, match=r"mine.parquet exists, and .* did not write it"):
        cluster(minhash, mine, options=QUIET)
    with pytest.raises(OutputError, match=r"mine.parquet exists, and .* did not write it"):
        remove(finished[1] / "dup/connected_components.parquet", mine, options=QUIET)
    assert all(".lock" in path.name or path == mine for path in tmp_path.rglob("*") if path.is_file())
