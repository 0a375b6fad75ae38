"""ShardTarget: where to_hash writes its signature shards, and which of those that are there are stale."""

from dataclasses import dataclass
from pathlib import Path

from dedup.candidates.signature_shards import SUFFIX
from gristmill.io.documents import CorpusFile, source_folder
from gristmill.io.files import clear_marks
from gristmill.io.readers import Slice


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

    def clear_marks(self, files: list[CorpusFile], stage: str) -> None:
        """Remove marks of interrupted runs of parts of the files, which a run of all files has completed."""
        for folder in {self.folder, *(self.folder / file.source for file in files)}:
            clear_marks(folder, stage)
