"""RemoteRun: a run whose --out_dir is in a bucket, with a working copy on each machine.

REMOTE/checkpoints/step-00000200/   files of a checkpoint; its record.json, which has their SHA-256, is written last
REMOTE/checkpoints/latest           name of the checkpoint to resume from, written after that
REMOTE/run.json, metrics.jsonl, …   the other files of the run, written with each checkpoint
REMOTE/.lock                        the lease of the run that writes there

A run begins with the bucket's files, whatever the working copy had: it may resume on other machines. The latest
checkpoint is found by its name in `latest`; only where that one is damaged are the others listed.
"""

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gristmill.errors import InputError, OutputError, wrap_write_errors
from gristmill.paths import spell_urls
from gristmill.storage.files import FileInfo, download, list_level, read_file, remove_folder, upload_files, write_file
from gristmill.storage.local import PARTIAL, atomic_write_bytes, locked, partial_path, sha256_file
from gristmill.storage.lock import Lease, is_locked
from gristmill.storage.stores import store_of
from training.checkpoint.checkpoint_group import CheckpointGroup
from training.checkpoint.record import RECORD, CheckpointRecord, encode_record, read_record
from training.checkpoint.run_file import CHECKPOINTS, LATEST, RUN

_LOCK = ".lock"
_KNOWN = ".remote.json"  # in the working copy: versions of the bucket's files that it has
_FILES_AT_A_TIME = 8
_WAIT_SECONDS = 20.0  # of one rank for its files, between two messages to the others: below every timeout
_LEASES = 1.6  # times of a lease that a run waits for the one before it, which may have been killed
_POLLS = 30  # of a lease in its time
_LOCAL_ONLY = ("packing-", "offload", "wandb", "mlruns")  # beginnings of names that are not written to the bucket
_RUNS = "gristmill-runs"  # in the folder for temporary files
_READ = "gristmill-checkpoints"
_RECORDS = "gristmill-records"


@dataclass
class RemoteRun:
    """The run in `remote`, a folder in a bucket; `local` is its working copy on this machine."""

    remote: Path
    local: Path
    say: Callable[[str], None] = print
    _lease: Lease | None = field(default=None, init=False)
    _loaded: str = field(default="", init=False)  # name of the checkpoint that the run resumed from
    _is_first: bool = field(default=True, init=False)  # the next checkpoint is this start's first

    @classmethod
    def of(cls, remote: Path, folder: Path | None = None) -> "RemoteRun":
        """Return the run in a bucket's folder, with its working copy in `folder`, or where temporary files are."""
        return cls(remote, (folder or Path(tempfile.gettempdir()) / _RUNS) / _key(remote))

    def fetch(self, checkpoint: str = "") -> None:
        """Make the working copy what the bucket has: the run's files, and its latest checkpoint, or the one named.

        Every process of a machine calls it, before one of them writes; the first does the work. Raises OutputError
        where a run is writing the working copy, InputError where no checkpoint is intact.
        """
        with locked(self.local.with_name(f"{self.local.name}.lock")), wrap_write_errors(self.local):
            lock = self.local / _LOCK
            if lock.exists() and is_locked(lock):
                raise OutputError(f"{self.remote} is in use by another training run of this machine; wait for its end")
            _, files = list_level(self.remote)
            if RUN not in files:  # a new run
                shutil.rmtree(self.local, ignore_errors=True)
            self.local.mkdir(parents=True, exist_ok=True)
            self._fetch_files({name: info for name, info in files.items() if name != _LOCK})
            self._fetch_checkpoint(checkpoint)

    def fetch_records(self) -> None:
        """Make the working copy what the bucket has, but for weights: the run's files, and its checkpoint's record."""
        with locked(self.local.with_name(f"{self.local.name}.lock")), wrap_write_errors(self.local):
            self.local.mkdir(parents=True, exist_ok=True)
            self._fetch_files({name: info for name, info in list_level(self.remote)[1].items() if name != _LOCK})
            shutil.rmtree(self.local / CHECKPOINTS, ignore_errors=True)
            name = self._latest_name()
            if name:
                content = read_file(self.remote / CHECKPOINTS / name / RECORD)
                (self.local / CHECKPOINTS / name).mkdir(parents=True)
                (self.local / CHECKPOINTS / name / RECORD).write_bytes(content)
                (self.local / CHECKPOINTS / LATEST).write_text(name)

    def _fetch_files(self, files: dict[str, FileInfo]) -> None:
        """Fetch the run's files that differ, and remove those that the bucket has not."""
        known = self._known()
        for path in self.local.iterdir():
            if path.is_file() and path.name not in files and not path.name.startswith("."):
                path.unlink()
        for name, info in files.items():
            if known.get(name) != info.e_tag or not (self.local / name).is_file():
                partial = partial_path(self.local / name)
                download(self.remote / name, partial)
                partial.replace(self.local / name)
                known[name] = info.e_tag
        self._remember(known)

    def _known(self) -> dict[str, str]:
        path = self.local / _KNOWN
        known: dict[str, str] = json.loads(path.read_bytes()) if path.is_file() else {}
        return known

    def _remember(self, known: dict[str, str]) -> None:
        atomic_write_bytes(self.local / _KNOWN, json.dumps(known).encode())

    def _fetch_checkpoint(self, given: str) -> None:
        """Fetch the named checkpoint, or the latest one that is intact; remove other copies."""
        folder = self.local / CHECKPOINTS
        latest = given or self._latest_name()
        fault = ""
        for name in self._candidates(latest, only=bool(given)):
            fault = self._fetch_one(name)
            if not fault:
                self._loaded = name
                atomic_write_bytes(folder / LATEST, name.encode())
                return
            self.say(spell_urls(f"checkpoint {self.remote / CHECKPOINTS / name} cannot be used ({fault})"))
        shutil.rmtree(folder, ignore_errors=True)
        if fault:
            raise InputError(
                f"the checkpoint {self.remote / CHECKPOINTS / latest} cannot be used ({fault}), and there is none "
                f"before it; restore it from a copy, or remove {self.remote / CHECKPOINTS} to start over"
            )

    def _candidates(self, latest: str, only: bool) -> Iterator[str]:
        """Yield the latest checkpoint's name, then those of earlier ones, which are listed if they are asked for."""
        if latest:
            yield latest
            if not only:
                yield from sorted((name for name in self._names() if name < latest), reverse=True)

    def _latest_name(self) -> str:
        try:
            return read_file(self.remote / CHECKPOINTS / LATEST).decode(errors="replace").strip()
        except FileNotFoundError:
            return ""

    def _names(self) -> list[str]:
        return [name for name in list_level(self.remote / CHECKPOINTS)[0] if name.startswith("step-")]

    def _fetch_one(self, name: str) -> str:
        """Fetch a checkpoint, unless its copy is there; return what is wrong with it, or nothing."""
        source = self.remote / CHECKPOINTS / name
        copy = self.local / CHECKPOINTS / name
        try:
            content = read_file(source / RECORD)
        except FileNotFoundError:
            return f"{RECORD} is missing"
        if (copy / RECORD).is_file() and (copy / RECORD).read_bytes() == content:
            return ""
        shutil.rmtree(self.local / CHECKPOINTS, ignore_errors=True)
        partial = partial_path(copy)
        partial.mkdir(parents=True)
        (partial / RECORD).write_bytes(content)
        record, fault = read_record(partial)
        if record is None:
            return fault

        def fetch(file: str, digest: str) -> str:
            try:
                download(source / file, partial / file)
            except FileNotFoundError:
                return f"{file} is missing"
            return "" if sha256_file(partial / file) == digest else f"{file} is damaged"

        with ThreadPoolExecutor(_FILES_AT_A_TIME) as pool:
            faults = list(filter(None, pool.map(fetch, record.files.keys(), record.files.values())))
        if faults:
            return faults[0]
        partial.replace(copy)
        return ""

    @contextmanager
    def lease(self) -> Iterator[None]:
        """Context: this run alone writes to the bucket's folder. Raises OutputError where another one does."""
        lease = Lease(self.remote / _LOCK)
        until = time.monotonic() + _LEASES * lease.seconds
        has_waited = False
        while not lease.acquire():
            if not has_waited:
                has_waited = True
                self.say(f"waiting for {lease.holder}, which has written to this --out_dir and may have been killed")
            if time.monotonic() > until:
                raise OutputError(
                    f"{self.remote} is in use by another training run ({lease.holder}); wait for its end, or try "
                    "another --out_dir"
                )
            time.sleep(lease.seconds / _POLLS)
        self._lease = lease
        try:
            yield
        finally:
            lease.release()

    def publish(
        self,
        record: CheckpointRecord,
        temporary: Path,
        names: list[str],
        group: CheckpointGroup,
        keep: Callable[[list[str]], list[str]],
    ) -> None:
        """Write a checkpoint of which each rank has files called `names` in `temporary`: whole, or not at all.

        `keep` returns which of the checkpoints of these names are kept. Every rank calls it. Raises OutputError or
        StorageError on all of them.
        """
        target = self.remote / CHECKPOINTS / temporary.name.removesuffix(PARTIAL)
        copies = {target / name: temporary / name for name in names}
        with ThreadPoolExecutor(1, "upload") as thread:
            upload = thread.submit(upload_files, copies)
            while not all(group.gather(lambda: _is_done(upload))):
                pass
        group.main_only(lambda: self._commit(record, target, keep))
        shutil.rmtree(self.local / CHECKPOINTS, ignore_errors=True)

    def _commit(self, record: CheckpointRecord, target: Path, keep: Callable[[list[str]], list[str]]) -> None:
        """Write the record of a checkpoint whose files are there, name it as the latest, and remove others."""
        self._check_lease()
        write_file(target / RECORD, encode_record(record))
        self.write_files()
        self._check_lease()
        write_file(self.remote / CHECKPOINTS / LATEST, target.name.encode())
        names = sorted(self._names())
        later = [name for name in names if name > self._loaded] if self._is_first else []
        others = [name for name in names if name != target.name]
        kept = {target.name, *keep([name for name in others if name not in later])}
        for name in others:
            if name not in kept:
                remove_folder(self.remote / CHECKPOINTS / name)
        self._is_first = False

    def write_files(self) -> None:
        """Write the run's files that have changed to the bucket; of a file of JSON lines the whole ones."""
        known = self._known()
        changed: dict[Path, Path] = {}
        with tempfile.TemporaryDirectory(prefix="gristmill-") as folder:
            for path in self._own_files():
                name = path.relative_to(self.local).as_posix()
                copy = Path(folder) / f"{len(changed)}"
                data = path.read_bytes()
                if path.suffix == ".jsonl":  # another thread may be writing a line
                    data = data[: data.rfind(b"\n") + 1]
                digest = hashlib.sha256(data).hexdigest()
                if known.get(f"sha256 {name}") != digest:
                    copy.write_bytes(data)
                    changed[self.remote / name] = copy
                    known[f"sha256 {name}"] = digest
            for target, info in upload_files(changed).items():
                known[str(target.relative_to(self.remote))] = info.e_tag
        self._remember(known)

    def _own_files(self) -> Iterator[Path]:
        for path in sorted(self.local.rglob("*")):
            first = path.relative_to(self.local).parts[0]
            is_local = first.startswith((".", *_LOCAL_ONLY)) or first == CHECKPOINTS
            if path.is_file() and not is_local and not path.name.endswith(PARTIAL):
                yield path

    def _check_lease(self) -> None:
        assert self._lease is not None, "a run holds the lease before it writes"
        self._lease.check()


def _key(remote: Path) -> str:
    return hashlib.sha256(str(store_of(remote).resolve(remote)).encode()).hexdigest()[:16]


def _is_done(upload: "Future[dict[Path, FileInfo]]") -> bool:
    """Wait a while for an upload; raise what it raised."""
    wait([upload], _WAIT_SECONDS)
    if upload.done():
        upload.result()
    return upload.done()


def local_copy(folder: Path) -> Path:
    """Return a folder of this machine with the checkpoint that is in `folder`, fetched if that is in a bucket.

    `folder` is a checkpoint, a folder of checkpoints, or a run's --out_dir. Raises InputError for a damaged one.
    """
    if not store_of(folder).needs_copies:
        return folder
    name = folder.name if folder.name.startswith("step-") else ""
    run = folder.parent if name else folder
    run = run.parent if run.name == CHECKPOINTS else run
    source = RemoteRun.of(run, Path(tempfile.gettempdir()) / _READ)
    source.fetch(name)
    return source.local / CHECKPOINTS / name if name else source.local


def local_records(run: Path) -> Path:
    """Return a folder of this machine with a run's files and the record of its latest checkpoint, without weights."""
    if not store_of(run).needs_copies:
        return run
    source = RemoteRun.of(run, Path(tempfile.gettempdir()) / _RECORDS)
    source.fetch_records()
    return source.local
