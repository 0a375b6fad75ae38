"""RendezvousReplicas: a replica that is a run of its own, and meets the others in a folder after its local steps."""

import json
import sys
from typing import Any

import torch
from torch import Tensor

from gristmill.errors import require
from training.checkpoint.record import CheckpointRecord
from training.distributed.process_group import main_only
from training.distributed.stop_signals import StopSignals
from training.experimental.local_steps.rendezvous import Rendezvous, ReplicaRanks
from training.experimental.local_steps.rendezvous_folder import Start
from training.experimental.local_steps.replicas import LocalReplicas
from training.experimental.local_steps.replicas_config import ReplicasConfig
from training.optim.optim_config import OptimConfig
from training.optim.optimizer import Optimizer
from training.parallel.parallel_model import ParallelModel


class RendezvousReplicas(LocalReplicas):
    """One of `config.count` replicas; all ranks of this run train it, as any layout does.

    Where others went on without it, it takes their shared weights and their step, and keeps its moments. `round`: the
    last one after which it has the shared weights; a checkpoint that a signal asked for may be before a round.
    """

    def __init__(
        self,
        config: ReplicasConfig,
        options: OptimConfig,
        model: ParallelModel,
        optimizer: Optimizer,
        common: dict[str, Any],
    ) -> None:
        """`common`: what all replicas must have in common."""
        super().__init__(config.local_steps, options, model, optimizer)
        self.config = config
        world = model.world
        self.rendezvous = Rendezvous(config, ReplicaRanks(world.rank, world.size, main_only, world.all_reduce))
        self.common = common
        self.steps = options.steps
        self.round = 0
        self.run = ""
        self.lengths = {"optim.steps": options.steps, "optim.decay_steps": options.last_decay_step}
        self.lengths |= {"optim.cooldown_steps": options.cooldown_steps}

    def close(self) -> None:
        self.rendezvous.close()

    @torch.no_grad()
    def after_step(self, step: int) -> int:
        """After every `local_steps` steps meet the others; returns the step to go on after."""
        if step % self.local_steps:
            return step
        self.model.finish_all_gather()
        step = self._meet(step // self.local_steps)
        self.optimizer.copy_tied()
        self.model.start_all_gather()
        return step

    def _meet(self, number: int) -> int:
        """Meet the others at round `number`, or take what they shared by then; returns the step to go on after."""
        if (last := self.rendezvous.last_shared()) >= number:
            return self._follow(last)
        self._leave_shared(last)
        gradients = self.outer.gradients()
        members = self.rendezvous.exchange(number, gradients, self.rendezvous.fingerprint(self._shared()))
        if members is None:
            return self._leave(number)
        if not members:
            return self._follow(self.rendezvous.last_shared(number))
        self.outer.update(gradients)
        self.round = number
        if self.config.number not in members:
            self.rendezvous.announce(number + 1)
        if members[0] == self.config.number:
            self._leave_shared(last)
        return number * self.local_steps

    def _leave_shared(self, last: int) -> None:
        """Leave the shared weights if none of this round or a later one are there: their writer may be dead."""
        if last < self.round:
            self.rendezvous.write_shared(self.round, self._shared())

    def _follow(self, number: int) -> int:
        """Take the weights that the others shared after round `number`; returns its step."""
        self.rendezvous.read_shared(number, self._shared())
        self.outer.give_shared()
        self.round = number
        if number * self.local_steps < self.steps:
            self.rendezvous.announce(number + 1)
        return number * self.local_steps

    def _leave(self, number: int) -> int:
        """Leave a round that is not decided yet, with a checkpoint; without one before the end of the run."""
        self.wants_stop = True
        if number * self.local_steps >= self.steps:
            self._exit()  # resumed, the run would have no step to take; it meets again after those since its last one
        return number * self.local_steps

    def _exit(self) -> None:
        sys.exit(128 + self.model.world.all_reduce_max(self.stop.received))

    def _shared(self) -> list[Tensor]:
        return [*self.outer.shared.values(), *self.outer.momenta.values()]

    @torch.no_grad()
    def after_load(self, step: int, stored: CheckpointRecord | None, stop: StopSignals) -> int:
        super().after_load(step, stored, stop)
        self.stop = self.rendezvous.stop = stop
        layout = stored.layout if stored else {}
        layout = layout if layout.get("local_steps") == self.local_steps else {}
        self.round = int(layout.get("round", step // self.local_steps))
        start = Start(layout.get("meeting", ""), self.round, self.rendezvous.fingerprint(self._shared()))
        self.run, last = self.rendezvous.join(self.common, self.lengths, start)
        is_done = last * self.local_steps >= self.steps
        require(
            not is_done or bool(start.run),
            f"the replicas that met in {self.config.folder} are done, after round {last}, and their checkpoints have "
            "the weights; try another --replicas.folder for a new run, or a higher --optim.steps for all of them",
        )
        if is_done:
            return step  # it takes the last weights after its next local steps
        if last > self.round:
            step = self._follow(last)
            self.note = (
                f"joins the replicas in {self.config.folder} at step {step}, with their weights instead of its own, or "
                "those of --init_from or --branch_from"
            )
        else:
            self._leave_shared(last)
            step = self._meet_again(step)
        self.optimizer.copy_tied()
        return step

    def _meet_again(self, step: int) -> int:
        """Come to the round that this replica left before it was decided; else say that it will come to the next."""
        if self.round < step // self.local_steps:
            step = self._meet(step // self.local_steps)
            if self.wants_stop:
                self._exit()  # the checkpoint is as it was
        elif step < self.steps:
            self.rendezvous.announce(step // self.local_steps + 1)
        return step

    def record(self) -> dict[str, Any]:
        return {"local_steps": self.local_steps, "local_replicas": 1, "meeting": self.run, "round": self.round}


def common_to_all(identity: dict[str, Any], layout: dict[str, Any]) -> dict[str, Any]:
    """Return what replicas of one run share of the identity of a run and its layout: as JSON has it."""
    own = {key: value for key, value in identity.items() if key != "replicas.number"}
    common: dict[str, Any] = json.loads(json.dumps({**own, "layout": layout}, default=str))
    return common
