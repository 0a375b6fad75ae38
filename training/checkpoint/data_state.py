"""DataState: what a run has read before it starts or resumes, from which its batches go on."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from training.checkpoint.branch import BranchSource
from training.checkpoint.record import CheckpointRecord
from training.checkpoint.run_folder import sizes_of_earlier_release
from training.data.batch_schedule import Sizes
from training.data.batches import Batches
from training.data.data_config import DataConfig
from training.data.mix import MixPlace


@dataclass(frozen=True)
class DataState:
    """What was read in the first `step` steps: batch sizes, the places in data sets, and sequences that were left out.

    `is_anew`: from this step on, other sets, another mix or another seed is read.
    """

    step: int = 0
    sizes: Sizes = ()
    progress: MixPlace = field(default_factory=MixPlace)
    is_anew: bool = False
    skipped: Sizes = ()

    @classmethod
    def of_checkpoint(
        cls, record: CheckpointRecord, stored: Mapping[str, Any], identity: Mapping[str, Any]
    ) -> "DataState":
        """Return the state of a run that resumes from its checkpoint with `record`.

        `stored` is its run.json as it was, `identity` what decides its results now. Raises UsageError where an earlier
        release wrote the checkpoint and the batch size has changed.
        """
        sizes = record.batch_sizes or sizes_of_earlier_release(stored, identity["data.batch_size"])
        return cls(record.step, sizes, record.data.of_run(identity), False, record.skipped)

    @classmethod
    def of_branch(cls, source: BranchSource, identity: Mapping[str, Any]) -> "DataState":
        """Return the state of a new branch, whose results `identity` decides."""
        record = source.record
        progress, is_anew = source.progress(identity)
        return cls(record.step, source.batch_sizes, progress, is_anew, record.skipped)

    def restore(self, batches: Batches, config: DataConfig, skip: int = 0) -> int:
        """Let `batches` go on from here as `config` says, after `skip` steps of data that are left out.

        Return the number of sequences left out.
        """
        batches.plan_sizes(config, self.sizes, self.step)
        count = skip * batches.schedule.size(self.step)
        left_out = [(self.step, count)] if count else []
        batches.resume(self.progress, self.step, self.is_anew, [*self.skipped, *left_out])
        return count
