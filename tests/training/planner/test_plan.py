"""The command `gristmill plan`: from a configuration to a table, words, JSON and pictures; and what bad input gets."""

import io
import re
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from gristmill.command import command, run_with_exit_code
from gristmill.config import load_config
from gristmill.errors import GristmillError, UsageError
from gristmill_planner.fitted_constants import fitted_constants
from gristmill_planner.hardware import Device, find_device, write_hardware
from gristmill_planner.plan import plan
from training.config import TrainConfig

REPOSITORY = Path(__file__).resolve().parents[3]
CONFIG = """
precision = "bf16"
[model]
preset = "gpt2"
layers = 12
width = 768
heads = 12
vocab_size = 50304
[data]
seq_len = 1024
batch_size = 96
[optim]
steps = 1000
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG)
    return path


def printed(result: object) -> str:
    console = Console(width=250, record=True, file=io.StringIO())
    console.print(result)
    return console.export_text()


def test_table_and_words(config: Path) -> None:
    text = printed(plan(str(config), gpus=16, explain=True))
    assert "dp 16" in text
    assert "dp 16 computes for" in text  # as fast as with ZeRO-1, and simpler
    assert "9.83e+07 tokens" in text  # 1000 steps of 96 x 1024
    assert "product: 2 m n k / (w x " in text
    assert "waves in which 108 multiprocessors take them: " in text


def test_json(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(str(config), gpus=8, gpu="h100", json=True, top=2, tokens=1e9) is None
    first, second = msgspec.json.decode(capsys.readouterr().out)
    assert first["seconds"]["total"] <= second["seconds"]["total"]
    assert first["layout"]["dp"] * first["layout"]["tp"] * first["layout"]["pp"] == 8
    assert first["bytes"]["total"] < 80 << 30


def test_states_of_the_optimizer_count(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def moments(options: str) -> float:
        config.write_text(CONFIG + options)
        plan(str(config), gpus=1, json=True, top=1)
        return float(msgspec.json.decode(capsys.readouterr().out)[0]["bytes"]["moments"])

    adamw = moments("")
    assert 0.5 * adamw < moments('name = "muon"\n') < 0.75 * adamw
    assert moments("ema_decay = 0.999\n") == pytest.approx(1.5 * adamw, rel=1e-3)
    assert moments('[memory]\noptimizer = "cpu"\n') == 0.0


def test_other_precisions_are_told(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(CONFIG.replace("bf16", "fp32"))
    plan(str(config), top=1)
    assert "trains in fp32, and this plan is for bf16" in capsys.readouterr().err


def test_a_published_run_on_another_cluster() -> None:
    text = printed(plan("gpt-neox-20b", gpus=64, gpu="h100", top=1))
    assert "300,000,000,000" in text or "3e+11 tokens" in text


def test_ranks_are_named_only_with_a_pipeline() -> None:
    without = printed(plan("llama-2-7b", gpus=8, gpu="h100", top=1))
    assert "It has no pipeline" in without and re.search(r"Every rank has \d+\.\d of 80 GiB", without)
    assert "pipeline rank" not in without
    assert "Its fullest rank is pipeline rank 0: " in printed(
        plan("mt-nlg-530b", gpus=2800, configured=True, software="megatron-deepspeed")
    )


def test_published_layouts() -> None:
    for gpus, dp in ((None, 8), (2800, 10), (3360, 12)):
        text = printed(plan("mt-nlg-530b", gpus=gpus, configured=True, software="megatron-deepspeed"))
        assert f"dp {dp} x ZeRO-1 x tp 8 x pp 35 (1f1b)" in text
        assert "It fits." in text
    with pytest.raises(UsageError, match=r"BLOOM-176B was published for 384 GPUs, and --gpus is 64; try --gpus 384"):
        plan("bloom-176b", gpus=64, configured=True)
    assert "32 GiB" in printed(plan("codegeex-13b", configured=True))  # on its own cluster, of Ascend 910


def test_experts_are_divided_where_they_do_not_fit_otherwise() -> None:
    text = printed(plan("mixtral-8x7b", gpus=32, gpu="h100", explain=True))
    assert re.search(r"\nep = [248]\n", text) and "rank is assumed to get 1.2 times the mean number of tokens" in text
    assert "four all-to-alls of" in text
    assert " within dp" in printed(plan("gpt-oss-20b", gpus=16, gpu="h100", seq_len=1024))
    with pytest.raises(UsageError, match="predicted of this trainer alone; try --software gristmill"):
        plan("mixtral-8x7b", gpus=32, gpu="h100", software="megatron")


def test_validate() -> None:
    text = printed(plan(validate=True))
    assert "BLOOM-176B" in text
    assert "Megatron 1008B" in text


def test_pictures(tmp_path: Path, config: Path) -> None:
    text = printed(plan(draw=tmp_path / "all.svg", ranks=2, micro_batches=4))
    assert text.count("bubble ratio") == 7  # of six timelines, and the table's
    assert re.search(r"\n1f1b +0.500 +0.250 +0.125 +0.062", text)  # (p - 1) / m
    assert (tmp_path / "all.svg").stat().st_size > 1000


@pytest.mark.parametrize("costs", [(1, nan, 1), (1, 1, inf), (inf, 1, 1), (0, 1, 1), (1, -1, 1)])
def test_costs_are_finite(tmp_path: Path, costs: tuple[float, float, float]) -> None:
    with pytest.raises(
        UsageError, match=rf"--costs are {costs[0]} {costs[1]} {costs[2]}; expected .*; try --costs 1 1 1"
    ):
        plan(draw=tmp_path / "all.svg", costs=costs)


@pytest.mark.parametrize("options", [{"gpus": 8}, {"json": True}, {"measured": Path("run"), "ranks": 2}])
def test_a_picture_without_a_config_takes_its_own_options_alone(tmp_path: Path, options: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=r"has no effect with (no CONFIG|--measured); leave one of them out"):
        plan(draw=tmp_path / "all.svg", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu": "a200"}, "gpu 'a200' is not in the planner's table; did you mean h200? There are v100"),
        ({"gpus": 0}, "a cluster of 0 GPUs"),
        ({"gpus": 12}, "12 GPUs cannot fill nodes of 8; try --gpus 16"),
        ({"gpus": 104}, "no layout divides 104 GPUs"),
        ({"network": -1.0}, "--network is -1.0"),
        ({"network": inf}, "--network is inf"),
        ({"tokens": inf}, "--tokens is inf"),
        ({"top": 0}, "--top is 0"),
        (
            {"draw": Path("x.svg"), "measured": Path("run")},
            "--measured has no effect with a plan",
        ),
        ({"draw": Path("x.svg")}, "the first choice has no pipeline to draw"),
        ({"seq_len": 9}, "--seq_len has no effect with"),
        ({"headroom": 1.0}, "--headroom is 1.0; expected a share"),
        ({"draw": Path("x.svg"), "json": True}, "--draw has no effect with --json; leave one of them out"),
        ({"explain": True, "dry_run": True}, "--explain has no effect with --dry_run"),
        ({"rank": 3}, "--rank has no effect with a plan"),
        ({"rank": 3, "json": True}, "--rank has no effect with --json"),
        ({"top": 3, "configured": True}, "--top has no effect with --configured"),
        ({"top": 3, "dry_run": True}, "--top has no effect with --dry_run"),
        ({"tokens": 9.0, "dry_run": True}, "--tokens has no effect with --dry_run"),
        ({"draw": Path("x.svg"), "ranks": 8}, "--ranks has no effect with a plan"),
        ({"shrink": True, "network": 9.0}, "--network has no effect with --shrink"),
        ({"validate": True}, "CONFIG has no effect with --validate"),
        ({"calibrate": Path("x.toml")}, "CONFIG has no effect with --calibrate"),
        ({"software": "megatron", "configured": True}, "--software has no effect with --configured and a file"),
    ],
)
def test_bad_options(config: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        plan(str(config), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "layers = 12",
            "layers = -1",
        ),
        ("batch_size = 96", "batch_size = -96"),
        ("heads = 12", "heads = 7"),
        ("vocab_size = 50304", ""),
        ("seq_len = 1024", "sequence_length = 1024"),
        ("steps = 1000", "steps = 'many'"),
    ],
)
def test_bad_files(config: Path, line: str, message: str) -> None:
    config.write_text(CONFIG.replace(line, message))
    with pytest.raises(GristmillError) as caught:
        plan(str(config))
    assert "\n" not in str(caught.value)


def test_the_layout_of_the_file(config: Path) -> None:
    config.write_text(CONFIG + "[parallel]\ntp = 2\npp = 2\nmicro_batches = 4\n")
    text = printed(plan(str(config), gpus=8, configured=True))
    assert "dp 2 x tp 2 x pp 2 (1f1b)" in text
    assert "It fits." in text
    config.write_text(CONFIG + "[parallel]\ntp = 5\n")
    with pytest.raises(UsageError, match=r"model.heads 12 .* parallel.tp 5; try --parallel.tp 1"):
        plan(str(config), gpus=5, configured=True)
    config.write_text(CONFIG.replace("layers = 12", "layers = 800"))
    assert "It does not fit" in printed(plan(str(config), gpus=1, gpu="v100", configured=True))


def test_the_layout_of_the_file_in_the_precision_of_the_device(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def weights(device: Device) -> float:
        write_hardware(tmp_path / "device.toml", device, fitted_constants())
        plan(str(config), gpus=1, gpu=str(tmp_path / "device.toml"), configured=True, json=True)
        found = msgspec.json.decode(capsys.readouterr().out)[0]["bytes"]
        return float(found["weights"] + found["master"])

    gpu = replace(find_device("h100"), source="x")
    assert weights(gpu) == pytest.approx(1.5 * weights(replace(gpu, element_bytes=4)), rel=1e-3)  # two copies, 2 + 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "[parallel]\npp = 4\nschedule = 'zero-bubble'\nmicro_batches = 4",
            "compile and parallel.schedule zero-bubble",
        ),
        ("name = 'muon'\n[memory]\noptimizer = 'disk'", "optim.name muon with memory.optimizer disk"),
        ("[memory]\nparameters = 'cpu'", "memory.parameters is cpu and parallel.zero 0"),
        ("[stability]\nmax_skipped_steps = -1", "stability.max_skipped_steps is -1"),
    ],
)
def test_what_the_trainer_refuses_is_not_planned(config: Path, options: str, message: str) -> None:
    config.write_text("compile = true" + CONFIG + options + "\n")
    with pytest.raises(UsageError, match=re.escape(message)):
        plan(str(config), configured=True)


@pytest.mark.parametrize("options", ["compression = 'int8'"])
def test_a_layout_that_is_not_modelled_is_not_planned(config: Path, options: str) -> None:
    config.write_text(f"{CONFIG}[parallel]\n{options}\n")
    with pytest.raises(UsageError, match=r"has parallel\..* time and memory are not known; try parallel\.\w+ (1|none)"):
        plan(str(config), configured=True)


@pytest.mark.parametrize(
    ("options", "layout", "formula"),
    [
        ("cp = 2", "cp 2 (ring)", "context parallelism, ring of 2"),
        ("tensor = '2d'\ntp = 4", "tp 4 (2d, 1 x 2 x 2)", "2d grid of 1 x 2 x 2"),
    ],
)
def test_divided_sequences_and_grids_are_planned(config: Path, options: str, layout: str, formula: str) -> None:
    config.write_text(f"{CONFIG}[parallel]\n{options}\n")
    text = printed(plan(str(config), configured=True, explain=True))
    assert layout in text and formula in text and "It fits." in text


def test_dry_run(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(CONFIG + "[parallel]\ntp = 2\npp = 2\nzero = 1\nmicro_batches = 4\n")
    text = printed(plan(str(config), gpus=8, configured=True, dry_run=True, rank=5))
    assert "rank 5 of 8 (pp 1 of 2, shard 0 of 2, tp 1 of 2) in dp 2 x ZeRO-1 x tp 2 x pp 2 (1f1b)" in text
    assert re.search(r"layers \d+ to 11 and the output: [\d,]+ parameters", text)
    assert re.search(r"\npp: send +4 ", text) and "The traffic formulas agree to the byte." in text
    assert plan(str(config), gpus=4, dry_run=True, json=True) is None  # of the first choice
    record = msgspec.json.decode(capsys.readouterr().out)
    assert record["agrees"] and record["bytes"]["weights"] > 0
    with pytest.raises(UsageError, match=r"--rank is 384; expected 0 to 383"):
        plan("bloom-176b", dry_run=True, rank=384)


def test_shrink(config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert plan("codegeex-13b", shrink=True) is None
    text = capsys.readouterr().out
    assert "dp 4 x ZeRO-2 x tp 2 instead of dp 192 x ZeRO-2 x tp 8" in text
    path = tmp_path / "shrunk.toml"
    path.write_text(text)
    assert "The traffic formulas agree to the byte." in printed(
        plan(str(path), gpus=8, configured=True, dry_run=True, rank=7)
    )
    with pytest.raises(UsageError, match=r"--shrink is for published runs, and .*run.toml is none; try bloom-176b"):
        plan(str(config), shrink=True)


def test_nothing_fits(config: Path) -> None:
    config.write_text(
        CONFIG.replace("layers = 12", "layers = 96")
        .replace("768", "12288")
        .replace("12\n", "96\n")
        .replace("= 96\n[optim]", "= 8\n[optim]")
    )
    smallest = r"no layout fits 32 x v100.* GiB a GPU, .* too many; try --gpus (\d+)(?:, or --gpu (\S+))?$"
    with pytest.raises(UsageError, match=smallest) as refused:
        plan(str(config), gpus=32, gpu="v100")
    gpus = int(re.search(smallest, str(refused.value))[1])  # type: ignore[index]
    assert gpus % 8 == 0 and "dp" in printed(plan(str(config), gpus=gpus, gpu="v100", top=1))


def test_unknown_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_with_exit_code(lambda: plan("bloom-176")) == 2
    assert "did you mean bloom-176b?" in capsys.readouterr().err
    assert run_with_exit_code(lambda: plan("missing.toml")) == 2
    assert run_with_exit_code(plan) == 2


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ((), ["--gpus", "104"], "no layout divides 104 GPUs"),
        ((), ["--gpus", "-8"], "a cluster of -8 GPUs"),
        ((), ["--gpu", "h10"], "did you mean h100?"),
        ((), ["--gpu", "%"], "expected one of v100"),
        (("heads = 12", "heads = 7"), [], "model.width 768 is not divisible by model.heads 7"),
        (("layers = 12", "layers = -1"), [], "model.layers is -1; expected 0 or more"),
        (("vocab_size = 50304", ""), [], "does not say how large the vocabulary is"),
        (("seq_len = 1024", "seq_length = 1024"), [], "unknown key data.seq_length; did you mean data.seq_len?"),
        (("[optim]", "[parallel]\nexperts = 8\n[optim]"), [], "unknown key parallel.experts"),  # of another version
        (
            ("[optim]", "[parallel]\ntp = 5\n[optim]"),
            ["--configured", "--gpus", "4"],
            "try --parallel.tp 4; with 4 processes 1, 2, 4 are",
        ),
        (
            ("vocab_size = 50304", "vocab_size = 8"),
            ["--configured", "--gpus", "4"],
            "of 8 is too small for parallel.tp 4",
        ),
        ((), ["--dry-run", "--rank", "8", "--configured"], "--rank is 8; expected 0 to 7, as 8 GPUs have"),
        ((), ["--dry_run", "--rank=-1"], "--rank is -1; expected 0 to 7"),
        ((), ["--shrink"], "--shrink is for published runs"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_mistake_gets_a_sentence_and_exit_code_2(
    config: Path, change: tuple[str, ...], options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = CONFIG.replace(*change) if change else CONFIG
    config.write_text(text.replace("[optim]", "[parallel]\ntp = 4\n[optim]") if "= 8\n[data]" in text else text)
    with pytest.raises(SystemExit) as ended:
        command(plan, arguments=[str(config), *options])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert message in said and said.startswith("error: ") and said.count("\n") == 1


def test_a_preset_is_planned_and_its_toml_is_a_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"gpus": 16, "gpu": "h100"}
    text = printed(plan("llama-3.2-1b", seq_len=1024, batch_size=64, top=2, **options))
    assert "How far to trust this: " in text and "one H100 took 13 to 21 % less" in text
    other = printed(plan("llama-3.2-1b", seq_len=1024, batch_size=64, top=1, software="megatron", **options))
    assert "It says nothing of that program today, nor how fast this trainer is next to it" in other
    assert "one H100" not in other
    pasted = tmp_path / "pasted.toml"
    pasted.write_text(text[text.index("# The first choice") :])
    plan("llama-3.2-1b", seq_len=1024, batch_size=64, top=1, json=True, **options)
    (first,) = msgspec.json.decode(capsys.readouterr().out)
    plan(str(pasted), configured=True, json=True, **options)
    (again,) = msgspec.json.decode(capsys.readouterr().out)
    assert again | {"days": 0} == first | {"days": 0}  # a preset is planned for 300 billion tokens
    trained = load_config(
        TrainConfig, ["--config", str(pasted), "--data.train", "a", "--data.holdout", "b", "--out_dir", "c"]
    )
    trained.check()
    assert trained.model.preset == "llama-3.2-1b" and trained.parallel.dp == first["layout"]["dp"]


def test_the_toml_of_a_file_has_its_model(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(plan(str(config), gpus=16, top=1))
    start = "-m gristmill_cli.train --config"
    nodes = "--nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=HEAD:29400"
    assert f"gristmill torchrun {nodes} --nproc_per_node=8 {start} {config} --config THIS_FILE" in text
    assert "trains in" not in text
    pasted = tmp_path / "pasted.toml"
    pasted.write_text(text[text.index("# The first choice") :])
    paths = ["--data.train", "a", "--data.holdout", "b", "--out_dir", "c"]
    before, after = (load_config(TrainConfig, ["--config", str(path), *paths]) for path in (config, pasted))
    assert after.model == before.model and after.model.width == 768


def test_the_toml_says_how_it_is_started_and_which_precision_it_changes(config: Path) -> None:
    config.write_text(CONFIG.replace("bf16", "fp32"))
    lines = printed(plan(str(config), gpus=4, top=1)).splitlines()
    first = lines.index(next(line for line in lines if line.startswith("# The first choice: ")))
    start = "# The first choice: gristmill torchrun --standalone --nproc_per_node=4 -m gristmill_cli.train --config "
    assert lines[first].startswith(start)
    assert lines[first + 1 : first + 3] == [
        f"# {config} trains in fp32, and this layout was chosen for bf16:", 'precision = "bf16"'
    ]  # fmt: skip
    assert "# The first choice: gristmill train --config" in printed(plan(str(config), gpus=1, top=1))


def test_the_toml_is_laid_over_the_file_that_was_planned(config: Path, tmp_path: Path) -> None:
    """Also where the first choice has defaults in place of what the file has: here one rank for each replica."""
    text = (
        CONFIG.replace("steps = 1000", "steps = 1234")
        + '[parallel]\ntp = 2\npp = 2\ncp = 2\nschedule = "1f1b"\n[memory]\nparameters = "disk"\n'
    )
    config.write_text(text)
    pasted = tmp_path / "pasted.toml"
    planned = printed(plan(str(config), gpus=16, top=1))
    pasted.write_text(planned[planned.index("# The first choice") :])
    paths = ["--data.train", "a", "--data.holdout", "b", "--out_dir", "c"]
    alone = load_config(TrainConfig, ["--config", str(pasted), *paths])
    both = load_config(TrainConfig, ["--config", str(config), "--config", str(pasted), *paths])
    assert both.parallel == alone.parallel and both.parallel.dp == 16
    assert both.memory == alone.memory and both.optim.steps == 1234


def test_layouts_leave_memory_free(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    most = []
    for headroom in (0.0, 0.5):
        plan("llama-2-7b", gpus=8, gpu="h100", headroom=headroom, json=True, batch_size=64, top=3)
        most.append(max(each["bytes"]["total"] for each in msgspec.json.decode(capsys.readouterr().out)))
    assert most[1] <= 0.5 * 80 * 2**30 < most[0]
    assert "measured on no GPU of this kind" in printed(plan(str(config), gpus=8, gpu="v100"))
