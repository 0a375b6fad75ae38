"""ShardTarget: where to_hash writes its signature shards, and which of those that are there are stale."""

from dataclasses import dataclass
from pathlib import Path

from dedup.candidates.signature_shards import SUFFIX
from gristmill.engine.run import StageRun
from gristmill.errors import OutputError
from gristmill.io.documents import CorpusFile, source_folder
from gristmill.io.files import clear_marks
from gristmill.io.readers import Slice
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

    def reject_stale(
        self, run: StageRun, files: list[CorpusFile], chosen: list[CorpusFile], planned: list[Path]
    ) -> None:
        """OutputError if there are shards of files that are gone, or of slices of `chosen` ones that are not `planned`.

        Those of earlier calls for the same share are removed at its end, all others by a call for all files.
        """
        others = {file.name for file in files} - {file.name for file in chosen}
        shards = {absolute(path) for path in walk(self.folder) if path.name.endswith(SUFFIX)}
        unplanned = shards - set(map(absolute, planned)) - set(map(Path, run.ledger.outputs_of_its_own()))
        stale = sorted(path for path in unplanned if self.file_of(path) not in others)
        if stale:
            raise OutputError(
                f"{stale[0]} holds signatures of {self.file_of(stale[0])}, which is gone or has changed, and they "
                f"would be compared too ({len(stale):,} such shards). Run to_hash for all files, or remove them"
            )
