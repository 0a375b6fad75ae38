"""Traffic: the collectives and bytes of a training step of any layout, by the papers' formulas.

Each kind's formula is in its folder. They use nothing of the code that they predict, but what the options say: sizes,
the stages' layers, the order of passes.
"""

from training.model.model_config import ModelConfig
from training.parallel.context.traffic import context_traffic
from training.parallel.data.traffic import data_traffic
from training.parallel.experiment import experiment_of
from training.parallel.expert.traffic import expert_traffic
from training.parallel.layout import Layout
from training.parallel.parameter_shapes import ParameterShape, stage_parameters
from training.parallel.pipeline.traffic import pipeline_traffic
from training.parallel.tensor.traffic import tensor_traffic
from training.parallel.traffic_inputs import Traffic, TrafficInputs, add_traffic


def expected_traffic(inputs: TrafficInputs) -> Traffic:
    """Return this rank's traffic of one step, from the forward pass to the updated parameters."""
    experiment = experiment_of(inputs.layout)
    of_tensor = experiment.tensor_traffic(inputs)
    of_data = experiment.reduction_traffic(inputs)
    return add_traffic([
        tensor_traffic(inputs) if of_tensor is None else of_tensor,
        context_traffic(inputs),
        expert_traffic(inputs),
        data_traffic(inputs) if of_data is None else of_data,
        pipeline_traffic(inputs),
    ])  # fmt: skip


def rank_parameters(
    model: ModelConfig, layout: Layout, layers: range, stage: int, tp_rank: int = 0
) -> list[ParameterShape]:
    """Return the parameters of a stage, in the order of the forward pass; of a vocabulary rank 0 has the most."""
    other = experiment_of(layout).parameters(model, layers, stage, tp_rank)
    if other is not None:
        return other
    return stage_parameters(model, layers, stage == 0, stage == layout.stages - 1, layout.tp, tp_rank, layout.ep)
