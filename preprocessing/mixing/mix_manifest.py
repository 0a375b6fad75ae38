"""mix.json: how a mix was decided, and how the corpus was cut into slices for it."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from gristmill.engine.slices import SliceGroup
from gristmill.errors import InputError, UsageError
from gristmill.io.documents import ONE_SLICE, CorpusFile, Cut, Slice, slices_at
from gristmill.storage.files import is_file, read_file
from gristmill.storage.local import atomic_write_bytes

MIX_MANIFEST = "mix.json"


class MixManifest(msgspec.Struct, forbid_unknown_fields=True):
    """How a mix was decided.

    `text_bytes` are the bytes of text of all rows, copies included. `slices` has the label of each slice of the corpus,
    in order, and `cuts` where files of several slices are cut.
    """

    seed: int
    weights: dict[str, float]
    holdout: float
    text_bytes: int
    slices: list[str]
    cuts: dict[str, list[Cut]]

    @classmethod
    def load(cls, folder: Path) -> "MixManifest":
        """Read mix.json; UsageError if there is none, InputError if it is damaged."""
        path = mix_manifest_path(folder)
        if not is_file(path):
            raise UsageError(f"{folder} holds no {MIX_MANIFEST}: expected the folder that mix wrote. Run mix")
        try:
            return msgspec.json.decode(read_file(path), type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is damaged ({error}): remove it, and run mix again") from error

    def cut(self, files: Iterable[CorpusFile], folder: Path) -> list[Slice]:
        """Return the slices of the corpus, as mix cut it. Raises InputError if it has other files than it had then."""
        slices = [part for file in files for part in slices_at(file, self.cuts.get(file.name, ONE_SLICE))]
        labels = [part.label for part in slices]
        if labels != self.slices:
            odd = sorted(set(labels) ^ set(self.slices))
            named = odd[0].rpartition("+")[0] if odd else "its files in another order"
            raise InputError(
                f"{folder} decides on another corpus: expected the files that mix read, got a difference in {named}. "
                "Run mix again"
            )
        return slices


def write_mix_manifest(manifest: MixManifest, path: Path) -> None:
    """Task: write mix.json."""
    atomic_write_bytes(path, msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")


def mix_manifest_path(folder: Path) -> Path:
    """Path of the manifest in the folder that mix wrote."""
    return folder / MIX_MANIFEST


def decisions_path(group: SliceGroup, folder: Path) -> Path:
    """Path of the decisions on the documents of a group."""
    return folder / f"{group[0].label}.decisions.parquet"


def cuts_of(slices: Sequence[Slice]) -> dict[str, list[Cut]]:
    """Return where each file of several slices is cut."""
    by_file: dict[str, list[Cut]] = {}
    for part in slices:
        by_file.setdefault(part.name, []).append(Cut(part.start, part.first_row, part.ranges))
    return {name: cuts for name, cuts in by_file.items() if len(cuts) > 1}
