"""A run whose --out_dir is in a bucket: killed, refused and on other machines, it ends as a run on a disk does."""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import obstore
import pytest
import torch

from gristmill.errors import GristmillError, InputError, OutputError
from gristmill_cli.status.training import training_status
from tests.gristmill_cli.documentation import commands, shell
from tests.gristmill_cli.in_process import gristmill
from tests.gristmill_cli.pages import Numbers
from tests.object_faults import Environment, Seldom, lost_answer, refuse
from tests.object_store import Store, object_store
from tests.training.conftest import small_run, train_with_options
from training.checkpoint.checkpoint_config import CheckpointConfig
from training.checkpoint.remote_run import RemoteRun
from training.config import TrainConfig
from training.train import train

REMOTE = Path("s3://bucket/run")
LEASE = "0.5"


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    with object_store() as opened:
        for name, value in {**opened.environment, "GRISTMILL_LEASE_SECONDS": LEASE}.items():
            monkeypatch.setenv(name, value)
        yield opened


@pytest.fixture
def remote(config: TrainConfig, tmp_path: Path) -> TrainConfig:
    """The run of `config` in a bucket; it saves every 4 steps."""
    saving = CheckpointConfig(every=4, keep=2, folder=tmp_path / "work")
    return replace(config, out_dir=REMOTE, checkpoint=saving)


@pytest.fixture
def expected(config: TrainConfig, tmp_path: Path) -> Path:
    """The same run on a disk."""
    train(replace(config, out_dir=tmp_path / "disk", checkpoint=CheckpointConfig(every=4, keep=2)))
    return tmp_path / "disk"


def losses(lines: bytes, *kinds: str) -> list[tuple[int, float]]:
    records = [json.loads(line) for line in lines.splitlines()]
    return [(record["step"], record["loss"]) for record in records if record["kind"] in (kinds or ("step", "eval"))]


def require_same(store: Store, expected: Path) -> None:
    """The bucket has the checkpoints and metrics of a run on a disk, and no other checkpoint's files."""
    found = store.tree("run")
    files = [path for path in (expected / "checkpoints").rglob("*") if path.is_file()]
    names = {path.relative_to(expected).as_posix(): path for path in files}
    assert {name for name in found if name.startswith("checkpoints/")} == set(names)
    for name, path in names.items():
        if path.name == "record.json":
            assert json.loads(found[name])["files"] == json.loads(path.read_bytes())["files"]
        else:
            assert found[name] == path.read_bytes(), name
    assert losses(found["metrics.jsonl"]) == losses((expected / "metrics.jsonl").read_bytes())
    assert {"run.json", "summary.json", "tokenizer.model"} <= found.keys() and ".lock" not in found


def test_a_run_in_a_bucket_is_that_of_a_disk(
    store: Store, remote: TrainConfig, expected: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(remote)
    require_same(store, expected)
    assert "s3://bucket/run/checkpoints/step-00000012" in capfd.readouterr().out
    train(remote)  # is done
    require_same(store, expected)


def test_it_resumes_on_another_machine_bit_for_bit(
    store: Store, remote: TrainConfig, expected: Path, tmp_path: Path
) -> None:
    """With nothing but what is in the bucket."""
    optim = replace(remote.optim, decay_steps=12)
    train(replace(remote, optim=replace(optim, steps=8)))
    store.requests.clear()
    train(replace(remote, checkpoint=replace(remote.checkpoint, folder=tmp_path / "elsewhere"), optim=optim))
    ours = losses(store.tree("run")["metrics.jsonl"], "step")
    assert ours == losses((expected / "metrics.jsonl").read_bytes(), "step") and len(ours) == 12
    first = next(number for number, (verb, path) in enumerate(store.requests) if verb == "PUT" and "step-" in path)
    listings = [path for _, path in store.requests[:first] if "list-type" in path]
    assert listings and not any("checkpoints" in path for path in listings)  # the latest is found without one


@pytest.mark.parametrize("seed", [1, 2])
def test_faults_of_the_store_are_withstood(store: Store, remote: TrainConfig, expected: Path, seed: int) -> None:
    store.fault = faults = Seldom(seed, 0.25)
    train(remote)
    store.fault = None
    require_same(store, expected)
    assert faults.made > 4


class KillAt:
    """Kills a process at its nth request that writes to the checkpoints, before that has an effect or after."""

    def __init__(self, number: int, after: bool) -> None:
        self.left = number
        self.after = after
        self.process: BaseProcess | None = None

    def __call__(self, application: Any, environment: Environment, start_response: Any) -> Iterable[bytes] | None:
        if environment["REQUEST_METHOD"] == "PUT" and "/run/checkpoints/" in environment["PATH_INFO"]:
            self.left -= 1
            if self.left == 0:
                if self.after:
                    lost_answer(application, environment, start_response)
                assert self.process is not None
                self.process.kill()  # the test alone waits for its end: of two threads one would not see the exit code
                return lost_answer(application, environment, start_response) if not self.after else [b""]
        return None


def train_in_process(out_dir: Path, options: list[str], environment: dict[str, str]) -> None:
    """A run in a process of its own, which is forked with all modules imported."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    train_with_options(out_dir, options)


def test_a_run_that_is_killed_at_any_write_ends_as_one_that_was_not(
    store: Store, corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = [*small_run(corpus), "--optim.steps", "6", "--checkpoint.every", "2", "--eval.sample_tokens", "0"]
    options += ["--metrics.tensorboard", "false"]
    remote = [*options, "--checkpoint.folder", str(tmp_path / "work")]
    environment = {**store.environment, "GRISTMILL_LEASE_SECONDS": LEASE}

    def start(out_dir: Path, words: list[str]) -> BaseProcess:
        process = multiprocessing.get_context("forkserver").Process(
            target=train_in_process, args=(out_dir, words, environment), daemon=True
        )
        process.start()
        return process

    done = start(tmp_path / "disk", options)
    done.join()
    assert done.exitcode == 0, capfd.readouterr()
    kills = 0
    for number, after in ((1, False), (2, True), (3, False), (4, True), (7, False)):  # of 4 writes of each checkpoint
        kill = KillAt(number, after)
        store.fault = kill
        kill.process = start(REMOTE, remote)
        kill.process.join()
        kills += kill.process.exitcode == -signal.SIGKILL
        store.fault = None
        for name, data in store.tree("run").items():  # what `latest` names is whole
            if name == "checkpoints/latest":
                record = json.loads(store.tree(f"run/checkpoints/{data.decode()}")["record.json"])
                assert set(record["files"]) < set(store.tree(f"run/checkpoints/{data.decode()}"))
    done = start(REMOTE, remote)
    done.join()
    assert done.exitcode == 0, capfd.readouterr()
    assert kills >= 4
    require_same(store, tmp_path / "disk")


def train_as_node(config: TrainConfig, tmp_path: Path, environment: dict[str, str]) -> None:
    """A rank's part of a run on machines that share nothing."""
    os.environ.update({name: value for name, value in environment.items() if name.startswith(("AWS", "GRISTMILL"))})
    import torch.distributed as dist

    folder = tmp_path / f"node{dist.get_rank()}"
    train(replace(config, checkpoint=replace(config.checkpoint, folder=folder)))


def test_machines_that_share_no_folder_write_one_checkpoint(
    store: Store,
    remote: TrainConfig,
    config: TrainConfig,
    tmp_path: Path,
    run_ranks: Callable[..., list[Any]],
) -> None:
    """Each has its own working copy; another number of machines resumes."""
    optim = replace(remote.optim, decay_steps=12)
    run_ranks(2, train_as_node, replace(remote, optim=replace(optim, steps=8)), tmp_path, dict(os.environ))
    record = json.loads(store.tree("run/checkpoints/step-00000008")["record.json"])
    assert {name[:4] for name in record["files"]} == {"__0_", "__1_", ".met"}
    disk = replace(config, out_dir=tmp_path / "disk", checkpoint=CheckpointConfig(every=4, keep=2))
    run_ranks(2, train, replace(disk, optim=replace(optim, steps=8)))
    train(replace(remote, optim=optim))
    train(replace(disk, optim=optim))
    require_same(store, tmp_path / "disk")


def test_a_damaged_checkpoint_is_passed_over(
    store: Store, remote: TrainConfig, expected: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(remote)
    obstore.put(store.client, "run/checkpoints/step-00000012/__0_0.distcp", b"damaged")
    train(replace(remote, checkpoint=replace(remote.checkpoint, folder=tmp_path / "elsewhere")))
    said = capfd.readouterr().out
    assert "step-00000012 cannot be used (__0_0.distcp is damaged)" in said and "resuming from" in said
    require_same(store, expected)
    for name in ("step-00000012", "step-00000008"):
        obstore.delete(store.client, f"run/checkpoints/{name}/record.json")
    with pytest.raises(InputError, match=r"record\.json is missing\), and there is none before it"):
        train(replace(remote, checkpoint=replace(remote.checkpoint, folder=tmp_path / "third")))


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        ("403 Forbidden", "AccessDenied", "s3://bucket/run/checkpoints"),
        ("507 Insufficient Storage", "QuotaExceeded", "s3://bucket/run/checkpoints"),
    ],
)
def test_a_bucket_that_is_full_or_forbidden_ends_the_run_in_one_sentence(
    store: Store,
    remote: TrainConfig,
    expected: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: str,
    code: str,
    message: str,
) -> None:
    """In the middle of its second checkpoint; the first one is whole, and the run resumes from it."""
    answer = refuse(status, code)
    monkeypatch.setattr("gristmill.storage.objects._ATTEMPTS", 1)

    def fault(application: Any, environment: Environment, start_response: Any) -> Iterable[bytes] | None:
        path = environment["PATH_INFO"]
        is_hit = environment["REQUEST_METHOD"] == "PUT" and "step-00000008/__0_0" in path
        return answer(application, environment, start_response) if is_hit else None

    store.fault = fault
    with pytest.raises(GristmillError) as error:
        train(remote)
    assert message in str(error.value).replace("s3:/b", "s3://b") and "\n" not in str(error.value)
    store.fault = None
    assert store.tree("run")["checkpoints/latest"] == b"step-00000004"
    train(remote)
    require_same(store, expected)


def test_the_commands_of_the_page(store: Store, corpus: Path, tmp_path: Path) -> None:
    store.upload_tree(corpus, "mine")
    (block,) = commands("guides/buckets.md")
    done = shell(block, BUCKET="s3://bucket/mine", SCRATCH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "step 8/8" in done.stdout and "perplexity" in done.stdout and "\nthe mill" in done.stdout
    assert store.tree("mine/model")["checkpoints/latest"] == b"step-00000008"
    assert list((tmp_path / "tokens").iterdir()) and list((tmp_path / "runs").iterdir())


def test_a_run_in_a_bucket_is_looked_at(
    store: Store, remote: TrainConfig, corpus: Path, expected: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By report, plot, status and rewind, as one on a disk."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    store.upload_tree(corpus, "mine")
    data = replace(remote.data, train=Path("s3://bucket/mine/tokens/train"), cache=tmp_path / "tokens")
    train(replace(remote, data=data))
    there = output_of("rewind", "s3://bucket/run", "--step", "3")
    here = output_of("rewind", expected, "--step", "3")
    assert "step 3: 12 sequences of 16 tokens, read by 1 data-parallel rank" in there
    assert there.replace("s3://bucket/mine", "CORPUS").split() == here.replace(str(corpus), "CORPUS").split()
    assert "training: finished, step 12 of 12" in output_of("status", "s3://bucket/run")
    assert "report: s3://bucket/run/report.html" in output_of("report", "s3://bucket/run")
    assert "s3://bucket/run/loss.svg" in output_of("plot", "s3://bucket/run")
    output_of("report", expected)
    files = store.tree("run")
    assert files["loss.svg"].startswith(b"<?xml")
    of_losses = []
    for page in (files["report.html"], (expected / "report.html").read_bytes()):
        numbers = Numbers(page.decode()).found
        of_losses.append([it["data-value"] for it in numbers if "/loss" in (it.get("data-record") or "")])
    assert of_losses[0] == of_losses[1] and len(of_losses[0]) > 3


def output_of(*words: object) -> str:
    """What a command prints."""
    done = gristmill(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_status_knows_a_run_that_works_from_one_that_was_killed(
    store: Store, remote: TrainConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(replace(remote, optim=replace(remote.optim, steps=8, decay_steps=12)))
    options = json.loads(store.tree("run")["run.json"])
    obstore.put(store.client, "run/run.json", json.dumps({**options, "steps": 12}).encode())
    monkeypatch.setenv("GRISTMILL_LEASE_SECONDS", "8")  # a busy machine is late to renew
    with RemoteRun.of(REMOTE).lease():
        status = training_status(REMOTE)
        assert status is not None and status.state == "working"
    monkeypatch.setenv("GRISTMILL_LEASE_SECONDS", LEASE)
    obstore.put(store.client, "run/.lock", b"process 1 on node7\n1\n2\n")  # which nobody renews
    status = training_status(REMOTE)
    assert status is not None and (status.state, status.checkpoint, status.steps) == ("stopped", 8, 8)


def test_two_runs_do_not_write_to_one_folder(
    store: Store, remote: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRISTMILL_LEASE_SECONDS", "8")  # a busy machine is late to renew
    other = RemoteRun.of(REMOTE, tmp_path / "other")
    with other.lease(), pytest.raises(OutputError, match="is in use by another training run") as error:
        train(remote)
    assert "\n" not in str(error.value)
    train(remote)


def test_a_checkpoint_in_a_bucket_is_read_by_other_commands(
    store: Store, remote: TrainConfig, config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    from gristmill_cli.generate import main as generate
    from training.evaluate import main as evaluate

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    train(remote)
    holdout = str(config.data.holdout)
    evaluate(["s3://bucket/run", holdout, "--device", "cpu"])
    evaluate(["s3://bucket/run/checkpoints/step-00000008", holdout, "--device", "cpu"])
    first, second = [line for line in capfd.readouterr().out.splitlines() if "perplexity" in line]
    assert first != second
    generate(["s3://bucket/run", "the mill", "--tokens", "3", "--device", "cpu"])
    assert "the mill" in capfd.readouterr().out
    branch = replace(config, out_dir=tmp_path / "branch", branch_from=REMOTE, optim=replace(config.optim, steps=14))
    train(replace(branch, optim=replace(branch.optim, decay_steps=12)))
