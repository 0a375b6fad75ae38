"""This CPU is measured, written to a file, and planned for."""

from dataclasses import replace
from pathlib import Path

import pytest

from gristmill.errors import OutputError, UsageError
from gristmill_planner.calibration import calibrate
from gristmill_planner.fitted_constants import Constants
from gristmill_planner.hardware import check_name, find_device, read_hardware, write_hardware
from gristmill_planner.plan import plan
from training.distributed.rank_pool import RankPool

CONFIG = """
[model]
layers = 4
width = 64
heads = 4
vocab_size = 512
[data]
seq_len = 64
batch_size = 8
"""


def test_this_cpu(rank_pool: RankPool, tmp_path: Path) -> None:
    device, constants = calibrate(rank_pool, repeats=2)
    assert 1e9 < device.flops < 1e13
    assert 1e8 < device.bandwidth < 1e13
    write_hardware(tmp_path / "cpu.toml", device, constants)
    read, same = read_hardware(tmp_path / "cpu.toml")
    assert (read.name, read.element_bytes, read.overlaps) == ("this CPU", 4, False)
    assert read.flops == pytest.approx(device.flops, rel=1e-4)
    assert same.product_share == pytest.approx(constants.product_share, rel=1e-4)
    (tmp_path / "run.toml").write_text(CONFIG)
    assert plan(str(tmp_path / "run.toml"), gpus=2, gpu=str(tmp_path / "cpu.toml"), nodes_of=2, top=2) is not None


def test_bad_files(tmp_path: Path) -> None:
    path = tmp_path / "device.toml"
    with pytest.raises(UsageError, match="as gristmill plan --calibrate writes it"):
        read_hardware(path)
    with pytest.raises(UsageError, match=r"--calibrate cpu\.toml"):
        check_name(tmp_path / "cpu.txt")
    with pytest.raises(OutputError):
        write_hardware(tmp_path / "missing" / "cpu.toml", find_device("h100"), Constants())
    write_hardware(path, replace(find_device("h100"), source='a "sheet"'), Constants())
    assert read_hardware(path)[0].source == 'a "sheet"'
    written = path.read_text()
    path.write_text(written.replace("processors = 132\n", ""))  # of an earlier version
    assert read_hardware(path)[0].processors == 0
    for old, new, words in (
        ("flops = 989400000000000.0", 'flops = "many"', "Expected `float`, got `str`"),
        ("flops = 989400000000000.0", "flops = -1", r"device.flops is -1; expected more than 0"),
        ("flops = 989400000000000.0", "flops = inf", r"device.flops is inf; expected a finite number"),
        ("flops = 989400000000000.0", "flops = 1e15\nspeed = 1", "device.speed is not known"),
        ("launch = 0.0009\n", "", "constants.launch is missing"),
        ("processors = 132", "processors = -1", r"device.processors is -1; expected 0 or more"),
        ("[constants]", "[others]", "unknown field `others`|missing required field `constants`"),
    ):
        assert old in written
        path.write_text(written.replace(old, new, 1))
        with pytest.raises(UsageError, match=words):
            read_hardware(path)
