"""ShardTarget: where to_hash writes its signature shards, and which of those that are there are stale."""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from dedup.minhash.signature_shards import SUFFIX
from gristmill.engine.run import StageRun
from gristmill.errors import OutputError
from gristmill.io.documents import CorpusFile, source_folder
from gristmill.io.files import clear_marks
from gristmill.io.readers import Slice
from gristmill.storage.files import is_file
from gristmill.storage.names import absolute
from gristmill.storage.walking import walk


@dataclass(frozen=True)
class ShardTarget:
    """Where shards are written: `folder`, in the `root` of all data sets, which has the ledger and the marks.

    `part` is the data set; empty for all, and for a folder of one data set that does not have its name.
    """

    root: Path
    folder: Path
    part: str
    dataset: str

    @classmethod
    def of(cls, dataset: str, input_dir: Path, output_dir: Path) -> "ShardTarget":
        """Of the command line's arguments."""
        if dataset != "all" and output_dir.absolute().name == dataset:
            return cls(output_dir.absolute().parent, output_dir, dataset, dataset)
        if source_folder(input_dir, dataset) != input_dir:
            return cls(output_dir, output_dir / dataset, dataset, dataset)
        return cls(output_dir, output_dir, "", dataset)

    @property
    def prefix(self) -> str:
        """Of the names of the tasks of this part."""
        return f"{self.part}/" if self.part else ""

    def shard(self, part: Slice) -> Path:
        """The path of a slice's shard."""
        name = part.label if self.dataset == "all" else part.label.removeprefix(f"{self.dataset}/")
        return self.folder / f"{name}{SUFFIX}"

    def file_of(self, shard: Path) -> str:
        """The name of the corpus file of a shard, from the shard's path."""
        name = absolute(shard).relative_to(absolute(self.folder)).as_posix().removesuffix(SUFFIX).rpartition("+")[0]
        return name if self.dataset == "all" else f"{self.dataset}/{name}"

    def clear_marks(self, files: list[CorpusFile], stage: str) -> None:
        """Remove marks of interrupted runs of parts of the files, which a run of all files has completed."""
        for folder in {self.folder, *(self.folder / file.source for file in files)}:
            clear_marks(folder, stage)

    def reject_stale(self, files: list[CorpusFile], chosen: list[CorpusFile], planned: list[Path]) -> None:
        """OutputError if there are shards of files that are gone, or of slices of `chosen` ones that are not `planned`.

        A run of all files removes them; a run of a share does not know what other shares are about to write.
        """
        present = {path.absolute(): self.file_of(path) for path in walk(self.folder) if path.name.endswith(SUFFIX)}
        stale = sorted(self._stale(present.keys(), files, chosen, planned))
        if stale:
            raise OutputError(
                f"{stale[0]} holds signatures of {present[stale[0]]}, which is gone or has changed, and they would be "
                f"compared too ({len(stale):,} such shards). Run to_hash for all files, or remove them"
            )

    def forget_removed(
        self, run: StageRun, files: list[CorpusFile], chosen: list[CorpusFile], planned: list[Path]
    ) -> None:
        """Forget the stale shards that were removed, as reject_stale says: later stages are not to miss them."""
        removed = []
        for record in run.all_records().values():
            shards = {path for path in map(run.ledger.path, record.outputs) if path.name.endswith(SUFFIX)}
            if not all(path.is_relative_to(absolute(self.folder)) for path in shards):
                continue  # of another part
            stale = self._stale(shards, files, chosen, planned)
            if stale and shards - stale <= set(map(absolute, planned)) and not any(map(is_file, stale)):
                removed.append(record.id)
        if removed:
            run.ledger.compact((), removed)

    def _stale(
        self, shards: Collection[Path], files: list[CorpusFile], chosen: list[CorpusFile], planned: list[Path]
    ) -> set[Path]:
        """Those of some shards, by absolute paths, that are neither `planned` nor of files that other shares read."""
        others = {file.name for file in files} - {file.name for file in chosen}
        unplanned = set(shards) - set(map(absolute, planned))
        return {path for path in unplanned if self.file_of(path) not in others}
