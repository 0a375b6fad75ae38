"""AdamW over the shards that a rank updates, in buckets, with moments in memory or on disk."""

from collections.abc import Sequence

import torch
from torch import Tensor

from training.optim.flat_buckets import Bucket, ParamsInPlace, ParamsStagedOnCPU, plan_buckets
from training.optim.moments import MomentsInMemory, MomentsOnDisk
from training.optim.optim_config import OptimConfig
from training.optim.optimizer import AfterUpdate, Optimizer, OptimizerContext, unique_params
from training.sharding.sharded_parameter import ShardedParameter


class AdamW(Optimizer):
    """AdamW (Loshchilov & Hutter 2019, algorithm 2); the parts of the model that `config` names decay.

    `moments` stores the states, `values` fetches a bucket's parameters and gradients. Bitwise equal to
    torch.optim.AdamW(fused=True), for any sharding and any buckets.
    """

    def __init__(
        self,
        params: Sequence[ShardedParameter],
        config: OptimConfig,
        buckets: list[Bucket],
        moments: MomentsInMemory | MomentsOnDisk,
        values: ParamsInPlace | ParamsStagedOnCPU,
        after_update: AfterUpdate | None = None,
    ) -> None:
        super().__init__(params, after_update)
        self.config = config
        self.buckets = buckets
        self._moments = moments
        self._values = values
        self._decays = [config.decays(param.name, param.spec.global_shape) for param in self.unique]

    def _update(self, lr: float) -> None:
        self._prefetch(0)
        for index, bucket in enumerate(self.buckets):
            self._prefetch(index + 1)  # overlaps with the update of this one
            tensors = list(zip(*self._values.get(index), *self._moments.get(index), strict=True))
            for decays in (True, False):
                chosen = [t for t, s in zip(tensors, bucket.slices, strict=True) if self._decays[s.param] is decays]
                if chosen:
                    self._fused_adamw(chosen, lr, self.config.weight_decay if decays else 0.0)
            self._values.write_back(index)
            self._moments.write_back(index)
            for s in bucket.slices:
                self.after_update(self.unique[s.param], s.start, s.start + s.numel)
        self._values.finish()
        self._moments.finish()

    def _prefetch(self, index: int) -> None:
        if index < len(self.buckets):
            self._values.prefetch(index)
            self._moments.prefetch(index)

    def _fused_adamw(self, tensors: Sequence[tuple[Tensor, ...]], lr: float, decay: float) -> None:
        """Update tuples of (value, gradient, first moment, second moment) in place, of one dtype and device.

        Calls torch's kernel directly: torch.optim groups tensors by dtype and device at every step, which takes as
        long as the update of a small model.
        """
        values, gradients, first, second = (list(column) for column in zip(*tensors, strict=True))
        # filled on the device: a copy from the CPU would wait for it
        steps = [torch.full((), float(self.updates), device=values[0].device)] * len(values)
        beta1, beta2 = self.config.betas
        torch._fused_adamw_(
            values, gradients, first, second, [], steps, amsgrad=False, maximize=False,
            beta1=beta1, beta2=beta2, lr=lr, weight_decay=decay, eps=self.config.eps,
        )  # fmt: skip

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """`exp_avg` and `exp_avg_sq` of every parameter, zeros before the first step.

        On disk, the tensors are memory maps of the files.
        """
        flat = self._moments.flat_states()
        moments = {}
        for param in self.params:
            if not param.local.numel():
                moments[param.name] = {name: torch.empty_like(param.local.detach()) for name in flat}
        for param, start in zip(self.unique, self._flat_starts(), strict=True):
            shape = param.local.shape
            stop = start + param.local.numel()
            moments[param.name] = {name: values[start:stop].view(shape) for name, values in flat.items()}
        return moments

    def _flat_starts(self) -> list[int]:
        """Start of each parameter in the flat buffer, in elements."""
        starts: dict[int, int] = {}
        for bucket in self.buckets:
            for s in bucket.slices:
                starts.setdefault(s.param, bucket.start + s.offset)
        return [starts[i] for i in range(len(self.unique))]

    def close(self) -> None:
        self._moments.close()


def build_adamw(params: Sequence[ShardedParameter], context: OptimizerContext) -> AdamW:
    """Build AdamW with its moments in the storage of `memory.optimizer`. Raises OutputError if the disk is full."""
    memory = context.memory
    unique = unique_params(params)
    kinds = {(param.local.dtype, param.local.device) for param in unique} or {(torch.float32, torch.device("cpu"))}
    assert len(kinds) == 1, f"the parameters differ in dtype or device: {kinds}"
    dtype, device = kinds.pop()
    staged = memory.optimizer != "device" and device.type != "cpu"
    in_buckets = staged or memory.optimizer == "disk" or context.after_update is not None
    total, buckets = plan_buckets(
        [param.local.numel() for param in unique], context.bucket_numel if in_buckets else None
    )
    values = ParamsStagedOnCPU(unique, buckets, dtype) if staged else ParamsInPlace(unique, buckets)
    moments: MomentsInMemory | MomentsOnDisk
    if memory.optimizer == "disk":
        assert memory.folder is not None, "memory.folder must be set"
        moments = MomentsOnDisk(memory.folder / f"rank-{context.rank:05d}", total, buckets, dtype)
    else:
        moments = MomentsInMemory(total, buckets, dtype, torch.device("cpu") if staged else device)
    return AdamW(params, context.config, buckets, moments, values, context.after_update)
