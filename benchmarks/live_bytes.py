"""Live bytes: follows every tensor storage of a process from its creation to its end, by kind, and finds the peaks."""

import weakref
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GRADIENTS, GATHERED, LOGITS, ACTIVATIONS = "gradients", "gathered", "logits", "activations"
COMMUNICATION = "communication"
_MARK = -1  # stands for a storage's number in the list of events


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that follows the storages of the results of all operations.

    A storage has a kind, given to it at any time of its life and then its own from the beginning: gradients and
    gathered parameters are recognised by the operations that move them, others are told by `tag`. What has none and is
    alive at a `mark` is an activation; anything else is at work in an operation, and counts in the total only.
    """

    def __init__(self, data_parallel: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        """`data_parallel`: names of the process groups that reduce gradients and gather parameters."""
        super().__init__()
        self.calls: Counter[str] = Counter()
        self._data_parallel = data_parallel
        self._number: dict[int, int] = {}  # of a storage that is alive, by its address
        self._references: dict[int, Any] = {}  # by number
        self._bytes: Counter[int] = Counter()
        self._kinds: dict[int, str] = {}
        self._events: list[tuple[int, int]] = []  # (number, change of its bytes)
        self._marked = False
        self._shapes: dict[int, torch.Size] = {}  # as it was created

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._poll()
        if self._marked:
            self._events.append((_MARK, 0))
            self._marked = False
        result = operation(*args, **(kwargs or {}))
        self.calls[str(operation)] += 1
        before = len(self._bytes)
        for leaf in _tensors(result):
            self._follow(leaf)
        self._recognise(operation, args, kwargs or {}, result, before)
        return result

    def tag(self, tensor: Tensor, kind: str) -> None:
        """Give a storage its kind; the first one stays."""
        self._kinds.setdefault(self._follow(tensor), kind)

    def mark(self) -> None:
        """What is alive when the next operation begins, and has no kind, is kept for the backward pass."""
        self._marked = True

    def begin_loss(self, weight: Tensor) -> None:
        """What appears before `end_loss` is logits if it goes by then, or a gradient in the shape of `weight`."""
        self._loss, self._loss_weight = len(self._bytes), weight.shape

    def end_loss(self) -> None:
        for number in range(self._loss, len(self._bytes)):
            if not self._bytes[number]:
                self._kinds.setdefault(number, LOGITS)
            elif self._shapes[number] == self._loss_weight:
                self._kinds.setdefault(number, GRADIENTS)

    def restart(self) -> None:
        """Forget what happened until now, but not what is alive."""
        self._poll()
        self._events = [(number, size) for number, size in self._bytes.items() if size]

    def total(self) -> int:
        """Bytes that are alive now."""
        self._poll()
        return sum(self._bytes.values())

    def peaks(self) -> dict[str, int]:
        """The largest number of bytes of each kind, each at its own time; "peak": of all of them together.

        But for gloo's copies of what it sends, which its threads make and drop at any time.
        """
        self._poll()
        alive, peaks = Counter[str](), Counter[str]()
        for number, change in self._events:
            kind = self._kinds.get(number, "")
            if number == _MARK:
                peaks[ACTIVATIONS] = max(peaks[ACTIVATIONS], alive[""])
                continue
            alive[kind] += change
            peaks[kind] = max(peaks[kind], alive[kind])
            peaks["peak"] = max(peaks["peak"], alive.total() - alive[COMMUNICATION])
        del peaks[""]
        return dict(peaks)

    def _follow(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        number = self._number.get(storage._cdata)
        if number is None:
            number = self._number[storage._cdata] = len(self._bytes)
            self._bytes[number], self._shapes[number] = 0, tensor.shape
            address = storage._cdata
            self._references[number] = weakref.ref(storage, lambda _: self._end(address, number))
        self._set(number, storage.nbytes())
        return number

    def _set(self, number: int, size: int) -> None:
        if size != self._bytes[number]:
            self._events.append((number, size - self._bytes[number]))
            self._bytes[number] = size

    def _end(self, address: int, number: int) -> None:
        self._set(number, 0)
        self._number.pop(address, None)
        self._references.pop(number, None)

    def _poll(self) -> None:
        """FSDP empties and refills storages behind torch's dispatcher."""
        for number, reference in list(self._references.items()):
            storage = reference()
            if storage is not None:
                self._set(number, storage.nbytes())

    def _recognise(self, operation: Any, args: Any, kwargs: Any, result: Any, before: int) -> None:
        name = operation.overloadpacket.__name__
        every = _tensors((args, kwargs, result))
        if operation.namespace == "fsdp":
            kind = GRADIENTS if name == "chunk_cat" else GATHERED
            for tensor in every if name != "all_gather_copy_in" else _tensors(result):
                self.tag(tensor, kind)
        elif operation.namespace == "c10d" and "alltoall" in name:
            return  # pieces of matrices that Muon is at work on
        elif operation.namespace == "c10d":
            if self._reduces_or_gathers(args, kwargs):
                for tensor in every:
                    self.tag(tensor, GATHERED if "allgather" in name else GRADIENTS)
            elif name in ("_allgather_base_", "_reduce_scatter_base_"):  # gloo's threads hold them for a while
                self.tag(max(every, key=lambda tensor: tensor.nbytes), COMMUNICATION)
        elif name == "split" and before < len(self._bytes):  # gloo reduce-scatters by an all-reduce of a copy
            self.tag(result[0], COMMUNICATION)
        elif name in ("add_", "copy_"):
            kinds = [self._kinds.get(self._follow(tensor)) for tensor in every[:2]]
            if GRADIENTS in kinds:
                for tensor in every[:2]:
                    self.tag(tensor, GRADIENTS)

    def _reduces_or_gathers(self, args: Any, kwargs: Any) -> bool:
        groups = [a for a in tree_leaves((args, kwargs)) if isinstance(a, torch.ScriptObject)]
        names = {dist.ProcessGroup.unbox(g).group_name for g in groups if "ProcessGroup" in str(g._type())}
        return bool(names & self._data_parallel)


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor)]
