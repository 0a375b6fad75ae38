"""Fake world: one rank of a process group without the others, whose collectives are counted and send nothing."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeWork
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from gristmill_planner.dry_run.meta_operators import MetaOperators
from training.experimental.parallel_config import ParallelConfig
from training.parallel.mesh import World, build_world
from training.parallel.traffic_counter import TrafficCounter

_META, _CPU = torch.device("meta"), torch.device("cpu")
_aten = torch.ops.aten


@contextmanager
def fake_world(layout: ParallelConfig, rank: int) -> Iterator[World]:
    """The world of `rank` in a resolved layout, on the meta device; it lasts as long as the context.

    Its process group is torch's fake one, of all ranks of the layout.
    """
    size = layout.processes
    dist.init_process_group("cpu:fake,meta:fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        group = dist.group.WORLD
        assert group is not None
        group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)  # without one torch warns at the end
        # the mesh's device decides where FSDP allocates, and it knows no meta device: StepOnMeta allocates there
        yield replace(build_world(layout, _CPU), device=_META)
    finally:
        dist.destroy_process_group()


class FakeCollectives(TorchDispatchMode):
    """Context manager in which collectives are not carried out: they leave their tensors as they are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _not_sent(func, args) if func.namespace == "c10d" else func(*args, **(kwargs or {}))


class StepOnMeta(TrafficCounter):
    """Context manager that counts the collectives of a step, which are not carried out.

    Every tensor made in it is on the meta device, wherever it was asked for. A number that another rank would have
    sent is 1: torch's pipeline stages vote that all of them know the shapes of what they pass on.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self._operators = MetaOperators()
        self._patches = ExitStack()

    def __enter__(self) -> "StepOnMeta":
        # FSDP refuses to run without memory, and from torch 2.15 on asks a CPU's stream for its number
        self._patches.enter_context(patch.object(FSDPParamGroup, "_validate_no_meta_params", lambda _: None))
        if torch.__version__ >= "2.15":
            self._patches.enter_context(patch.object(_fsdp_collectives, "record_grad_output_stream", lambda *_: None))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.count(func, args, kwargs)
            return _not_sent(func, args)
        if func is _aten._local_scalar_dense.default and args[0].is_meta:
            return 1
        if func is _aten.lift_fresh.default:
            return torch.empty_like(args[0], device=_META)
        kwargs = kwargs or {}
        if kwargs.get("device") == _CPU:
            kwargs = {**kwargs, "device": _META}
        return self._operators.call(func, args, kwargs)

    def _count(self, name: str, arguments: list[Any]) -> None:
        sent = [a for a in arguments if isinstance(a, Tensor)]
        if any(a.is_floating_point() or a.numel() > 1 for a in sent):  # not the vote; a grid's rows exchange ids
            super()._count(name, arguments)


def _not_sent(func: Any, args: Any) -> Any:
    """What a collective returns: its work, and if it has outputs those too."""
    work = FakeWork().boxed()
    return work if len(func._schema.returns) == 1 else (args[0], work)
