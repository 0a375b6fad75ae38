"""bench_variants trains each variant beside the default, and refuses a name that it does not know."""

from pathlib import Path

import pytest

from benchmarks.bench_variants import bench_variants
from gristmill.errors import UsageError


def test_the_table_has_a_row_per_variant(corpus: Path, tmp_path: Path) -> None:
    chosen = {"variants": [], "add": ["slow: --optim.lr 1e-5 --optim.min_lr 1e-6"], "seeds": [1, 2], "out": tmp_path}
    text = bench_variants([corpus / "tokens"], **chosen, steps=4, layers=1, width=32, seq_len=16, batch_size=4)  # type: ignore[arg-type]
    rows = {cells[0].strip(): cells[1:] for line in text.splitlines() if len(cells := line.strip("| ").split("|")) == 7}
    assert list(rows)[2:] == ["default", "slow"]
    losses = {name: [float(cell) for cell in rows[name][:3]] for name in ("default", "slow")}
    assert all(abs(sum(two) / 2 - mean) < 2e-4 and two[0] != two[1] for *two, mean in losses.values())
    assert (
        losses["default"][2] < losses["slow"][2] and float(rows["slow"][3]) > 0 and "- slow: `--optim.lr 1e-5 " in text
    )


def test_what_is_no_variant_is_an_error(corpus: Path) -> None:
    with pytest.raises(UsageError, match=r"no variant wds; expected default, wsd, muon, or --add"):
        bench_variants([corpus / "tokens"], variants=["wds"])
    with pytest.raises(UsageError, match=r"--add 'ema' has no colon"):
        bench_variants([corpus / "tokens"], add=["ema"])
