"""A start that is refused leaves the output folder to the next one."""

import json
import re
import struct
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from gristmill.errors import InputError, UsageError
from gristmill.io.token_shards import MAGIC, Manifest, ShardRecord
from tests.gristmill.engine.opens import count_opens
from tests.training.conftest import write_shards
from training.config import TrainConfig
from training.model.model_config import ModelConfig
from training.optim.stability import StabilityConfig
from training.profiling.profile_config import ProfileConfig
from training.reporting.reporting_config import EvalConfig
from training.run_plan import RunPlan
from training.train import train


def test_a_refused_init_from_does_not_claim_the_folder(config: TrainConfig, tmp_path: Path) -> None:
    one_step = replace(config, optim=replace(config.optim, steps=1))
    other = replace(one_step, out_dir=tmp_path / "other", model=replace(config.model, rope_base=500.0))
    train(other)
    for wrong, error in (
        (tmp_path / "nowhere", "expected a checkpoint"),
        (other.out_dir, "of another model: model.rope"),
    ):
        with pytest.raises(UsageError, match=error):
            train(replace(one_step, init_from=wrong, seed=7, model=replace(config.model, rope_base=10_000.0)))
        assert [path.name for path in one_step.out_dir.iterdir()] == [".lock"]
    with pytest.raises(UsageError, match=r"of another model: .*model.experts 0 there and 4 here"):
        train(replace(one_step, init_from=other.out_dir, model=ModelConfig(experts=4)))
    # the corrected options, another seed: those of the model that are not given are the checkpoint's
    train(replace(one_step, init_from=other.out_dir, model=ModelConfig()))
    assert RunPlan.of(replace(one_step, init_from=other.out_dir, model=ModelConfig())).model.rope_base == 500.0
    assert (one_step.out_dir / "run.json").is_file()


def test_init_from_beside_checkpoints_is_the_runs_own_or_refused(
    config: TrainConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def steps(count: int, **options: object) -> TrainConfig:
        quiet = EvalConfig(sequences=1, sample_tokens=0)
        optim = replace(config.optim, steps=count, warmup_steps=1, decay_steps=1)
        return replace(config, eval=quiet, optim=optim, **options)  # type: ignore[arg-type]

    pretrained, tuned = steps(1, out_dir=tmp_path / "pretrained"), steps(1, out_dir=tmp_path / "tuned")
    train(pretrained)
    for option in ("init_from", "branch_from"):
        with pytest.raises(UsageError, match=rf"began from new weights, and --{option} .* would not be read; leave"):
            train(replace(pretrained, **{option: tmp_path}))
    train(replace(tuned, init_from=pretrained.out_dir))
    with pytest.raises(UsageError, match=r"began from init_from .*pretrained, and --init_from .*elsewhere would not"):
        train(replace(tuned, init_from=tmp_path / "elsewhere"))
    train(replace(steps(2), out_dir=tuned.out_dir))  # without the option, or with it, the run is resumed
    capsys.readouterr()
    resumed = replace(steps(3), out_dir=tuned.out_dir, init_from=pretrained.out_dir)
    train(resumed)
    assert "resuming from" in (said := capsys.readouterr().out) and "step-00000002; init_from is for a new run" in said
    record = tuned.out_dir / "run.json"
    record.write_text(json.dumps({k: v for k, v in json.loads(record.read_text()).items() if k != "began_from"}))
    train(replace(steps(4), out_dir=tuned.out_dir, init_from=tmp_path))  # a release before: unknown, and said
    assert "init_from is for a new run" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text", ["[]", '{"steps": null}', "{}", "\xff", "nonsense", '{"steps": Infinity}', "[" * 100_000]
)
def test_a_damaged_run_json_is_an_error(config: TrainConfig, text: str) -> None:
    config.out_dir.mkdir()
    (config.out_dir / "run.json").write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=r"run.json is damaged; restore that file, or .* and --init_from "):
        train(config)


def test_the_folder_of_a_run_of_data_is_refused(config: TrainConfig) -> None:
    config.out_dir.mkdir()
    (config.out_dir / "run.json").write_text('{"corpus": "books", "seed": 1}')
    with pytest.raises(UsageError, match=r"run.json belongs to a run of the data pipeline; try another --out_dir"):
        train(config)


def test_checkpoints_without_run_json_are_not_taken_for_any_run(config: TrainConfig) -> None:
    config = replace(config, optim=replace(config.optim, steps=1), eval=EvalConfig(sequences=1, sample_tokens=0))
    train(config)
    (config.out_dir / "run.json").unlink()
    with pytest.raises(UsageError, match=r"holds checkpoints and no run.json.*--init_from"):
        train(replace(config, seed=7))


def sparse_shards(folder: Path, like: Manifest, shards: int, tokens: int, documents: int) -> Path:
    """Shards of zeros that take no disk: of the .idx files only the headers are written."""
    folder.mkdir()
    records = []
    for number in range(shards):
        prefix = folder / f"tokens_{number:05d}"
        with prefix.with_suffix(".bin").open("wb") as file:
            file.truncate(2 * tokens)
        with prefix.with_suffix(".idx").open("wb") as file:
            file.write(struct.pack("<9sQBQQ", MAGIC, 1, 8, documents, documents + 1))
            file.truncate(34 + 12 * documents + 8 * (documents + 1))
        records.append(ShardRecord(prefix.name, documents, tokens, 4 * tokens, "0" * 64, "0" * 64))
    msgspec.structs.replace(like, shards=records).save(folder)
    return folder


def peak_memory() -> int:
    """Peak resident bytes of this process since `/proc/self/clear_refs` was last told to forget it."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def test_a_run_over_a_trillion_tokens_begins_at_once(config: TrainConfig, tmp_path: Path) -> None:
    manifest = Manifest.load(config.data.train)
    folder = sparse_shards(tmp_path / "sparse", manifest, shards=1_250, tokens=800_000_000, documents=1_000_000)
    data = replace(config.data, train=folder, verify="size")
    once = replace(
        config, data=data, optim=replace(config.optim, steps=1), eval=EvalConfig(sample_tokens=0, sequences=1)
    )
    Path("/proc/self/clear_refs").write_text("5")
    before = peak_memory()
    with count_opens(folder) as opens:
        train(once)
    assert peak_memory() - before < 500_000_000
    assert max(opens.values()) <= 5, opens.most_common(5)  # for sizes and headers, and what the step reads


def test_a_run_of_a_release_with_another_order_of_samples_says_how_to_resume_it(config: TrainConfig) -> None:
    earlier = replace(config, data=replace(config.data, order="randperm"), optim=replace(config.optim, steps=1))
    train(earlier)
    path = earlier.out_dir / "run.json"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if "data.order" not in line))
    longer = replace(config, optim=replace(config.optim, steps=2, decay_steps=1))
    with pytest.raises(UsageError, match=r"differs in data\.order \(randperm there, keyed now\).*Give the values"):
        train(longer)
    train(replace(longer, data=earlier.data))


def test_shards_that_were_written_anew_are_named_and_how_to_go_on(config: TrainConfig, tmp_path: Path) -> None:
    documents = [list(range(2, 20)) for _ in range(40)]
    tokens = write_shards(tmp_path / "tokens", [documents])
    data = replace(
        config.data, train=tokens, holdout=write_shards(tmp_path / "holdout", [documents[:30]]), batch_size=2
    )
    once = replace(
        config, data=data, optim=replace(config.optim, steps=1), eval=EvalConfig(sample_tokens=0, sequences=1)
    )
    train(once)
    write_shards(tokens, [documents[:-1]])
    with pytest.raises(UsageError) as refused:
        train(once)
    said = f"run of other token shards: those in {tokens} were written anew since. Restore them to resume it, or choose"
    assert said in str(refused.value) and f"--init_from {config.out_dir} to go on" in str(refused.value)
    write_shards(tokens, [documents])
    train(once)
    write_shards(data.holdout, [documents[:29]])
    with pytest.raises(UsageError, match=f"those in {data.holdout} were written anew since"):
        train(once)
    write_shards(data.holdout, [documents[:30]])
    elsewhere = replace(once, data=replace(data, train=write_shards(tmp_path / "others", [documents[:-1]])))
    with pytest.raises(UsageError, match=r"differs in data\.train \(\w+ there, \w+ now\).*Give the values"):
        train(elsewhere)


def test_options_without_effect_are_named(config: TrainConfig) -> None:
    assert RunPlan.of(config).notes("cpu", 0) == []
    given = replace(
        config,
        optim=replace(config.optim, muon_momentum=0.9),
        parallel=replace(config.parallel, schedule="gpipe"),
        stability=StabilityConfig(initial_loss_scale=4.0),
        profile=ProfileConfig(ranks=(0, 1)),
        eval=EvalConfig(prompt="grain", sample_tokens=0, task_items=3, task_folder=Path("a")),
    )
    assert RunPlan.of(given).notes("cpu", 0) == [
        f"{option} has no effect with {reason}"
        for option, reason in (
            ("optim.muon_momentum 0.9", "optim.name adamw"),
            ("eval.prompt grain", "eval.sample_tokens 0"),
            ("eval.task_folder a", "no eval.tasks"),
            ("eval.task_items 3", "no eval.tasks"),
            ("parallel.schedule gpipe", "parallel.pp 1"),
            ("profile.ranks 0 1", "no profile.steps"),
            ("stability.initial_loss_scale 4.0", "precision fp32"),
        )
    ]
    plain = replace(
        config,
        data=replace(config.data, weights=(2.0,)),
        model=replace(config.model, bias=True, qkv_bias=False, out_bias=False, mlp_bias=False, init_std=0.1),
        optim=replace(config.optim, name="sgd", weight_decay=0.2, eps=1.0, betas=(0.1, 0.1), decay_parts=("norms",)),
        parallel=replace(config.parallel, zero=1, reduce_bf16=True),
        memory=replace(config.memory, optimizer="disk"),
        precision="bf16",
        init_from=Path("a"),
    )
    options = ("model.bias", "model.init_std", "data.weights", "optim.weight_decay", "optim.decay_parts", "optim.betas")
    options += ("optim.eps", "memory.optimizer", "parallel.zero", "parallel.reduce_bf16")
    assert [line.split()[0] for line in RunPlan.of(plain).notes("cpu", 0)] == list(options)
    without_decay = replace(
        config.optim, schedule="wsd", decay_steps=1, weight_decay=0.0, decay_parts=("norms",), min_lr=0
    )
    assert RunPlan.of(replace(config, optim=without_decay)).notes("cpu", 0) == [
        "optim.min_lr 0 has no effect with optim.schedule wsd and optim.cooldown_steps 0",
        "optim.decay_steps 1 has no effect with optim.schedule wsd and optim.cooldown_steps 0",
        "optim.decay_parts norms has no effect with optim.weight_decay 0",
    ]
    used = replace(given, optim=replace(given.optim, name="muon"), precision="fp16")
    assert not any("optim" in line or "stability" in line for line in RunPlan.of(used).notes("cpu", 0))


def test_a_holdout_that_is_trained_on_is_said(config: TrainConfig, tmp_path: Path) -> None:
    held, trained = config.data.holdout, config.data.train_folders[0]
    (copied := tmp_path / "elsewhere").symlink_to(trained)
    both = replace(config, data=replace(config.data, holdout=copied, holdouts={"new": held, "old": trained}))
    shards = len(Manifest.load(trained).shards)
    first, second = RunPlan.of(both).notes("cpu", 0)
    assert first.startswith("data.holdout: its ") and second.startswith("data.holdouts.old: its ")
    assert f"{shards} shard" in first and f"in data.train {trained}, too: its loss is of text" in first


def test_a_warm_up_of_most_of_a_run_is_said_and_a_sample_has_a_label(config: TrainConfig, capsys) -> None:
    train(replace(config, optim=replace(config.optim, steps=4, warmup_steps=3)))
    said = capsys.readouterr().out
    assert "warms up for optim.warmup_steps 3, more than half of optim.steps 4" in said and "warmup_steps 0" not in said
    assert "\n    sample: '" in said or '\n    sample: "' in said
    train(replace(config, out_dir=config.out_dir / "usual", optim=replace(config.optim, steps=6, warmup_steps=3)))
    assert "rises for" not in capsys.readouterr().out


def test_a_start_from_another_model_says_what_is_wrong(config: TrainConfig, tmp_path: Path) -> None:
    first = replace(config, optim=replace(config.optim, steps=1))
    train(first)
    vocabulary = Manifest.load(config.data.train_folders[0]).tokenizer.vocab_size
    later = replace(first, out_dir=tmp_path / "later", init_from=first.out_dir, model=ModelConfig())
    (record,) = first.out_dir.glob("checkpoints/step-*/record.json")
    fields = json.loads(record.read_text())
    record.write_text(json.dumps(fields | {"checksum": "", "model": fields["model"] | {"vocab_size": vocabulary - 1}}))
    with pytest.raises(UsageError, match=rf"a vocabulary of {vocabulary - 1}, .*try gristmill tokenize --tokenizer"):
        train(later)
    record.write_text(json.dumps(fields))
    with pytest.raises(UsageError, match=r"another model: .*model\.norm 'rms' there and 'layer' here"):
        train(replace(later, model=ModelConfig(preset="gpt2")))
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/config.json").write_text("{}")
    with pytest.raises(UsageError, match="a model of transformers: try gristmill import-hf"):
        train(replace(later, init_from=tmp_path / "theirs"))
