"""Scripts for clusters on two network namespaces as nodes: a node that is late, is killed and comes back."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from benchmarks.kill_training import metric_values, steps_done
from tests.patience import patience
from tests.training.conftest import REPOSITORY, small_run, train_with_options
from tests.training.test_cluster import free_port

SCRIPTS = REPOSITORY / "configs/cluster"
NAMES = ("gm-node0", "gm-node1")
ADDRESSES = ("10.77.31.1", "10.77.31.2")
LINKS = ("gm-link0", "gm-link1")
STEPS = 120
SAVING = f"--optim.steps {STEPS} --checkpoint.every 10 "
OPTIONS = SAVING + "--metrics.log_every 1 --metrics.tensorboard false --eval.sample_tokens 0"


def command_of(script: str) -> str:
    """The shell command of a script, which a node runs."""
    if script.endswith(".sh"):
        return f'bash {SCRIPTS / script} --config "$CONFIG" --out_dir "$OUT"'
    documents = list(yaml.safe_load_all((SCRIPTS / script).read_text()))
    if script == "skypilot.yaml":
        return str(documents[0]["run"])
    (container,) = documents[1]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "-euc"]
    return str(container["args"][0])


def variables(script: str, node: int, head: str, port: int) -> dict[str, str]:
    """What the cluster sets on a node."""
    if script == "torchrun.sh":
        return {"NODES": "2", "GPUS": "1", "HEAD": head, "PORT": str(port), "RESTARTS": "0"}
    if script == "skypilot.yaml":
        return {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": str(node), "SKYPILOT_NUM_GPUS_PER_NODE": "1",
                "SKYPILOT_NODE_IPS": f"{head}\n10.0.0.9"}  # fmt: skip
    return {"NODES": "2", "GPUS": "1", "HEAD": head, "JOB_COMPLETION_INDEX": str(node)}


class Nodes:
    """Two nodes, each with what runs on it; `prefixes` start a command on one."""

    def __init__(self, prefixes: list[list[str]], names: tuple[str, ...], folder: Path) -> None:
        self.prefixes = prefixes
        self.head = names[0]
        self.folder = folder
        self.port = free_port()
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, node: int, script: str, **more: str) -> subprocess.Popen[bytes]:
        """Run a script's command on a node; what it says is appended to a file."""
        command = command_of(script).replace("--master_port=29400", f"--master_port={self.port}")
        own = variables(script, node, self.head, self.port)
        path = f"{self.folder}:{os.environ['PATH']}"
        environment = {**os.environ, **own, **more, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        with (self.folder / f"node{node}.log").open("ab") as log:
            words = [*self.prefixes[node], "bash", "-euc", command]
            process = subprocess.Popen(words, env=environment, stdout=log, stderr=log, start_new_session=True)
        self.started.append(process)
        return process

    def kill(self, process: subprocess.Popen[bytes]) -> None:
        """Kill all that runs on a node, at once, as if it lost its power."""
        if process.poll() is None:
            everything = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            for each in everything:
                each.send_signal(signal.SIGSTOP)
            for each in everything:
                each.kill()
        process.wait()

    def said(self, node: int) -> str:
        path = self.folder / f"node{node}.log"
        return path.read_text(errors="replace") if path.exists() else ""


@pytest.fixture
def gristmill(tmp_path: Path) -> Path:
    """A folder with a command `gristmill` of this working tree."""
    path = tmp_path / "gristmill"
    path.write_text(f'#!/bin/bash\nexec {sys.executable} -m gristmill_cli "$@"\n')
    path.chmod(0o755)
    return tmp_path


@pytest.fixture
def namespaces(gristmill: Path) -> Iterator[Nodes]:
    """Two network namespaces with one link between them, and names of their own; skips where they are forbidden."""
    if shutil.which("ip") is None or os.geteuid():
        pytest.skip("needs the program ip, and to be root")
    remove = [["ip", "netns", "del", name] for name in NAMES]
    for words in remove:
        subprocess.run(words, check=False, capture_output=True)
    steps = [["ip", "netns", "add", name] for name in NAMES]
    steps.append(["ip", "link", "add", LINKS[0], "type", "veth", "peer", "name", LINKS[1]])
    for name, link, address in zip(NAMES, LINKS, ADDRESSES, strict=True):
        steps.append(["ip", "link", "set", link, "netns", name])
        steps.append(["ip", "-n", name, "addr", "add", f"{address}/24", "dev", link])
        steps += [["ip", "-n", name, "link", "set", device, "up"] for device in (link, "lo")]
    try:
        for words in steps:
            done = subprocess.run(words, check=False, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"network namespaces are forbidden here: {done.stderr.strip()}")
        hosts = gristmill / "hosts"
        known = [f"{address} {name}" for name, address in zip(NAMES, ADDRESSES, strict=True)]
        hosts.write_text("\n".join(["127.0.0.1 localhost", *known, ""]))
        prefixes = []
        for name, link in zip(NAMES, LINKS, strict=True):
            inside = f'hostname {name}; mount --bind {hosts} /etc/hosts; export GLOO_SOCKET_IFNAME={link}; exec "$@"'
            prefixes.append(["ip", "netns", "exec", name, "unshare", "--uts", "--mount", "bash", "-c", inside, "bash"])
        nodes = Nodes(prefixes, NAMES, gristmill)
        yield nodes
        for process in nodes.started:
            nodes.kill(process)
    finally:
        for words in remove:
            subprocess.run(words, check=False, capture_output=True)


def write_config(corpus: Path, folder: Path) -> dict[str, str]:
    """Write the options of a run to a file; return the variables that name it and its folder."""
    words = [*small_run(corpus), *OPTIONS.split()]
    sections: dict[str, list[str]] = {}
    for option, value in zip(words[::2], words[1::2], strict=True):
        section, _, key = option.removeprefix("--").rpartition(".")
        plain = value.isdigit() or value in ("true", "false")
        sections.setdefault(section, []).append(f"{key} = {value if plain else repr(value)}")
    lines = sections.pop("")
    for name, of_section in sections.items():
        lines += [f"[{name}]", *of_section]
    (folder / "run.toml").write_text("\n".join(lines))
    return {"CONFIG": str(folder / "run.toml"), "OUT": str(folder / "run")}


@pytest.mark.thorough
@pytest.mark.parametrize("script", ["torchrun.sh", "kubernetes.yaml", "skypilot.yaml"])
def test_a_node_that_is_late_is_killed_and_comes_back_changes_no_loss(
    namespaces: Nodes, corpus: Path, tmp_path: Path, script: str
) -> None:
    where = write_config(corpus, tmp_path)
    first = namespaces.start(0, script, **where)
    time.sleep(1)  # the other node comes late
    second = namespaces.start(1, script, **where)
    deadline = time.monotonic() + patience(120)
    while not (tmp_path / "run/checkpoints/latest").exists():
        assert first.poll() is None and time.monotonic() < deadline, namespaces.said(0) + namespaces.said(1)
        time.sleep(0.02)
    namespaces.kill(second)
    assert first.wait(patience(90)) != 0
    if steps_done(tmp_path / "run") < STEPS:
        assert "rank 1 (on gm-node1) d" in namespaces.said(0), namespaces.said(0)  # died, or did not respond
    again = [namespaces.start(node, script, **where) for node in (0, 1)]
    assert [process.wait(patience(120)) for process in again] == [0, 0], namespaces.said(0) + namespaces.said(1)
    assert "resuming from" in namespaces.said(0)
    train_with_options(tmp_path / "one", [*small_run(corpus), *OPTIONS.split()])
    ours, theirs = (dict(metric_values(tmp_path / name, "step", "loss")) for name in ("run", "one"))
    assert ours == pytest.approx(theirs, rel=1e-4) and len(ours) == STEPS


class BucketOf:
    """A store in a process of its own on the first node, which both nodes reach; it is asked from that node, too."""

    def __init__(self, namespaces: Nodes, folder: Path) -> None:
        self.prefix = namespaces.prefixes[0]
        self.port = free_port()
        server = folder / "store.py"
        server.write_text(
            "from moto.moto_server.werkzeug_app import create_backend_app as app\n"
            "from werkzeug.serving import make_server as make\n"
            f"make('0.0.0.0', {self.port}, app('s3'), threaded=True).serve_forever()\n"
        )
        with (folder / "store.log").open("wb") as log:
            words = [*self.prefix, sys.executable, str(server)]
            self.process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
        namespaces.started.append(self.process)
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://{ADDRESSES[0]}:{self.port}", "AWS_ACCESS_KEY_ID": "tests",
            "AWS_SECRET_ACCESS_KEY": "tests", "AWS_REGION": "us-east-1", "GRISTMILL_LEASE_SECONDS": "2",
        }  # fmt: skip
        deadline = time.monotonic() + patience(60)
        while not self.makes_bucket():
            assert time.monotonic() < deadline, (folder / "store.log").read_text()

    def makes_bucket(self) -> bool:
        """Make the bucket; False where the store does not answer yet."""
        make = "import sys; from urllib.request import Request, urlopen; urlopen(Request(sys.argv[1], method='PUT'))"
        words = [*self.prefix, sys.executable, "-c", make, f"http://{ADDRESSES[0]}:{self.port}/bucket"]
        return subprocess.run(words, capture_output=True, check=False).returncode == 0

    def read(self, path: str) -> str:
        """The text of an object; empty if there is none."""
        read = "import sys; from pathlib import Path; from gristmill.storage.files import read_file; "
        read += "sys.stdout.buffer.write(read_file(Path(sys.argv[1])))"
        words = [*self.prefix, sys.executable, "-c", read, f"s3://bucket/{path}"]
        environment = {**os.environ, **self.environment, "PYTHONPATH": str(REPOSITORY)}
        return subprocess.run(words, env=environment, capture_output=True, text=True, check=False).stdout


@pytest.mark.thorough
@pytest.mark.parametrize("is_shared", [True, False])
def test_a_run_goes_on_with_another_number_of_nodes(
    namespaces: Nodes, corpus: Path, tmp_path: Path, is_shared: bool
) -> None:
    """One node, then two, then one, as the other loses its power; checkpoints in a folder of both, or in a bucket."""
    where = write_config(corpus, tmp_path)
    text = Path(where["CONFIG"]).read_text().replace(f"steps = {STEPS}\n", "steps = 100000\n")
    text = text.replace("[optim]", '[optim]\nschedule = "constant"').replace("every = 10\n", "every = 50\n")
    Path(where["CONFIG"]).write_text(f'precision = "fp64"\n{text}')
    elastic = {"NODES": "1:2", "RESTARTS": "5", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **where}
    own = [dict(elastic), dict(elastic)]
    bucket = None
    if not is_shared:
        bucket = BucketOf(namespaces, tmp_path)
        for node in (0, 1):
            own[node] |= {**bucket.environment, "OUT": "s3://bucket/run", "TMPDIR": str(tmp_path / f"disk{node}")}
            (tmp_path / f"disk{node}").mkdir()

    def lines() -> list[dict[str, Any]]:
        if bucket is None:
            path = tmp_path / "run/metrics.jsonl"
            content = path.read_text() if path.exists() else ""
        else:
            content = bucket.read("run/metrics.jsonl")
        return [json.loads(line) for line in content.splitlines() if line.endswith("}")]

    def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + patience(180)
        while not condition():
            assert process.poll() is None and time.monotonic() < deadline, namespaces.said(0) + namespaces.said(1)
            time.sleep(0.1)

    first = namespaces.start(0, "torchrun.sh", **own[0])
    wait_for(lambda: "1 process (" in namespaces.said(0) and bool(lines()), first)
    second = namespaces.start(1, "torchrun.sh", **own[1])
    wait_for(lambda: "2 processes (" in namespaces.said(0), first)
    at = len(lines())
    wait_for(lambda: len(lines()) > at + 60, first)
    namespaces.kill(second)
    wait_for(lambda: namespaces.said(0).count("1 process (") == 2, first)
    assert "rank 1 (on gm-node1) d" in namespaces.said(0), namespaces.said(0)
    at = len(lines())
    wait_for(lambda: len(lines()) > at + 60, first)
    first.terminate()
    first.wait(patience(120))
    found = {line["step"]: line["loss"] for line in lines() if line["kind"] == "step"}
    count = len(found)
    assert sorted(found) == list(range(1, count + 1)) and count > 120
    whole = [*small_run(corpus), *OPTIONS.split(), "--precision", "fp64", "--optim.schedule", "constant"]
    train_with_options(tmp_path / "one", [*whole, "--optim.steps", str(count), "--checkpoint.every", "0"])
    theirs = dict(metric_values(tmp_path / "one", "step", "loss"))
    assert found == pytest.approx(theirs, rel=1e-9)


def test_the_manifest_names_one_job_and_the_service_by_which_its_pods_find_the_first() -> None:
    service, job = yaml.safe_load_all((SCRIPTS / "kubernetes.yaml").read_text())
    spec: dict[str, Any] = job["spec"]["template"]["spec"]
    name = job["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name} and service["metadata"]["name"] == spec["subdomain"]
    values = {each["name"]: each["value"] for each in spec["containers"][0]["env"]}
    assert values["HEAD"] == f"{name}-0.{spec['subdomain']}"
    assert int(values["NODES"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert int(values["GPUS"]) == spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]


def test_the_slurm_script_queues_again_what_was_stopped(tmp_path: Path) -> None:
    for code, queued in ((143, True), (1, False), (0, False)):
        calls = tmp_path / f"calls{code}"
        for name in ("srun", "scontrol"):
            ends = f"exit {code}" if name == "srun" else "exit 0"
            (tmp_path / name).write_text(f'#!/bin/bash\necho {name} "$@" >> {calls}\n{ends}\n')
            (tmp_path / name).chmod(0o755)
        environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
        command = ["bash", str(SCRIPTS / "slurm.sh"), "--config", "x.toml"]
        assert subprocess.run(command, env=environment, check=False).returncode == code
        expected = ["srun gristmill train --config x.toml", *(["scontrol requeue 7"] if queued else [])]
        assert calls.read_text().splitlines() == expected
