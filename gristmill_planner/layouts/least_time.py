"""Least time: a bound of the seconds of all layouts of a family, by which a search passes most of them over."""

from gristmill_planner.cost.fitted_constants import Constants
from gristmill_planner.cost.planned_run import PlannedRun
from gristmill_planner.cost.step_time import PassTime, send_time
from gristmill_planner.layouts.candidates import Family
from training.parallel.pipeline.schedules import SPLIT_BACKWARD

_ROUNDING = 1 - 1e-9


def least_time(family: Family, run: PlannedRun, times: tuple[PassTime, PassTime], constants: Constants) -> float:
    """Seconds of a step that no layout of `family` is below, of which `run` has one stage a rank.

    The busiest rank has no fewer layers than an even division gives, and takes no less than the mean. A step takes it
    once a micro-batch, and the other ranks' sum once, or a share of that by the schedule; the more the busiest takes,
    the longer the step. Communication between replicas and the update are left out.
    """
    layer, head = (each.forward + each.backward for each in times)
    layers, pp, count = run.model.layers, run.layout.pp, run.layout.micro_batches
    whole = layers * layer + head
    busiest = max(-(-layers // pp) * layer, whole / pp)
    sent = send_time(run, constants)
    forward = times[0].forward / layer
    share = min((forward if schedule in SPLIT_BACKWARD else 1) / virtual for schedule, virtual in family.schedules)
    waits = share * (whole - busiest + (pp - 1) * sent)
    return _ROUNDING * (count * (busiest + sent) + waits + constants.step)
