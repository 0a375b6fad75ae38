"""Ownership: the files that a run of a stage may overwrite and remove: the files that it wrote."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from gristmill.counts import Counts
from gristmill.engine.staleness.done_tasks import DoneTasks, with_rejects
from gristmill.engine.staleness.ledger import Ledger
from gristmill.engine.staleness.records import DoneRecord, OutputRecord, Records, TaskId
from gristmill.engine.task import Task, paths_read_by
from gristmill.errors import OutputError, UsageError
from gristmill.io.files import STATE_DIR
from gristmill.paths import absolute, folders_above, join, name_of
from gristmill.storage.files import exists, is_file, is_folder

READS: TaskId = ("", "reads")  # the record of the inputs
_AHEAD = "about to write"  # begins the names of records of outputs that a step is about to write


class Ownership:
    """The files that a run of a stage may overwrite and remove: the files that its ledger names.

    `reads` are the inputs, `files` the single files that it writes. With `inputs_vary` the inputs are a list that gains
    and loses members from call to call.
    """

    def __init__(
        self, done: DoneTasks, reads: tuple[Path, ...], files: tuple[Path, ...], inputs_vary: bool = False
    ) -> None:
        self.done = done
        self.ledger = done.ledger
        self.reads = reads
        self.files = files
        self.inputs_vary = inputs_vary
        self._inputs = set[str]()  # of all steps so far, without the outputs of earlier ones
        self._ahead = list[TaskId]()  # records of outputs about to be written

    def check_outputs(self, tasks: Sequence[Task]) -> None:
        """Raise UsageError if a task would overwrite an input of the stage."""
        for name in map(name_of, paths_read_by(tasks)):
            if name not in self.done.written:
                self._inputs.add(name)
        for task in tasks:
            for path in task.outputs:
                if name_of(path) in self._inputs:
                    raise UsageError(f"{path} is an input, and would be overwritten: give another output folder")

    def write_ahead(self, step: str, outputs: Sequence[Path]) -> None:
        """Record that a step is about to write `outputs`: if it is killed, the next run knows that they are its own.

        What earlier runs recorded so that did not end stays recorded: this one may not end either, and some of these
        files may be of inputs that are gone. Raises OutputError as `reject_foreign_files`.
        """
        files = with_rejects(map(name_of, outputs))
        self.reject_foreign_files(files)
        task = ("", f"{_AHEAD}: {step}")
        names = dict.fromkeys(map(self.ledger.relative, files))
        if task in self.done.before:
            names |= dict.fromkeys(output.path for output in self.done.before[task].outputs)
        planned = [OutputRecord(name, -1, 0, "") for name in names]
        self.ledger.write(DoneRecord(*task, {}, planned, Counts({}, [])))
        self._ahead.append(task)

    def reject_overlapping_calls(self) -> None:
        """Raise UsageError if a call for the whole work, or for a part of this one's, has written to the output.

        Each call has outputs and a record of its own: of two that overlap, neither would know which files are its.
        """
        for ledger in Ledger.all_in(self.ledger.file.parent):
            is_wider = self.ledger.is_part_of(ledger)
            if (is_wider or ledger.is_part_of(self.ledger)) and ledger.outputs():
                advice = self._other_folder("whole")
                if is_wider:
                    advice = self._other_folder("parts")
                if self.files:
                    advice = "give another output file"
                raise UsageError(
                    f"{self.ledger.root} holds what {ledger.file.stem} wrote, and {self.ledger.file.stem} would do "
                    f"some of the same work again: expected the same calls as before; {advice}"
                )

    def reject_foreign_files(self, names: Iterable[str]) -> None:
        """Raise OutputError if one of some files exists that the stage did not write, as it would be lost.

        All are named as by name_of. What is in a state folder is nobody else's.
        """
        unknown = set[Path]()
        for name in names:
            if name not in self.done.known and f"/{STATE_DIR}/" not in name and self.done.tags.stat(name):
                unknown.add(Path(name))
        if not unknown or self.ledger.is_damaged:
            return
        for ledger in (self.ledger, *self.ledger.siblings):  # maybe by another process since they were read
            unknown -= set(map(Path, ledger.outputs()))
        folders = set[Path]()
        for file in unknown:
            folders.update(folders_above(file))
        unknown -= self.ledger.announced(folders)
        for path in sorted(unknown):
            raise OutputError(
                f"{path} exists, and {self.ledger.file.stem} did not write it: it would be overwritten. Give another "
                "output, or remove it"
            )

    def check_reads(self) -> None:
        """Raise UsageError if another input was read for the present output."""
        if self.inputs_vary and self._reads_an_earlier_input():
            return
        record = self.done.before.get(READS)
        if record is None or self._lacks_files or not has_outputs(self.done.before):
            return
        has_same_tasks = has_outputs(self.done.records)  # an input that is gone has moved
        for number, now in enumerate(self.reads):
            names = record.identity.get(f"input {number}")
            if names is None:
                continue
            relative, earlier = names.split("\0")
            if has_same_tasks and not _exists(Path(earlier)):
                continue
            if relative != self.ledger.relative(now) and earlier != name_of(now):
                raise UsageError(self._refusal(Path(earlier), now))

    def _reads_an_earlier_input(self) -> bool:
        """Return whether one of the recorded inputs is among the present ones."""
        record = self.done.before.get(READS)
        if record is None:
            return False
        earlier_names = set[str]()
        for names in record.identity.values():
            earlier_names.update(names.split("\0"))
        present_names = {*map(self.ledger.relative, self.reads), *map(name_of, self.reads)}
        return not earlier_names.isdisjoint(present_names)

    def record_reads(self, is_changed: bool) -> Records:
        """Record the names of the inputs for check_reads: relative to the output, as both may be moved, and absolute.

        Unless the recorded inputs are still there, and no output `is_changed`: then the present ones are copies.
        """
        identity = dict[str, str]()
        for number, path in enumerate(self.reads):
            identity[f"input {number}"] = f"{self.ledger.relative(path)}\0{name_of(path)}"
        known = self.done.records.get(READS) or self.done.before.get(READS)
        if known and known.identity == identity:
            return {READS: known}
        if known and not is_changed and not self._lacks_files:
            earlier = list[Path]()
            for names in known.identity.values():
                _, path_of_input = names.split("\0")
                earlier.append(Path(path_of_input))
            if all(map(_exists, earlier)):
                return {READS: known}
        record = DoneRecord(*READS, identity, [], Counts({}, []))
        self.ledger.write(record)
        return {READS: record}

    def stale_tasks(self) -> list[TaskId]:
        """Return tasks of earlier runs that this run has not planned."""
        stale = list[TaskId]()
        for task in self.done.before:
            step, _ = task
            if step and task not in self.done.records:
                stale.append(task)
        return stale

    def ahead_records(self) -> list[TaskId]:
        """Return the records of outputs about to be written, by this run or earlier ones that did not end."""
        earlier = [task for task in self.done.before if is_ahead(task)]
        return [*earlier, *self._ahead]

    def stale_files(self) -> list[Path]:
        """Return files of earlier runs, ended or not, that this run does not write, and no other call has written."""
        root = name_of(self.ledger.root)
        stale = set(self.done.earlier)
        for record in self.done.records.values():
            stale.difference_update(join(root, output.path) for output in record.outputs)
        if not stale:
            return []
        stale &= self.ledger.outputs_of_its_own()
        return sorted(filter(is_file, map(Path, stale)))

    def _refusal(self, earlier: Path, now: Path) -> str:
        """Return the message for an output that was made of another input."""
        advice = self._other_folder(absolute(now).name)
        if self.files:
            names = " and ".join(str(path) for path in self.files if is_file(path))
            advice = f"give another output file, or remove {names} first"
        return (
            f"{self.ledger.root} holds what {self.ledger.file.stem} made of {earlier}, and would lose it if {now} were "
            f"read now: {advice}"
        )

    def _other_folder(self, name: str) -> str:
        """Return the advice to give another output folder, such as one whose name ends in `name`."""
        root = self.ledger.root
        folder = root.with_name(f"{root.name}-{name}")  # next to it, as stages read all below it
        return f"give another output folder, such as {folder}, or remove {root} first"

    @property
    def _lacks_files(self) -> bool:
        """Return whether the run writes single files, and none is there."""
        return bool(self.files) and not any(map(is_file, self.files))


def is_ahead(task: TaskId) -> bool:
    """Return whether a record is of outputs that a step was about to write."""
    step, name = task
    return not step and name.startswith(_AHEAD)


def has_outputs(records: Records) -> bool:
    """Return whether a task of a step has written a file."""
    return any(record.outputs for (step, _), record in records.items() if step)


def _exists(path: Path) -> bool:
    """Return whether there is a file or folder of this name; what a stage wrote in a bucket is not listed for it."""
    return is_folder(path / STATE_DIR) or exists(path)
