"""Traffic: the collectives and bytes of a training step of any layout, by the papers' formulas.

Each kind's formula is in its folder. They use nothing of the code that they predict, but what the options say: sizes,
the stages' layers, the order of passes.
"""

from training.parallel.context.traffic import context_traffic
from training.parallel.data.traffic import data_traffic
from training.parallel.expert.traffic import expert_traffic
from training.parallel.pipeline.traffic import pipeline_traffic
from training.parallel.tensor.traffic import tensor_traffic
from training.parallel.traffic_inputs import Traffic, TrafficInputs, add_traffic, formulas_of


def expected_traffic(inputs: TrafficInputs) -> Traffic:
    """Return this rank's traffic of one step, from the forward pass to the updated parameters."""
    experiment = formulas_of(inputs.layout)
    of_tensor, of_data = experiment.tensor_traffic(inputs), experiment.reduction_traffic(inputs)
    return add_traffic([
        tensor_traffic(inputs) if of_tensor is None else of_tensor,
        context_traffic(inputs),
        expert_traffic(inputs),
        data_traffic(inputs) if of_data is None else of_data,
        pipeline_traffic(inputs),
    ])  # fmt: skip
