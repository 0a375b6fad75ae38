"""Launchers: ranks as Slurm's srun and mpirun of Open MPI and MPICH say them, and the end of torchrun."""

import math
import os
import re
import signal
import zlib
from collections.abc import Mapping, MutableMapping, Sequence

import psutil

from gristmill.errors import UsageError, require
from gristmill.processes import signal_at_death_of_parent

_PORT = 29_400  # the first of 1,000
_OPEN_MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK", "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK", "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}  # fmt: skip
_MPICH = {  # Hydra's, of MPICH and Intel MPI
    "RANK": "PMI_RANK", "WORLD_SIZE": "PMI_SIZE",
    "LOCAL_RANK": "MPI_LOCALRANKID", "LOCAL_WORLD_SIZE": "MPI_LOCALNRANKS",
}  # fmt: skip
_BY_TORCHRUN = "TORCHELASTIC_RUN_ID"  # which it sets
_SHUTDOWN = re.compile(r"--shutdown[-_]timeout(?:=(\d+))?")
_FIRST_HOST = re.compile(r"([^,\[]+)(?:\[(\d+))?")


def adopt_launcher(environ: MutableMapping[str, str] = os.environ) -> None:
    """Set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT where srun or mpirun is at work.

    What is set already stays: torchrun's, and an address that the user gives. A job of one process changes nothing.
    Raises UsageError where mpirun spans several machines and MASTER_ADDR is not set.
    """
    if "RANK" in environ:
        return
    variables = _of_slurm(environ) or _of_mpi(environ, _OPEN_MPI) or _of_mpi(environ, _MPICH)
    if int(variables.get("WORLD_SIZE", 1)) > 1:
        for name, value in variables.items():
            environ.setdefault(name, value)


def stop_with_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """Let this process stop, as at SIGTERM, when the torchrun that started it is killed: nobody would end it then."""
    if _BY_TORCHRUN in environ:
        signal_at_death_of_parent(signal.SIGTERM)


def describe_short_stop(part: str, seconds: float, environ: Mapping[str, str] = os.environ) -> str:
    """Say that torchrun kills its processes before a part of this length ends and is saved; nothing if it waits.

    `part`: after which a run can stop, a step or a micro-batch.
    """
    if _BY_TORCHRUN not in environ:
        return ""
    try:
        command = psutil.Process(os.getppid()).cmdline()
    except psutil.Error:  # it has ended
        return ""
    limit = shutdown_timeout(command, environ)
    if 2 * seconds <= limit:
        return ""
    return (
        f"{part} takes {seconds:.0f} s, and torchrun kills its processes {limit} s after a signal, perhaps before "
        f"they have saved a checkpoint; try torchrun --shutdown-timeout {max(120, 60 * math.ceil(seconds / 15))}"
    )


def shutdown_timeout(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Return for how many seconds torchrun, of this command, waits after a signal until it kills its processes.

    >>> shutdown_timeout(["torchrun", "--shutdown-timeout", "90", "x.py"], {}), shutdown_timeout(["torchrun"], {})
    (90, 30)
    """
    for word, following in zip(command, [*command, ""][1:], strict=True):
        match = _SHUTDOWN.fullmatch(word)
        value = match and (match[1] or following)
        if value and value.isdigit():
            return int(value)
    return int(environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))


def _of_slurm(environ: MutableMapping[str, str]) -> dict[str, str]:
    """Return the ranks of a step that srun started, by SLURM_STEP_NUM_TASKS: a batch script itself has none."""
    if "SLURM_STEP_NUM_TASKS" not in environ or "SLURM_PROCID" not in environ:
        return {}
    tasks = _tasks_by_node(environ.get("SLURM_STEP_TASKS_PER_NODE", environ["SLURM_STEP_NUM_TASKS"]))
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_STEP_NUM_TASKS"],
        "LOCAL_RANK": environ.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": str(tasks[int(environ.get("SLURM_NODEID", 0))]),
        "MASTER_ADDR": first_host(environ.get("SLURM_STEP_NODELIST", "127.0.0.1")),
        "MASTER_PORT": _port(int(environ.get("SLURM_JOB_ID", 0)) + int(environ.get("SLURM_STEP_ID", 0))),
    }


def _of_mpi(environ: MutableMapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    variables = {ours: environ.get(theirs, "") for ours, theirs in names.items()}
    if not all(variables.values()):
        return {}
    require(
        variables["WORLD_SIZE"] == variables["LOCAL_WORLD_SIZE"] or "MASTER_ADDR" in environ,
        f"mpirun started {variables['WORLD_SIZE']} processes, {variables['LOCAL_WORLD_SIZE']} of them here, and does "
        "not say where the first one is: give its host name to all with mpirun -x MASTER_ADDR=HOST (MPICH: -genv "
        "MASTER_ADDR HOST), or start them with torchrun",
    )
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or environ.get("PMI_PORT", "")
    return {**variables, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": _port(zlib.crc32(job.encode()))}


def _port(job: int) -> str:
    """Return the port of a job: of two on one machine each has its own, but for one pair in a thousand."""
    return str(_PORT + job % 1000)


def first_host(hosts: str) -> str:
    """Return the first host of a list as Slurm writes it.

    >>> [first_host(hosts) for hosts in ("gpu[07-09,11],cpu1", "node3,node4", "a-[1,3]")]
    ['gpu07', 'node3', 'a-1']
    """
    match = _FIRST_HOST.match(hosts)
    if match is None:
        raise UsageError(f"SLURM_STEP_NODELIST {hosts!r}: expected names of hosts; set MASTER_ADDR to the first one's")
    return match[1] + (match[2] or "")


def _tasks_by_node(counts: str) -> list[int]:
    """Return the tasks of each node of a step: 2(x3),1 is 2, 2, 2 and 1."""
    parts = (re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part) for part in counts.split(","))
    return [int(part[1]) for part in parts if part for _ in range(int(part[2] or 1))]
