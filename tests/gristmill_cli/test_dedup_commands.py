"""sign, cluster and remove give what the stages of a run give."""

from gristmill.counts import READ
from gristmill.engine.options import RunOptions
from gristmill_cli.dedup_commands import cluster, remove, sign
from tests.gristmill_cli.corpus import tree

QUIET = RunOptions(workers=1, quiet=True)


def test_the_three_commands_give_the_bytes_of_a_run(finished, tmp_path):
    _, out, _ = finished
    clean, dup = out / "normalized", out / "dup"
    assert sign(clean, tmp_path / "minhash", options=QUIET).total(READ).documents == 753
    assert tree(tmp_path / "minhash") == tree(out / "minhash")
    cluster(tmp_path / "minhash", tmp_path / "clusters.parquet", options=QUIET)
    assert (tmp_path / "clusters.parquet").read_bytes() == (dup / "connected_components.parquet").read_bytes()
    remove(tmp_path / "clusters.parquet", tmp_path / "d.parquet", dropped=(out / "filtered.pickle",), options=QUIET)
    assert (tmp_path / "d.parquet").read_bytes() == (dup / "duplicates.parquet").read_bytes()
