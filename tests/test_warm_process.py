"""Processes that are forked from the server of commands: as fresh ones, but for the time that these take to start."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.command_server import LATE
from tests.gristmill_cli.documentation import shell
from tests.patience import patience, wait_until
from tests.warm_process import WarmPopen, _server, run_warm

ROOT = Path(__file__).resolve().parents[1]
SHOW = """
import atexit, os, signal, sys, threading
print(sys.argv[1:], os.getcwd(), ascii(os.environ.get("AWS_OF_TEST")), __name__, __spec__ and __spec__.name, sys.flags)
print([path for path in sys.path if "editable" not in path])
print([name for name in os.listdir("/proc/self/fd") if int(name) > 4])
print(sys.stdout.encoding, sys.stdout.errors, sys.stdout.line_buffering, sys.stderr.errors, sys.stdin.errors)
print([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGCHLD)])
print(signal.pthread_sigmask(signal.SIG_BLOCK, []), os.getsid(0) == os.getpid(), os.umask(0o22), sys.stdin.read())
atexit.register(print, "at exit")
threading.Timer(0.2, print, ["from a thread"]).start()
"""
ENDS = {
    "returns": "print('done')",
    "exit code": "import sys; sys.exit(7)",
    "message": "import sys; sys.exit('a message')",
    "error": "def fail(): return 1 / 0\nfail()",
    "at once": "import os; os._exit(9)",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "terminated": "import os; os.kill(os.getpid(), 15)",
    "interrupted": "import os, signal; os.kill(os.getpid(), signal.SIGINT); input()",
    "closed output": "import os; os.close(1); print('lost')",
}


def both(words: list[str], given: str = "", **options: Any) -> list[tuple[str, str, int]]:
    """What a fresh and a forked process printed, and their exit codes."""
    done = []
    for kind in (subprocess.Popen, WarmPopen):
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with kind([sys.executable, *words], text=True, **pipes, **options) as process:
            output, errors = process.communicate(given, patience(60))
        assert kind is subprocess.Popen or process.is_warm
        done.append((output, errors, process.returncode))
    return done


@pytest.mark.parametrize("how", ["-c", "file", "-m"])
def test_it_is_what_a_fresh_one_is(tmp_path: Path, how: str) -> None:
    (tmp_path / "shown.py").write_text(SHOW)
    (tmp_path / "folder").mkdir()
    words = {"-c": ["-c", SHOW], "file": ["../shown.py"], "-m": ["-m", "shown"]}[how]
    folder = tmp_path / "folder" if how == "file" else tmp_path
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}/folder", "AWS_OF_TEST": "ä\udcff"}
    fresh, warm = both([*words, "one", "two ü"], cwd=folder, env=environment, given="given", start_new_session=True)
    assert fresh == warm and warm[1:] == ("", 0)
    assert " True 18 given" in warm[0] and warm[0].endswith("from a thread\nat exit\n")


@pytest.mark.parametrize("how", ENDS)
def test_it_ends_as_a_fresh_one_does(tmp_path: Path, how: str) -> None:
    (tmp_path / "ends.py").write_text(ENDS[how])
    fresh, warm = both([str(tmp_path / "ends.py")])
    lines = [line for line in warm[1].splitlines() if "runpy" not in line]
    of_server = [number for number, line in enumerate(lines) if "command_server.py" in line]
    without = [line for number, line in enumerate(lines) if not {number, number - 1} & {*of_server}]
    assert (warm[0], without, warm[2]) == (fresh[0], fresh[1].splitlines(), fresh[2])


def test_it_is_waited_for_and_signalled_as_a_child() -> None:
    sleeps = "import signal, sys; print('ready', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", sleeps]
    with WarmPopen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.is_warm and process.stdout
        assert process.stdout.readline() == "ready\n" and process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.1)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
        assert process.wait() == -signal.SIGTERM  # a zombie until then
        assert not Path(f"/proc/{process.pid}").exists()
        process.kill()  # nobody, now


def test_output_goes_to_a_file_and_a_pipe_ends(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file:
        file.write("before\n")
        file.flush()
        words = [sys.executable, "-m", "gristmill_cli", "--version"]
        assert run_warm(words, cwd=ROOT, stdout=file, check=True).stdout is None
    assert (tmp_path / "file").read_text().startswith("before\ngristmill ")
    with pytest.raises(subprocess.CalledProcessError):
        run_warm([sys.executable, "-c", "raise SystemExit(1)"], check=True)


def test_its_workers_start_warm_too_and_end_with_it(tmp_path: Path) -> None:
    """The fork server of a stage is a child of the command, has its environment, and imports its functions."""
    (tmp_path / "of_user.py").write_text("import os\ndef look(_): return os.environ['AWS_OF_TEST'], os.getppid()\n")
    code = """
import os, sys
from gristmill.engine.execution.call import Call
from gristmill.engine.execution.local import LocalExecutor
from multiprocessing import forkserver
import of_user
if __name__ == "__main__":
    with LocalExecutor(2) as executor:
        found = {result for _, result in executor.run([Call(of_user.look, {"_": i}) for i in range(4)])}
        assert found == {("here", forkserver._forkserver._forkserver_pid)}, found
        print(os.waitpid(forkserver._forkserver._forkserver_pid, os.WNOHANG)[0], "fork_server" in sys.modules)
        command = open(f"/proc/{forkserver._forkserver._forkserver_pid}/cmdline").read()
        print("tests.command_server" in command)
"""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}", "AWS_OF_TEST": "here"}
    (tmp_path / "driver.py").write_text(code)
    fresh, warm = both(["driver.py"], cwd=tmp_path, env=environment)
    assert fresh == ("0 False\nFalse\n", "", 0)
    assert warm == ("0 False\nTrue\n", "", 0)


def test_two_processes_have_no_name_of_leases_in_common() -> None:
    command = [sys.executable, "-c", "from gristmill.storage import lock; print(lock._ThisProcess.name)"]
    names = {run_warm(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout for _ in range(2)}
    assert len(names) == 2


def test_what_a_fork_cannot_be_is_a_fresh_process(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("")  # which it has imported, from elsewhere
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/sitecustomize.py").write_text("")  # which Python imports as it starts
    python = [sys.executable, "-c", ""]
    options: list[dict[str, Any]] = [
        {"env": {**os.environ, "PYTHONHASHSEED": "1"}},
        {"env": {**os.environ, "OMP_NUM_THREADS": "7"}},
        {"env": {**os.environ, "PYTHONPATH": str(tmp_path)}},
        {"env": {**os.environ, "PYTHONPATH": str(tmp_path / "folder")}},
        {"cwd": tmp_path},
        {"preexec_fn": os.getpid},
        {"umask": 0o77},
        {"args": [sys.executable, "-P", "-c", ""]},
        {"args": ["true"]},
    ]
    assert WarmPopen(python).wait() == 0
    for option in options:
        with WarmPopen(**{"args": python, **option}) as process:
            assert process.wait() == 0 and not process.is_warm, option
    with pytest.raises(FileNotFoundError):
        WarmPopen(["no such program"])


CLIENT = """
import sys
sys.path.insert(0, {root!r})
from tests.command_request import run_as
run_as({path!r}, {script!r}, sys.argv[1:])
"""


@pytest.mark.parametrize(("ends", "code"), [("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", -9), ("", 0)])
def test_a_script_of_a_shell_ends_as_its_fork_does(tmp_path: Path, ends: str, code: int) -> None:
    script = tmp_path / "script"
    shows = "print(sys.argv[1:], len(os.sched_getaffinity(0)), os.environ['OUT'], sys.stdin.read(), flush=True)"
    script.write_text(f"import os, sys\n{shows}\nprint('numpy' in sys.modules, flush=True)\n{ends}\n")
    client = CLIENT.format(root=str(ROOT), path=_server().path, script=str(script))
    done = subprocess.run(
        [sys.executable, "-SE", "-c", client, "--one", "two words"],
        input="given", capture_output=True, text=True, check=False, cwd=tmp_path,
        env={**os.environ, "OUT": "a folder", LATE: "OUT"},
        preexec_fn=lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("['--one', 'two words'] 1 a folder given\nTrue\n", "")
    assert done.returncode == code


def test_a_signal_to_a_script_of_a_shell_reaches_its_fork(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("import os, signal, time\nprint(os.getpid(), flush=True)\ntime.sleep(1000)\n")
    client = CLIENT.format(root=str(ROOT), path=_server().path, script=str(script))
    with subprocess.Popen([sys.executable, "-SE", "-c", client], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        pid = int(process.stdout.readline())
        assert pid != process.pid
        process.terminate()
        assert process.wait(patience(60)) == -signal.SIGTERM and not Path(f"/proc/{pid}").exists()


def test_clients_that_end_too_soon_leave_the_server_at_work() -> None:
    for data in (b"", (100).to_bytes(8, "big") + b"half"):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(_server().path)
            client.sendall(data)
    with WarmPopen([sys.executable, "-c", ""]) as process:
        assert process.wait() == 0 and process.is_warm


def test_the_command_of_a_shell() -> None:
    done = shell("gristmill --version | cat; gristmill no-such-command || echo $?; which gristmill", on_one_core=True)
    assert done.stdout.startswith("gristmill ") and done.stdout.endswith(f"\n2\n{_server().scripts}/gristmill\n")
    assert done.stderr.startswith("error: expected a command, got 'no-such-command'")


def test_the_server_ends_with_the_process_that_started_it() -> None:
    code = """
import sys
from tests.warm_process import WarmPopen, _server
with WarmPopen([sys.executable, "-c", ""]) as process:
    assert process.wait() == 0 and process.is_warm
print(_server()._process.pid, _server().scripts.parent, flush=True)
"""
    for ends in ("", "import os; os.kill(os.getpid(), 9)"):
        words = [sys.executable, "-c", code + ends]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
        pid, folder = done.stdout.split()
        wait_until(lambda pid=pid, folder=folder: not Path(folder).exists() and not Path(f"/proc/{pid}").exists())
