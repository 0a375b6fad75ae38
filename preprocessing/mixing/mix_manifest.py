"""mix.json: how a mix was decided, and which file has the decisions on which documents."""

from pathlib import Path

import msgspec

from gristmill.errors import InputError, UsageError
from gristmill.io.documents import label_of
from gristmill.io.facts import SUFFIX, WrittenSlice
from gristmill.storage.files import is_file, read_file
from gristmill.storage.local import atomic_write_bytes

MIX_MANIFEST = "mix.json"
ORDER = "order.json"


class DecisionsFile(msgspec.Struct, forbid_unknown_fields=True):
    """A file of decisions: its path below the folder, the documents that it is about, and bytes of text decided on.

    Bytes count a document as often as it is in the train set, or once in the holdout.
    """

    path: str
    slices: list[WrittenSlice]
    train_bytes: int
    holdout_bytes: int


class BandShare(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The documents of a source in a band that are not dropped, and their weight: the source's times the band's."""

    source: str
    band: str
    weight: float
    documents: int

    @property
    def label(self) -> str:
        """Return its name among the sources of tokens: SOURCE/BAND."""
        return label_of(self.source, self.band)

    @property
    def mixed(self) -> int:
        """Return how many documents of the mix it makes, copies included."""
        return round(self.weight * self.documents)


class MixManifest(msgspec.Struct, forbid_unknown_fields=True):
    """How a mix was decided; `files` are the decisions, in the order of keys, `bands` those of a score, if it has any.

    The weight of a source with bands is that of all its documents together.
    """

    seed: int
    weights: dict[str, float]
    holdout: float
    files: list[DecisionsFile]
    bands: list[BandShare] = []

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

    @property
    def labels(self) -> list[str]:
        """Return the names of the sources of tokens, in order: the labels of bands, if the mix has any."""
        return sorted({share.label for share in self.bands} or self.weights)

    @property
    def train_bytes(self) -> int:
        """Return the bytes of text in the train set, copies included."""
        return sum(file.train_bytes for file in self.files)

    @property
    def text_bytes(self) -> int:
        """Return the bytes of text in the train set, copies included, and in the holdout."""
        return self.train_bytes + sum(file.holdout_bytes for file in self.files)


class OrderRecord(msgspec.Struct, forbid_unknown_fields=True):
    """order.json: into how many parts the tokens of a mix were shuffled; with mix.json the place of each document."""

    parts: int


def write_order(record: OrderRecord, path: Path) -> None:
    """Task: write order.json."""
    atomic_write_bytes(path, msgspec.json.encode(record) + b"\n")


def read_order(folder: Path) -> OrderRecord:
    """Read order.json in a folder that encode wrote. UsageError if there is none, InputError if it is damaged."""
    path = folder / ORDER
    if not is_file(path):
        raise UsageError(f"{folder} holds no {ORDER}: expected the folder that encode wrote")
    try:
        return msgspec.json.decode(read_file(path), type=OrderRecord)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is damaged ({error}): remove it, and run encode again") from error


def write_mix_manifest(manifest: MixManifest, path: Path) -> None:
    """Task: write mix.json."""
    atomic_write_bytes(path, msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")


def mix_manifest_path(folder: Path) -> Path:
    """Return the path of the manifest in the folder that mix wrote."""
    return folder / MIX_MANIFEST


def decisions_name(facts: str) -> str:
    """Return the path of the decisions on the documents of a file of facts, below the folder that mix wrote."""
    return f"{facts.removesuffix(SUFFIX)}.decisions.parquet"
